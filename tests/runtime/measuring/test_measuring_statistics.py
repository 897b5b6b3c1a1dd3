"""The figures' intervals and tests, against published values and by simulation."""

from __future__ import annotations

import random
from statistics import median

import pytest

from spd.runtime.lab.statistics import repeat_interval, student_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423)]
)
def test_students_t_is_the_table_s(freedom: float, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("repetitions", [3, 5, 12])
def test_a_second_run_lies_within_the_interval_as_often_as_said(repetitions: int) -> None:
    """4,000 pairs of runs: 95 % +- 1.4 points at four standard errors; a chance of 6e-5 to fail."""
    draws, inside = random.Random(repetitions), 0
    for _ in range(4000):
        first, second = ([draws.lognormvariate(3.0, 0.1) for _ in range(repetitions)] for _ in range(2))
        spread = repeat_interval(first)
        assert spread.low is not None and spread.high is not None
        inside += spread.low <= median(second) <= spread.high
    assert 0.936 <= inside / 4000 <= 0.99


@pytest.mark.parametrize("repetitions", [9, 12])
def test_a_hiccup_now_and_then_leaves_the_interval_what_it_is(repetitions: int) -> None:
    """One value in ten is far off: still 93.6 % and more (see above), in half the width."""
    draws, inside, widths = random.Random(repetitions), 0, []

    def value() -> float:
        return draws.lognormvariate(3.0, 0.03) * (1.0 if draws.random() < 0.9 else draws.choice((0.6, 1.6)))

    for _ in range(4000):
        first, second = ([value() for _ in range(repetitions)] for _ in range(2))
        spread = repeat_interval(first)
        assert spread.low is not None and spread.high is not None and spread.half_width is not None
        inside += spread.low <= median(second) <= spread.high
        widths.append(spread.half_width)
    assert inside / 4000 >= 0.936
    assert median(widths) < 0.08


def test_one_repetition_has_no_interval() -> None:
    spread = repeat_interval([2.0])
    assert (spread.median, spread.low, spread.half_width) == (2.0, None, None)
    with pytest.raises(ValueError, match="nothing positive"):
        repeat_interval([])
