"""The parts of a round's time: what a round does beside what is counted for it."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import round_parts
from tests.helpers import Patch
from tests.kernels.forms import needs_compiled

pytestmark = [needs_compiled, pytest.mark.slow, pytest.mark.usefixtures("keep_threads")]


def test_rows_are_multiplied_each_and_weights_are_read_once(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    out = tmp_path / "parts.json"
    words = ["--rows", "1,4", "--prompts", "64", "--rounds", "3", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["round_parts", "demo-hybrid", *words, "--out", str(out)])
    round_parts.main()
    lines = {line["label"]: line for line in json.loads(out.read_text())["lines"]}
    assert list(lines) == ["1 row", "4 rows", "prompt 64"]
    single = lines["1 row"]
    four = lines["4 rows"]
    assert four["multiply"] == pytest.approx(4 * single["multiply"])
    assert four["read"] == single["read"] > 0
    for line in lines.values():
        assert line["total"] > line["parts"]["products"] > 0
        assert line["parts"]["calls"] > 0
