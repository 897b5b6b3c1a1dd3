"""Which row counts an engine admits: those that agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spd.runtime.row_buckets import CANDIDATES, WIDEST, admitted_buckets, bucket_for

ROWS = torch.randn(WIDEST, 8, generator=torch.Generator().manual_seed(0))


class Windows:
    """Rows whose last bit depends on their number or place where asked, in the context that is asked for."""

    def __init__(self, odd: dict[tuple[int, int, int], int] | None = None) -> None:
        self.odd = odd or {}
        self.asked: dict[int, set[int]] = {}

    def __call__(self, start: int, first: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        self.asked.setdefault(rows, set()).update(range(first, first + rows))
        hidden, logits = ROWS[first : first + rows].clone(), ROWS[first : first + rows, :2].clone()
        row = self.odd.get((rows, first, context))
        if row is not None:
            logits[row, 1] = torch.nextafter(logits[row, 1], torch.tensor(9.0))
        return hidden, logits


def test_row_counts_that_agree_are_admitted() -> None:
    windows = Windows()
    assert admitted_buckets(windows, 96, 128) == (*CANDIDATES, WIDEST)
    assert windows.asked[16] == windows.asked[2] == set(range(WIDEST)), "every place of the widest window"


@pytest.mark.parametrize(("width", "first", "context"), [(5, 20, 128), (8, 24, 256), (2, 30, 256)])
def test_one_bit_in_one_row_refuses_a_row_count(width: int, first: int, context: int) -> None:
    windows = Windows({(width, first, context): width - 1})
    assert admitted_buckets(windows, 96, 128) == (*(w for w in CANDIDATES if w != width), WIDEST)


def test_rows_are_padded_to_the_next_bucket() -> None:
    buckets = (2, 5, 8, 32)
    assert [bucket_for(rows, buckets) for rows in (1, 3, 5, 7, 9, 32, 33, 41)] == [2, 5, 5, 8, 32, 32, 34, 64]
