"""Rows and comparisons from samples made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.lab.load import Load, Work, per_position
from spd.runtime.lab.rows import compare_results, make_rows, verdict
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
    assert draft["speed_up"]["half_width"] == pytest.approx(0, abs=1e-9) and verdict(draft["speed_up"])
    assert draft["tokens_per_second"]["half_width"] > 0.1


def test_a_broken_repetition_is_left_out() -> None:
    samples = [
        make_sample(c, r, 1.0, prompts=[p]) for r in range(2) for p in ("code/1", "code/2") for c in (0, 1)
    ]
    plain, draft = make_rows(samples[:-1], PLANS)
    assert plain["repetitions"] == 2 and draft["repetitions"] == 1
    assert len(draft["speed_up"]["values"]) == 1


def test_all_categories_follow_each_one() -> None:
    other = Work("edit", 0.0, None, Load())
    samples = [make_sample(0, 0, 1.0), make_sample(0, 0, 3.0, work=other)]
    rows = make_rows(samples, PLANS)
    assert [row["category"] for row in rows] == ["code", "edit", "all"]
    assert rows[-1]["tokens_per_second"]["median"] == pytest.approx(20 / 4)


def test_speed_counts_what_the_load_says() -> None:
    many = make_sample(0, 0, 1.0, work=Work("code", 0.0, None, Load(4)))
    late = make_sample(0, 0, 1.0, work=Work("code", 0.0, None, Load(4, 2.0)))
    assert many.speed == (11.0, 1.5)
    assert late.speed == (1.0, 0.1)
    assert [row["rate"] for row in make_rows([many, late], PLANS)] == [None, 2.0]


def record(draft: list[int], accepted: int) -> RoundRecord:
    ms = {"draft": 1.0, "verify": 1.0, "rest": 0.0}
    return RoundRecord(
        "r", 1, 9, "draft", draft, [0] * (len(draft) + 1), accepted, [0] * (accepted + 1), ms, 2, 2
    )


def test_rates_by_position() -> None:
    drafted, tried, accepted = per_position(
        [record([1, 2], 2), record([1, 2], 0), record([1], 1), record([], 0)]
    )
    assert (drafted, tried, accepted) == ([3, 2], [3, 1], [2, 1])


def result(speeds: list[float], **settings: Any) -> dict[str, Any]:
    samples = [make_sample(0, r, 10 / speed) for r, speed in enumerate(speeds)]
    return {
        "model": "demo",
        "settings": {"max_tokens": 64, "ignore_eos": False, **settings},
        "rows": make_rows(samples, PLANS),
        "plans": [{"load": "auto", "dtype": "bfloat16"}],
        "prompts": {"code/1": "abc"},
    }


def change(before: dict[str, Any], after: dict[str, Any], threshold: float = 0.03) -> dict[str, Any]:
    (found,) = compare_results(before, after, threshold)["changes"]
    return dict(found)


@pytest.mark.parametrize(
    ("before", "after", "threshold", "verdict", "regressed"),
    [
        ([100, 101, 99, 100], [90, 91, 89, 90], 0.03, "slower", True),
        ([100, 101, 99, 100], [90, 91, 89, 90], 0.2, "slower", False),
        ([100, 130, 70, 100], [90, 120, 60, 90], 0.03, "within noise", False),
        ([100, 101, 99, 100], [120, 121, 119, 120], 0.0, "faster", False),
    ],
)
def test_a_change_is_told_from_noise(
    before: list[float], after: list[float], threshold: float, verdict: str, regressed: bool
) -> None:
    found = change(result(before), result(after), threshold)
    assert (found["verdict"], found["regressed"]) == (verdict, regressed)
    assert found["change"] == pytest.approx(after[0] / before[0] - 1)


def test_only_the_same_work_is_compared() -> None:
    found = compare_results(result([100.0]), result([100.0], max_tokens=32), 0.03)
    assert (found["changes"], found["only_before"], found["only_after"]) == ([], 1, 1)
    real = result([100.0])
    imposed = {**real, "rows": [row | {"acceptance": "imposed"} for row in real["rows"]]}
    for other in (imposed, {**real, "prompts": {"code/1": "abd"}}, {**real, "plans": [{"load": "dummy"}]}):
        assert compare_results(real, other, 0.03)["changes"] == []
    more = {**real, "prompts": {"code/1": "abc", "code/2": "x"}}
    assert change(real, more), "a prompt of other rows"
    wide = compare_results(real, {**real, "plans": [{"load": "auto", "dtype": "float32"}]}, 0.03)
    assert len(wide["changes"]) == 1 and wide["conditions"] == ["dtype bfloat16 → float32"]


def test_rows_of_one_key_are_all_compared() -> None:
    twice = result([100.0])
    twice["rows"] = [twice["rows"][0], twice["rows"][0]]
    found = compare_results(twice, twice, 0.03)
    assert len(found["changes"]) == 2 and found["only_before"] == found["only_after"] == 0
    assert compare_results(twice, result([100.0]), 0.03)["only_before"] == 1
