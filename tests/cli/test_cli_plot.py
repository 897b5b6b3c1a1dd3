"""`--plot` of bench and explain: the pictures, and refusals before anything is measured."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.cli import plot
from spd.cli.bench_table import BenchResult
from spd.runtime.lab.explain import explain_traces
from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Sweep
from tests.cli.bench_results import make_bench_result
from tests.cli.conftest import assert_refused
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample
from tests.runtime.measuring.test_measuring_explain import make_trace


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


def make_result() -> BenchResult:
    """Return a result of two models, plain and with drafts.

    One name is in mathematical notation.
    """
    drafts = {"drafted_per_position": [100, 50, 4], "accepted_per_position": [70, 20, 4]}
    samples = [
        make_sample(config, r, (1.0 + 0.1 * r) / speed, **(drafts if config % 2 else {}))
        for r in range(3)
        for config, speed in enumerate((1, 2, 3, 4))
    ]
    models = ["in/one", "in/one", "in/$two_2$", "in/$two_2$"]
    rows = make_rows(samples, [PLAIN, DRAFT] * 2, models)
    return make_bench_result("one,$two_2$", rows, [PLAIN, DRAFT] * 2)


def texts_of(path: Path) -> list[str]:
    """Return every text of a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_bench_is_drawn(tmp_path: Path, matplotlib: None) -> None:
    path = tmp_path / "speed.svg"
    plot.plot_bench(make_result(), path)
    texts = texts_of(path)
    for label in ("one plain", "one draft k=2", "$two_2$ plain", "$two_2$ draft k=2"):
        assert label in texts
    assert "18.2  2.00 × plain" in texts and "36.4  1.33 × plain" in texts
    assert "code, T 0" in texts, "names of models are in the labels"
    assert "acceptance by position" in texts
    first = path.read_bytes()
    assert first.count(b'id="LineCollection_') == 4 + 2 * 2, "error bars, and those of the legend"
    plot.plot_bench(make_result(), path)
    assert path.read_bytes() == first, "the same result is the same file"
    plot.plot_bench(make_result(), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"
    result = make_result()
    result["rows"] = result["rows"][:2]
    plot.plot_bench(result, path)
    assert "one: code, T 0" in texts_of(path)


def test_one_position_has_one_tick_and_what_is_not_drawn_is_said(
    tmp_path: Path, matplotlib: None
) -> None:
    """A bench of few tokens: one drafter with one position, another with too few drafts."""
    result = make_result()
    drafts = {0: [], 1: [50], 2: [], 3: [4]}
    result["rows"] = [
        {**row, "drafted_per_position": drafts[number], "accepted_per_position": drafts[number]}
        for number, row in enumerate(result["rows"])
    ]
    path = tmp_path / "speed.svg"
    plot.plot_bench(result, path)
    texts = texts_of(path)
    ticks = texts[texts.index("position of the draft") - 1]
    assert ticks == "1" and not any(re.fullmatch(r"[01]\.\d+", text) for text in texts)
    assert "$two_2$ draft k=2: fewer than 10 drafts" in texts


def test_an_interval_beyond_the_axis_ends_in_an_arrow(tmp_path: Path, matplotlib: None) -> None:
    result = make_result()
    paths = tmp_path / "whole.svg", tmp_path / "cut.svg"
    for path, high in zip(paths, (37.0, 3700.0), strict=True):
        result["rows"][0]["tokens_per_second"]["high"] = high
        plot.plot_bench(result, path)
    arrows = [path.read_text().split('id="cut"')[1].split("</g>")[0] for path in paths]
    assert [arrow.count("<use") for arrow in arrows] == [0, 1]


def test_a_trace_is_drawn(tmp_path: Path, matplotlib: None, spd_run: Callable[..., Any]) -> None:
    trace = make_trace(3, 0.6, rounds=90)
    lines = [dataclasses.asdict(trace.header), *map(dataclasses.asdict, trace.rounds)]
    file = tmp_path / "trace"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = spd_run("explain", file, "--plot", tmp_path / "trace.svg")
    assert ran.code == 0 and "← best" in ran.text
    texts = texts_of(tmp_path / "trace.svg")
    explanation = explain_traces([trace])
    shares = [f"{100 * share:.0f}" for share in explanation.acceptance]
    assert {"draft: what other K would give", "this run", "drafting", *shares} <= {*texts}
    assert f"a round of this run: {explanation.now.round_ms:.2f} ms" in texts
    drawn = (tmp_path / "trace.svg").read_text()
    assert drawn.count('id="LineCollection_') == 1, "the error bars of acceptance"


@pytest.mark.parametrize("command", ["bench", "explain"])
def test_without_the_library_the_command_that_installs_it_is_named(
    command: str, spd_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before anything is measured or read."""
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    monkeypatch.setattr(Sweep, "run", lambda self: pytest.fail("it measures"))
    arguments = ["demo"] if command == "bench" else [str(tmp_path / "none")]
    ran = spd_run(command, arguments, "--plot", tmp_path / "x.png")
    assert_refused(ran, 2, "--plot needs matplotlib", "fix: pip install 'spd[plot]'")


def test_a_file_that_cannot_be_written_is_refused_first(
    spd_run: Callable[..., Any], tmp_path: Path, matplotlib: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: pytest.fail("it measures"))
    ran = spd_run("bench", "demo", "--plot", tmp_path / "nowhere" / "x.png")
    assert_refused(ran, 2, "cannot write to", "x.png")
