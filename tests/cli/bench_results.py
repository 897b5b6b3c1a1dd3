"""Results of `spd bench` with made-up rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spd.cli.bench_table import BENCH_SCHEMA, BenchResult, Row


def make_bench_result(
    model: str,
    rows: Sequence[Row],
    plans: Sequence[Mapping[str, object]],
    samples: Sequence[Mapping[str, object]] = (),
    *,
    same_tokens: bool = True,
    compared_tokens: int = 1,
) -> BenchResult:
    """Return a result without differences of texts."""
    return {
        "schema": BENCH_SCHEMA,
        "model": model,
        "versions": {"spd": "1"},
        "machine": {},
        "settings": {"max_tokens": 8},
        "prompts": {},
        "plans": plans,
        "rows": rows,
        "same_tokens": same_tokens,
        "equality": {"tokens": compared_tokens, "differences": []},
        "samples": samples,
        "interrupted": False,
    }
