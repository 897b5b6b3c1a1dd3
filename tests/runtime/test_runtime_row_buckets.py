"""Which row counts an engine admits: those that agree bit for bit, less those that only cost time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spd.runtime import row_buckets
from spd.runtime.row_buckets import CANDIDATES, WIDEST, admitted_buckets, bucket_for

ROWS = torch.randn(WIDEST, 8, generator=torch.Generator().manual_seed(0))


class Windows:
    """Rows whose last bit depends on their number or place where asked, in the context that is asked for."""

    def __init__(
        self, odd: dict[tuple[int, int, int], int] | None = None, slow: tuple[int, ...] = ()
    ) -> None:
        self.odd, self.slow = odd or {}, slow
        self.asked: dict[int, set[int]] = {}
        self.now = 0.0

    def __call__(self, start: int, first: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        self.asked.setdefault(rows, set()).update(range(first, first + rows))
        self.now += 1.3 if rows in self.slow else 1.0
        hidden, logits = ROWS[first : first + rows].clone(), ROWS[first : first + rows, :2].clone()
        row = self.odd.get((rows, first, context))
        if row is not None:
            logits[row, 1] = torch.nextafter(logits[row, 1], torch.tensor(9.0))
        return hidden, logits


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Windows], tuple[int, ...]]:
    """The buckets by the windows' own clock."""

    def found(windows: Windows) -> tuple[int, ...]:
        monkeypatch.setattr(row_buckets, "perf_counter", lambda: windows.now)
        return admitted_buckets(windows, 96, 128)

    return found


def test_row_counts_that_agree_are_admitted(admitted: Callable[[Windows], tuple[int, ...]]) -> None:
    windows = Windows()
    assert admitted(windows) == (*CANDIDATES, WIDEST)
    assert windows.asked[16] == windows.asked[2] == set(range(WIDEST)), "every place of the widest window"


@pytest.mark.parametrize(("width", "first", "context"), [(5, 20, 128), (8, 24, 256), (2, 30, 256)])
def test_one_bit_in_one_row_refuses_a_row_count(
    admitted: Callable[[Windows], tuple[int, ...]], width: int, first: int, context: int
) -> None:
    windows = Windows({(width, first, context): width - 1})
    assert admitted(windows) == (*(w for w in CANDIDATES if w != width), WIDEST)


def test_a_row_count_slower_than_a_wider_one_is_padded_to_it(
    admitted: Callable[[Windows], tuple[int, ...]],
) -> None:
    buckets = admitted(Windows(slow=(2, 4)))
    assert buckets == (*CANDIDATES[2:], WIDEST)
    assert [bucket_for(rows, buckets) for rows in (1, 4, 5, 7, 32, 33, 41)] == [5, 5, 5, 8, 32, 37, 44]
