"""The default lane's choice of cases: what must meet meets, and nothing is left out of both lanes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.lanes import choose, covering, spread


def test_few_cases_in_which_rows_meet() -> None:
    cases: list[Any] = [
        {"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(4), range(3), range(2))
    ]
    alone, pairs = ([cases[i] for i in covering(cases, strength)] for strength in (1, 2))
    assert len(alone) == 4 and len(pairs) <= 14
    assert all({case[name] for case in alone} == {case[name] for case in cases} for name in "abc")
    for x, y in itertools.combinations("abc", 2):
        assert {(c[x], c[y]) for c in pairs} == {(c[x], c[y]) for c in cases}
    assert [spread(9, count) for count in (1, 2, 3, 20)] == [[0], [0, 8], [0, 4, 8], list(range(9))]


@pytest.mark.covers(1)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("name", "k"), [("x", 1), ("y", 1), ("z", 2)])
def test_here(request: pytest.FixtureRequest, name: str, k: int, lag: int) -> None:
    """Three of nine are run; a list of pairs is one list."""
    cases = [
        item for item in request.session.items if item.path == request.path and "test_here[" in item.name
    ]
    slow = [item for item in cases if item.get_closest_marker("slow")]
    assert not slow or len(slow) == 6
    choose(cases)
    assert [item for item in cases if item.get_closest_marker("slow")] == slow, "what was chosen stays"
