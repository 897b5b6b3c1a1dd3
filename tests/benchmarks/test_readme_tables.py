"""The tables of README and docs/measurements.md are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_tables
from benchmarks.readme_tables import BLOCK, PAGES, TABLES, with_tables

SPREAD = {"median": 10234.5, "low": 1.0, "high": 2.0, "values": [1.0, 2.0], "half_width": 0.1234}
LENGTH = {"value": 5.4321, "error": 0.0567}
ROW = {
    **{"category": "all", "method": "ngram", "draft_max": 4, "draft_tp": 1, "rate": 2.0, "concurrency": 100},
    **{"temperature": 0.8, "tokens_per_second": SPREAD, "speed_up": SPREAD, "acceptance_length": 2.2222},
    **{"drafted_per_position": [10, 10, 8, 4], "accepted_per_position": [5, 4, 2, 1]},
}
PLAIN = {**ROW, "method": "plain", "draft_max": 0, "speed_up": None, "acceptance_length": 1.0}
PAIRS = [{"k": k, "error": error} for k, error in ((1, 0.0123), (2, -0.101), (3, 0.2))]
CHOICE = {"chosen_k": 2, "best_k": 3, "chosen_over_best": 0.987}
CHECK = {"model": "medium", "method": "draft", "pairs": PAIRS, **CHOICE}
LENGTHS = [
    {"drafter": "draft", "temperature": 0.5, "verify": "rejection", "k": k, "length": LENGTH}
    for k in range(1, 7)
]
KERNELS = {"paged_attention 1 slots 32768": {"rows": {"1": [12.3, 0.5964, 4.5]}}}
SUITE = {"probes": {"kernel_table": {"status": "ok", "result": {"cases": KERNELS}}}}


MEASUREMENTS = PAGES[1]


def test_the_pages_are_current() -> None:
    """To write them anew: `python -m benchmarks.readme_tables --write`."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {match[2] for text in texts for match in BLOCK.finditer(text)} == set(TABLES)
    assert [with_tables(text) for text in texts] == texts


def test_another_result_is_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads((readme_tables.RESULTS / "cpu_peers.json").read_text())
    result["entries"]["spd-plain"]["decode_tokens_per_second"]["median"] = 123.4
    result["entries"]["spd-ngram"] = result["entries"]["spd-plain"]
    del result["entries"]["vllm-draft"]
    (tmp_path / "cpu_peers.json").write_text(json.dumps(result))
    made = with_tables(MEASUREMENTS.read_text(encoding="utf-8"), tmp_path)
    assert "| spd | 123.4 |" in made and "| tokens/s, k = 4 | plain | draft | n-gram |" in made
    assert next(line for line in made.splitlines() if line.startswith("| vLLM-CPU")).count("|  |") >= 1
    monkeypatch.setattr(readme_tables, "PAGES", (tmp_path / "measurements.md",))
    (tmp_path / "measurements.md").write_text(made)
    assert readme_tables.main([]) == 1, "made of other results"
    assert readme_tables.main(["--write"]) == 0 and readme_tables.main([]) == 0


SHOWN: list[tuple[str, str, dict[str, Any], str]] = [
    ("acceptance", "acceptance", {"rows": LENGTHS}, "| draft | 0.5 | rejection | 5.43 |"),
    (
        *("bench_demo", "bench_demo", {"rows": [PLAIN, ROW]}),
        "| n-gram, k = 4 | 10234 | 10234.50 × ± 12.3% | 2.22 | 50 40 25 25 |",
    ),
    (
        *("explain_check", "explain_check", {"cases": [CHECK]}),
        "| medium, draft | +1% -10% +20% | 2 (0.99) | 3 |",
    ),
    (
        "gpu_gates",
        "gpu_suite",
        SUITE,
        "| decode attention, of the read rate | at least 0.8 | 0.596, missed |",
    ),
]


@pytest.mark.parametrize(("table", "file", "result", "row"), SHOWN, ids=[one[0] for one in SHOWN])
def test_figures_are_shown_as_they_were_measured(
    table: str, file: str, result: dict[str, Any], row: str, tmp_path: Path
) -> None:
    (tmp_path / f"{file}.json").write_text(json.dumps(result))
    lines = TABLES[table].text(tmp_path).splitlines()
    assert any(row in line for line in lines) and max(map(len, lines)) <= 80, lines
