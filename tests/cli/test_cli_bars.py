"""Bars in characters: their lengths, intervals and labels, at every width and in every encoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from spd.cli.terminal.bars import ASCII_GLYPHS, UNICODE_GLYPHS, Bar, bar_lines
from spd.cli.terminal.plain_text import cell_width
from tests.cli.cli_processes import PLAIN, run_on_terminal
from tests.runtime.measuring.test_measuring_explain import make_trace

BARS = [
    Bar(label="plain", value=50.0, text="50.0", low=40.0, high=60.0),
    Bar(label="mtp k=3", value=100.0, text="100.0 2.00×", low=95.0, high=105.0),
    Bar("none", 0.0, "0.0"),
]


def test_a_bar_is_as_long_as_its_value_and_its_interval_lies_over_its_end() -> None:
    plain, drafts, none = bar_lines(BARS, 80, UNICODE_GLYPHS, axis=100.0)
    width = len(plain) - len("mtp k=3  ") - len(" 50.0")
    start = len("mtp k=3  ")
    drawn_bar = plain[start : start + width]
    assert [drawn_bar.index(mark) for mark in "├┼┤"] == [
        round(share * width) - 1 for share in (0.4, 0.5, 0.6)
    ]
    assert set(drawn_bar[: drawn_bar.index("├")]) == {"█"} and set(
        drawn_bar[drawn_bar.index("┤") + 1 :]
    ) == {" "}
    assert drafts[start + width - 1] == "▸", "its interval goes on beyond the axis"
    assert none == f"{'none':<{start + width}} 0.0"
    full = bar_lines(BARS[:2], 80, UNICODE_GLYPHS)[1]
    assert full[start : start + width].rstrip()[-1] == "┤", (
        "the axis holds an interval that is near"
    )


def test_without_an_interval_a_bar_is_blocks_alone() -> None:
    for value, share in ((1.0, 1.0), (0.5, 0.5), (0.0, 0.0)):
        (line,) = bar_lines([Bar("a", value, "x")], 80, ASCII_GLYPHS, axis=1.0)
        width = len(line) - len("a  ") - len(" x")
        assert line == f"a  {'#' * round(share * width):<{width}} x"
    assert bar_lines([], 80, ASCII_GLYPHS) == []
    assert "#" not in bar_lines([Bar("a", 0.0, "0")], 80, ASCII_GLYPHS)[0], (
        "and nothing is divided by 0"
    )


def test_a_wide_interval_does_not_squeeze_the_bars() -> None:
    wild = Bar(label="wild", value=40.0, text="40.0", low=1.0, high=4000.0)
    lines = bar_lines([*BARS[:1], wild], 80, UNICODE_GLYPHS)
    assert lines[0].count("█") > 20 and lines[1].rstrip("40. ").endswith("▸")


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 80, 200])
@pytest.mark.parametrize("glyphs", [UNICODE_GLYPHS, ASCII_GLYPHS])
def test_no_line_is_wider_than_the_terminal(columns: int, glyphs) -> None:
    bars = [
        *BARS,
        Bar(
            label="a name that is far too long for any terminal" * 2 + " k=9",
            value=70.0,
            text="70.0",
            low=60.0,
            high=80.0,
        ),
    ]
    lines = bar_lines(bars, columns, glyphs)
    assert len(lines) == len(bars) * (2 if columns < 60 else 1)
    assert all(cell_width(line) < columns for line in lines)
    assert "k=9" in " ".join(lines), "the end of a label tells its bar from others"
    if glyphs is ASCII_GLYPHS:
        assert "".join(lines).replace("×", "").replace("…", "").isascii()


def test_explain_draws_bars_that_fit_the_terminal(tmp_path: Path) -> None:
    """Cover 40 columns, no colours, and an encoding without blocks."""
    trace = make_trace(3, 0.6, rounds=60)
    path = tmp_path / "trace"
    lines = [dataclasses.asdict(trace.header), *map(dataclasses.asdict, trace.rounds)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for columns, environment, block in ((40, PLAIN, "█"), (90, {}, "█"), (40, ascii_only, "#")):
        status, text = run_on_terminal("explain", path, columns=columns, **environment)
        assert status == 0 and "\x1b" not in text
        rows = text.splitlines()
        index = rows.index("accepted by position, 95 % interval")
        drawn_bar = "".join(rows[index + 1 : index + 7])
        assert all(f"draft {n}" in drawn_bar for n in (1, 2, 3)) and block * 5 in drawn_bar
        glyphs = UNICODE_GLYPHS if block == "█" else ASCII_GLYPHS
        assert drawn_bar.count(glyphs.low) == drawn_bar.count(glyphs.high) == 3, "intervals"
        assert max(map(cell_width, rows)) < columns or columns == 40, text
        assert max(map(cell_width, rows)) <= columns
