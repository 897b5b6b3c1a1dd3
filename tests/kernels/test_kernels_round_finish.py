"""The round's clock: which cell is written, and when the counter moves."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

from spd.kernels.round.window import BEGAN, COMMITTED, ENDED, NUM_TIMES, VERIFIED

FORMS = "round.window"


def test_columns_are_apart() -> None:
    assert sorted((BEGAN, VERIFIED, COMMITTED, ENDED)) == list(range(NUM_TIMES))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("column", [BEGAN, ENDED])
@pytest.mark.parametrize("advance", [False, True])
def test_one_cell_is_marked(op: Any, device: str, depth: int, column: int, advance: bool) -> None:
    for count in range(2 * depth + 1):
        times = torch.full((depth, NUM_TIMES), -5, device=device)
        counter = torch.tensor([count], device=device)
        op.mark_time(times, counter, column, advance)
        rows = times.tolist()
        marked = rows[count % depth][column]
        rows[count % depth][column] = -5
        assert rows == [[-5] * NUM_TIMES] * depth
        # On a GPU the torch form has no clock that a captured graph could read.
        assert marked >= 0 and (marked > 0 or (device == "cuda" and op.__name__.endswith("window")))
        assert counter.tolist() == [count + advance]


def test_the_host_tells_the_time_where_there_is_no_timer(op: Any, device: str) -> None:
    if device != "cpu":
        pytest.skip("the GPU has a timer of its own")
    times = torch.zeros(2, NUM_TIMES, dtype=torch.int64)
    counter = torch.zeros(1, dtype=torch.int64)
    before = time.perf_counter_ns()
    op.mark_time(times, counter, BEGAN, False)
    op.mark_time(times, counter, ENDED, True)
    after = time.perf_counter_ns()
    assert before <= times[0, BEGAN] <= times[0, ENDED] <= after


@pytest.mark.gpu
def test_the_device_timer_runs_in_nanoseconds() -> None:
    """Between two marks around a sleeping host lies what the host slept."""
    op = importlib.import_module("spd.kernels.round.window_triton")
    times = torch.zeros(1, NUM_TIMES, dtype=torch.int64, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    op.mark_time(times, counter, BEGAN, False)
    torch.cuda.synchronize()
    time.sleep(0.05)
    op.mark_time(times, counter, ENDED, True)
    took = int(times[0, ENDED] - times[0, BEGAN])
    assert 45e6 < took < 5e9
