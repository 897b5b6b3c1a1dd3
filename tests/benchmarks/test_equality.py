"""The count of changed tokens: a change is counted and ends with status 6; what is done is not done again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import equality
from spd.runtime import Engine, Request

CELL = ["--requests", "6", "--tokens", "8", "--only", "bfloat16/ngram/k2", "-m", "demo"]


def test_nothing_differs_and_a_later_call_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(equality, "describe_commit", lambda *paths: {"commit": "c", "changed": False})
    assert equality.main([*CELL, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cells"].values()
    assert row["tokens"] == 3 * 7 * 8 and row["differ"] == 0 and row["drafted"]
    monkeypatch.setattr(equality, "run_cell", lambda *given: dict(row, differ=1))
    assert equality.main([*CELL, "--out", str(out)]) == 0
    assert equality.main([*CELL, "--tokens", "9", "--out", str(out)]) == 6, "other cells"
    assert equality.main([*CELL, "--minutes", "0"]) == 7


@pytest.mark.parametrize("what", ["token", "draft", "end"])
def test_a_change_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    honest, out = equality.run, tmp_path / "found.json"

    def changed(engine: Engine, requests: Sequence[Request]) -> list[equality.Text]:
        texts = honest(engine, requests)
        if engine.plan.wishes.lag == 2 and len(requests) > 1:
            if what == "token":
                texts[1].tokens[3] += 1
            elif what == "draft":
                texts[1].drafts[0] = ((1, 2), 0)
            else:
                texts[1].finish = "stop"
        return texts

    monkeypatch.setattr(equality, "run", changed)
    assert equality.main([*CELL, "--out", str(out)]) == 6
    (row,) = json.loads(out.read_text())["cells"].values()
    assert (row["differ"], row["drafts_differ"]) == ((0, 1) if what == "draft" else (1, 0))
