"""The comparison of two trees: it finds what was planted, and nothing where nothing was."""

from __future__ import annotations

import subprocess
from math import inf
from pathlib import Path

import pytest

from benchmarks.freeze import __main__ as freeze
from benchmarks.freeze.cells import Run

PROGRAM = """
import json, pathlib, sys, time
def main():
    head, round = {{"plan": {{"lag": 1}}}}, {{"draft": [5, 6], "accepted": {accepted}, "ms": time.time()}}
    pathlib.Path(sys.argv[3]).write_text(json.dumps(head) + "\\n" + json.dumps(round))
    print(json.dumps({{"token_ids": [5, 7], "model": __file__}}))
    return 0
"""


def test_a_planted_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal trees differ in nothing, whatever varies; a tree that has answered is not asked again."""
    program = tmp_path / "repo/spd/__main__.py"
    program.parent.mkdir(parents=True)
    (program.parent / "__init__.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    monkeypatch.setattr(freeze, "ROOT", tmp_path / "repo")

    def compared(old: int, new: int) -> tuple[list[str], int]:
        """What differs between trees that accept so many drafts, and how many of them were asked."""
        trees = []
        for accepted in (old, new):
            program.write_text(PROGRAM.format(accepted=accepted))
            place = tmp_path / f"{old}-{new}/{len(trees)}"
            trees.append(freeze.Tree(freeze.tree_of(None), place, tmp_path / f"store-{len(trees)}"))
        ((_, row),) = freeze.compare({"a/b": [Run(["generate"], trace=True)]}, *trees, inf)
        assert (row["tokens"], row["rounds"], row["failed"]) == (2, 1, 0)
        asked = sum(tree.process is not None for tree in trees)
        for tree in trees:
            tree.close()
        return [line.split(": ", 1)[1] for line in row["first"]], asked

    assert compared(2, 2) == ([], 2)
    assert compared(2, 1) == (["trace 1 accepted: 2 became 1"], 1)
    monkeypatch.setattr(freeze, "RENAMED", {"accepted": None, "plan": "plan.engine"})
    moved = ["trace 0 plan.engine.lag: 1 became nothing", "trace 0 plan.lag: nothing became 1"]
    assert compared(2, 1) == (moved, 0)
