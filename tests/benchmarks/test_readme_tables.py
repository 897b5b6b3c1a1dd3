"""The README's tables are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme_tables
from benchmarks.readme_tables import BLOCK, README, TABLES, with_tables


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
    assert "| spd | 123.4 |" in made and "n-gram, k = 4" in made
    assert next(line for line in made.splitlines() if line.startswith("| vLLM-CPU")).count("|  |") >= 1
    monkeypatch.setattr(readme_tables, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(made)
    assert readme_tables.main([]) == 1, "made of other results"
    assert readme_tables.main(["--write"]) == 0 and readme_tables.main([]) == 0
