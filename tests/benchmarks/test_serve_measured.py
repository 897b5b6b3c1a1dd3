"""Serving's equality is counted on a small server, and figures of serving become tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import serve_equality, serve_load, table_forms
from spd.cli.commands.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("keep_threads")


def test_a_server_says_what_generate_says() -> None:
    """While others leave; a text that is another one is counted."""
    chats = serve_equality.make_chats(4, 3, 0.8, 24)
    right = serve_equality.generated("demo", chats, 1)
    options = ServeOptions(
        model="demo", ctx=serve_equality.CTX, concurrency=4, threads=1, adaptive=False, spec="mtp"
    )
    wrong = [(right[0][0] + ".", right[0][1]), *right[1:]]
    found = serve_equality.run_cell(options, chats, wrong)
    assert (found["tokens"], found["differ"], found["still_open"]) == (96, 24, 0)


FOUND = {
    "requests": {"successful": 3, "errored": 1},
    "ttft_ms": {"p50": 10.0, "p99": 20.0},
    "itl_ms": {"p50": 1.0, "p99": 2.0},
    "tokens_per_second": 99.5,
}
MACHINE = {"cores": 2, "cpu": "AMD EPYC", "cpu_features": ["avx2"]}
MEDIAN = {"median": 1.02, "values": [1.0] * 20}


def test_tables() -> None:
    shown: dict[str, Any] = {
        "rates": [{"rate": 4, **FOUND}],
        "overhead": {"demo": {"served_over_bare": MEDIAN, "cpu_us_an_event": {"median": 50.0}}},
        "peer": {"spd": FOUND, "vllm": {"failed": "it did"}},
        "warm": {"warm": MEDIAN, "cold": MEDIAN},
        "together": 16,
        "machine": MACHINE,
    }
    text = table_forms.serve_load(shown)
    assert text is not None and "| demo, 4 requests/s | 100 | 10.0 | 20.0 | 1.0 | 2.0 | 1 |" in text
    assert "0.35 B, 16 clients, spd" in text and "vLLM" not in text and "1.020 of the bare" in text
    del shown["warm"]
    assert table_forms.serve_load(shown) is None
    cell = {"tokens": 1000, "differ": 0, "left": 3, "interrupted": 2, "still_open": 0}
    equal = {"cells": {"demo/off/T0": cell, "demo/mtp/T0": cell}, "machine": MACHINE}
    assert "| `demo` | 0 | 6 | 4 | 0 of 2,000 |" in table_forms.serve_equality(equal)


def test_figures_of_a_load() -> None:
    percentiles = {"successful": {"percentiles": {"p50": 1.234, "p99": 5.678}}}
    made = {
        "request_totals": {"errored": 0},
        "time_to_first_token_ms": percentiles,
        "inter_token_latency_ms": percentiles,
        "output_token_count": {"successful": {"total_sum": 300}},
    }
    found = serve_load.figures_of({"metrics": made, "duration": 2.0})
    assert found["ttft_ms"] == {"p50": 1.23, "p99": 5.68} and found["tokens_per_second"] == 150.0
