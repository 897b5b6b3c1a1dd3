"""Rows and comparisons from samples made by hand."""

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from spd.runtime.engine.trace import RoundRecord
from spd.runtime.lab.load import Workload, per_position
from spd.runtime.lab.rows import (
    Result,
    compare_results,
    make_rows,
    repeat_interval,
    student_quantile,
    verdict,
)
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample

PLANS = [PLAIN, DRAFT]


def test_ratios_are_paired_by_repetition() -> None:
    """A slow repetition slows both; the ratio stays 2."""
    samples = [make_sample(0, r, 1.0 + r) for r in range(4)]
    samples += [make_sample(1, r, (1.0 + r) / 2) for r in range(4)]
    plain, draft = make_rows(samples, PLANS)
    assert (plain["method"], draft["method"]) == ("plain", "draft")
    assert plain["tokens_per_second"]["median"] == pytest.approx(10 / 2.5, rel=0.05)
    assert plain["speed_up"] is None
    assert draft["speed_up"]["values"] == pytest.approx([2.0] * 4)
    assert draft["speed_up"]["half_width"] == pytest.approx(0, abs=1e-9) and verdict(
        draft["speed_up"]
    )
    assert draft["tokens_per_second"]["half_width"] > 0.1


def test_all_categories_follow_each_one() -> None:
    samples = [
        make_sample(0, 0, 1.0),
        make_sample(0, 0, 3.0, work=Workload(category="edit", temperature=0.0)),
    ]
    rows = make_rows(samples, PLANS)
    assert [row["category"] for row in rows] == ["code", "edit", "all"]
    assert rows[-1]["tokens_per_second"]["median"] == pytest.approx(20 / 4)


def record(draft: list[int], accepted: int) -> RoundRecord:
    ms = {"draft": 1.0, "verify": 1.0, "rest": 0.0}
    return RoundRecord(
        request="r",
        round=1,
        position=9,
        method="draft",
        draft=draft,
        sampled=[0] * (len(draft) + 1),
        accepted=accepted,
        committed=[0] * (accepted + 1),
        ms=ms,
        draft_forwards=2,
        k=2,
    )


def test_drafts_are_counted_by_position() -> None:
    records = [record([1, 2], 2), record([1, 2], 0), record([1], 1), record([], 0)]
    assert per_position(records) == ([3, 2], [2, 1])  # drafted and accepted


def result(speeds: Sequence[float], **settings: Any) -> Any:
    samples = [make_sample(0, r, 10 / speed) for r, speed in enumerate(speeds)]
    return {
        "rows": make_rows(samples, PLANS),
        "plans": [{"load": "auto", "dtype": "bfloat16"}],
        "settings": {"max_tokens": 64, "ignore_eos": False, **settings},
        "model": "demo",
        "prompts": {"code/1": "abc"},
    }


def change(before: Result, after: Result, threshold: float = 0.03) -> dict[str, Any]:
    (row_change,) = compare_results(before, after, threshold)["changes"]
    return dict(row_change)


@pytest.mark.parametrize(
    ("to", "spread", "threshold", "expected"),
    [
        (90, 1, 0.03, ("slower", True)),
        (90, 1, 0.2, ("slower", False)),
        (90, 30, 0.03, ("within noise", False)),
        (120, 1, 0.0, ("faster", False)),
    ],
)
def test_a_change_is_told_from_noise(
    to: int, spread: int, threshold: float, expected: tuple[str, bool]
) -> None:
    before, after = ([at, at + spread, at - spread, at] for at in (100, to))
    row_change = change(result(before), result(after), threshold)
    assert (row_change["verdict"], row_change["regressed"]) == expected
    assert row_change["change"] == pytest.approx(to / 100 - 1)


def test_only_the_same_work_is_compared() -> None:
    comparison = compare_results(result([100.0]), result([100.0], max_tokens=32), 0.03)
    assert (comparison["changes"], comparison["only_before"], comparison["only_after"]) == (
        [],
        1,
        1,
    )
    real: Result = result([100.0])
    imposed: Result = {
        **real,
        "rows": [{**row, "acceptance": "imposed"} for row in real["rows"]],
    }
    other_prompt: Result = {**real, "prompts": {"code/1": "abd"}}
    dummy: Result = {**real, "plans": [{"load": "dummy"}]}
    for other in (imposed, other_prompt, dummy):
        assert compare_results(real, other, 0.03)["changes"] == []
    one_prompt_more: Result = {**real, "prompts": {"code/1": "abc", "code/2": "x"}}
    assert change(real, one_prompt_more), "a prompt of other rows"
    in_float32: Result = {**real, "plans": [{"load": "auto", "dtype": "float32"}]}
    wide = compare_results(real, in_float32, 0.03)
    assert len(wide["changes"]) == 1 and wide["conditions"] == ["dtype bfloat16 → float32"]


def test_students_t_is_the_table_s_and_one_repetition_has_no_interval() -> None:
    for freedom, expected in {
        1: 12.7062,
        2: 4.3027,
        3: 3.1824,
        4: 2.7764,
        7: 2.3646,
        30: 2.0423,
    }.items():
        assert student_quantile(freedom) == pytest.approx(expected, rel=0.01)
    spread = repeat_interval([2.0])
    assert (spread["median"], spread["low"], spread["half_width"]) == (2.0, None, None)
    with pytest.raises(ValueError, match="no median"):
        repeat_interval([])


@pytest.mark.parametrize(
    ("repetitions", "hiccups"), [(3, 0.0), (5, 0.0), (12, 0.0), (9, 0.1), (12, 0.1)]
)
def test_a_second_run_lies_within_the_interval_as_often_as_said(
    repetitions: int, hiccups: float
) -> None:
    """4,000 pairs: 95 % +- 1.4 points at four standard errors, also with hiccups."""
    draws = random.Random(repetitions)
    inside = 0
    widths = []

    def value() -> float:
        far = draws.choice((0.6, 1.6)) if draws.random() < hiccups else 1.0
        return draws.lognormvariate(3.0, 0.03 if hiccups else 0.1) * far

    for _ in range(4000):
        first, second = ([value() for _ in range(repetitions)] for _ in range(2))
        spread = repeat_interval(first)
        inside += spread["low"] <= median(second) <= spread["high"]
        widths.append(spread["half_width"])
    assert 0.936 <= inside / 4000 <= (1.0 if hiccups else 0.99)
    assert not hiccups or median(widths) < 0.08
