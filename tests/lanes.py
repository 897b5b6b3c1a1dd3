"""The choice of a parametrised test's cases for the default lane; the others are `slow`."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import pytest

Case = dict[str, Hashable]  # Which row of each list of parameters it is of.


def covering(cases: Sequence[Case], strength: int, count: int | None = None) -> list[int]:
    """Return the indices of few cases that cover all combinations of `strength` rows; greedy.

    count: the most cases; those that cover most come first.
    """
    names = list(cases[0])
    groups = list(itertools.combinations(names, min(strength, len(names))))
    holds = [{(group, tuple(case[name] for name in group)) for group in groups} for case in cases]
    left = set[object]().union(*holds)
    chosen = list[int]()
    value_counts = Counter[object]()

    def worth(index: int) -> tuple[int, int, int]:
        """Return a case's rank: new combinations first, then rare values, then the list's order."""
        return (
            len(holds[index] & left),
            -sum(value_counts[item] for item in cases[index].items()),
            -index,
        )

    while left and (count is None or len(chosen) < count):
        best = max(range(len(cases)), key=worth)
        chosen.append(best)
        left -= holds[best]
        value_counts.update(cases[best].items())
    return chosen


def case_of(item: pytest.Item) -> Case:
    """Return the rows of a test's case: one of each `parametrize` and of each fixture's list."""
    params = getattr(item, "callspec").params  # noqa: B009
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    tied = [
        names.replace(",", " ").split() if isinstance(names, str) else list(names)
        for names in lists
    ]
    alone = [[name] for name in params if not any(name in names for names in tied)]
    return {" ".join(names): tuple(id(params[name]) for name in names) for names in (*tied, *alone)}


def spread(total: int, count: int) -> list[int]:
    """Return the indices of `count` of so many cases, the first and the last among them."""
    return sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(min(count, total))})


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases that `covers` leaves out."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("covers") and not any(
            map(item.get_closest_marker, ("slow", "gpu"))
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("covers")
        assert mark is not None
        count = mark.kwargs.get("count")
        default_lane = (
            covering([*map(case_of, cases)], strength=mark.args[0], count=count)
            if mark.args
            else spread(len(cases), count)
        )
        for index in set(range(len(cases))) - set(default_lane):
            cases[index].add_marker(pytest.mark.slow)
