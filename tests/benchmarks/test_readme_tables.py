"""The README's tables are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme_tables
from benchmarks.readme_tables import BLOCK, README, TABLES, with_tables
from benchmarks.table_forms import MODES, PEER_NAMES


def test_the_readme_is_current() -> None:
    """To write it anew: `python -m benchmarks.readme_tables --write`."""
    text = README.read_text(encoding="utf-8")
    assert {match[2] for match in BLOCK.finditer(text)} == set(TABLES)
    assert with_tables(text) == text


def test_another_result_is_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads((readme_tables.RESULTS / "cpu_peers.json").read_text())
    result["entries"]["spd-plain"]["decode_tokens_per_second"]["median"] = 123.4
    result["entries"]["spd-ngram"] = result["entries"]["spd-plain"]
    del result["entries"]["vllm-draft"]
    (tmp_path / "cpu_peers.json").write_text(json.dumps(result))
    made = with_tables(README.read_text(encoding="utf-8"), tmp_path)
    assert "| spd | 123.4 |" in made and "| tokens/s, k = 4 | plain | draft | n-gram |" in made
    assert next(line for line in made.splitlines() if line.startswith("| vLLM-CPU")).count("|  |") >= 1
    monkeypatch.setattr(readme_tables, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(made)
    assert readme_tables.main([]) == 1, "made of other results"
    assert readme_tables.main(["--write"]) == 0 and readme_tables.main([]) == 0


def results(folder: Path) -> Path:
    """Small results of every form, with figures as wide as they come."""
    spread = {"median": 10234.5, "low": 1.0, "high": 2.0, "values": [1.0, 2.0], "half_width": 0.1234}
    length = {"value": 5.4321, "error": 0.0567}
    cells = [
        {"drafter": drafter, "temperature": t, "verify": rule, "k": k, "length": length}
        for drafter in ("mtp", "draft", "ngram", "self")
        for t, rule in ((0.0, "coupled"), (0.5, "rejection"))
        for k in range(1, 7)
    ]
    row = {
        "category": "all",
        "method": "ngram",
        "draft_max": 4,
        "draft_tp": 1,
        "rate": 2.0,
        "concurrency": 100,
        "temperature": 0.8,
    }
    row |= {"drafted_per_position": [10, 10, 8, 4], "accepted_per_position": [5, 4, 2, 1], "speed_up": spread}
    row |= {"tokens_per_second": spread, "acceptance_length": 2.2222, "tpot_ms": {"median": 12345.6}}
    plain = {**row, "method": "plain", "draft_max": 0, "speed_up": None, "acceptance_length": 1.0}
    plain |= {"drafted_per_position": [], "accepted_per_position": []}
    bench = {"rows": [plain, row, {**row, "draft_tp": 2}, {**row, "category": "code"}]}
    ratio = {"median": 0.98765, "interval": [0.912, 1.123], "pairs": 30}
    case = {"concurrency": 16, "auto_over_plain": ratio, "auto_over_best": {**ratio, "interval": None}}
    case |= {"best_k": 4, "rounds_with_drafts": 0.512}
    pairs = [{"k": k, "error": error} for k, error in ((1, 0.0123), (2, -0.101), (3, 0.2))]
    check = {"model": "medium", "method": "draft", "pairs": pairs, "chosen_k": 2, "best_k": 3}
    entry = {"output_tokens_per_second": spread, "decode_tokens_per_second": spread}
    entry["versions"] = dict.fromkeys(("vllm", "transformers", "llama"), "0.32.0+cpu")
    entries = {f"{peer}-{mode}": entry for peer in PEER_NAMES for mode in MODES}
    ratios = {
        f"spd-{mode} / {peer}-{mode}": spread | {"median": 1.234}
        for peer in ("vllm", "llama")
        for mode in MODES
    }
    loads = {"loads": {"8 a second": {"entries": entries, "ratios": ratios}}}
    kernels = {"paged_attention 1 slots 32768": {"rows": {"1": [12.3, 0.5964, 4.5]}}}
    written = {
        "cpu_peers": {"entries": entries, "settings": {"draft_max": 4}},
        "cpu_peer_loads": loads,
        "cpu_peer_demo": loads,
        "acceptance": {"rows": cells},
        "bench_demo": bench,
        "bench_pairs": bench,
        "bench_concurrency": bench,
        "bench_rate_draft_tp": bench,
        "auto_k": {"models": [{"model": "medium", "method": "ngram", "cases": [case]}]},
        "explain_check": {"cases": [{**check, "chosen_over_best": 0.987}]},
        "gpu_suite": {"probes": {"kernel_table": {"result": {"cases": kernels}}}},
        "host_cost": {"settings": {"slots": 32}, "host_us": {"plain": {"here": {"wall": 302.0}}}},
    }
    for name, value in written.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_every_form_shows_its_figures_in_80_columns(tmp_path: Path) -> None:
    made = {name: table.text(results(tmp_path)) for name, table in TABLES.items()}
    lines = [line for text in made.values() for line in text.splitlines()]
    assert [line for line in lines if len(line) > 80] == []
    assert "| MTP | 0 | any | 5.43 | 5.43 |" in made["acceptance"]
    assert "| draft | 0.5 | rejection |" in made["acceptance"] and "are 0.06 at most" in made["acceptance"]
    assert "| n-gram, k = 4 | 10234 | 10234.50 × ± 12.3% | 2.22 | 50 40 25 25 |" in made["bench_demo"]
    assert made["bench_demo"].count("n-gram") == 2, "the rows over all categories only"
    assert "| 0.8 | n-gram | 10234.50 × ± 12.3% | 10234.50 |" in made["bench_pairs"]
    assert "| 100 | 10234 | 10234 |" in made["bench_concurrency"]
    assert (
        "| 2 | 12345.6 | 12345.6 (" in made["bench_rate_draft_tp"]
        and "| draft-tp 2 |" in made["bench_rate_draft_tp"]
    )
    assert "| medium, n-gram | 16 | 0.99 (0.91 to 1.12) | 0.99 | 4 | 51% |" in made["auto_k"]
    assert "| medium, draft | +1% -10% +20% | 2 (0.99) | 3 |" in made["explain_check"]
    assert "| 8 a second | 10234.5 | 10234.5 | 10234.5 (1.23 ×) |" in made["peer_loads"]
    assert "| llama.cpp 0.32.0 |" in made["cpu_peers"]
    assert "| plain | 0.30 |" in made["host_cost"]
    assert "| decode attention, of the read rate | at least 0.8 | 0.596, missed |" in made["gpu_gates"]
    assert "| **this version** | all of it | **not measured** |" in made["gpu_gates"]
    unknown = " ".join(made["gpu_gates"].partition("Not measured at all: ")[2].split())
    assert "8B over a compiled loop (at least 1.25); 8B over compiled transformers; " in unknown
