"""The round's clock: when its parts began and ended, written by the device itself.

A round's row of `times` is counter % depth; the last mark of a round moves the counter on.
"""

from __future__ import annotations

import time

from torch import Tensor

BEGAN, VERIFIED, COMMITTED, ENDED = 0, 1, 2, 3
"""Columns of `times`: before verification, after it, at the commit, after drafting."""
NUM_TIMES = 4


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    """Write the time in nanoseconds to times[counter % depth, column], then add one to the counter.

    times int64 [depth, NUM_TIMES] contiguous and counter int64 [1] are written in place, the counter
    only with `advance`. Here the time is the host's; on a GPU only the Triton form tells the device's.
    """
    now = 0 if times.is_cuda else time.perf_counter_ns()
    times[:, column].index_fill_(0, counter % times.shape[0], now)
    if advance:
        counter += 1
