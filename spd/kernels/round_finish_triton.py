# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `round_finish`: the GPU's global timer; the host's clock under the interpreter."""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from spd.kernels.launch import Signature
from spd.kernels.round_finish import ENDED, NUM_TIMES


@triton.jit
def write_time(
    times,
    counter,
    depth,
    now,
    chosen,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    TIMER: tl.constexpr,
):
    """Write the timer, or `now` where there is none, to the round's row, in the chosen program only."""
    at = times + tl.load(counter) % depth * COLUMNS + COLUMN
    if TIMER:
        tl.store(at, cuda.globaltimer(), mask=chosen)
    else:
        tl.store(at, now, mask=chosen)


@triton.jit(do_not_specialize=["depth", "now"])
def mark_kernel(
    times,
    counter,
    depth,
    now,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADVANCE: tl.constexpr,
    TIMER: tl.constexpr,
):
    """One program: the time, then the counter."""
    write_time(times, counter, depth, now, True, COLUMN, COLUMNS, TIMER)
    if ADVANCE:
        tl.store(counter, tl.load(counter) + 1)


def timer_and_now(kernel: Any) -> tuple[bool, int]:
    """Whether a kernel can read the GPU's timer, and the time to write where it cannot."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled, 0 if compiled else time.perf_counter_ns()


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    """See `round_finish.mark_time`."""
    timer, now = timer_and_now(mark_kernel)
    mark_kernel[(1,)](
        times,
        counter,
        times.shape[0],
        now,
        COLUMN=column,
        COLUMNS=NUM_TIMES,
        ADVANCE=advance,
        TIMER=timer,
        num_warps=1,
    )


def signatures() -> dict[str, Signature]:
    """The mark that ends a round."""
    types, varying = {"times": "*i64", "counter": "*i64", "depth": "i32", "now": "i32"}, ("depth", "now")
    constants = {"COLUMN": ENDED, "COLUMNS": NUM_TIMES, "ADVANCE": True, "TIMER": True}
    mark = Signature(mark_kernel, types, constants, {"num_warps": 1}, unspecialized=varying)
    return {"mark_time": mark}
