# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A barrier of all programs of a launch, which must run at the same time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count"])
def barrier_kernel(arrived, count):
    """Wait `count` times until every program has come as far; arrived int32 [1] is zero before."""
    programs = tl.num_programs(0)
    for step in range(count):
        tl.debug_barrier()
        seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
        while seen < (step + 1) * programs:
            seen = tl.atomic_add(arrived, 0, sem="acquire")
        tl.debug_barrier()


def barriers(arrived: Tensor, programs: int, count: int) -> None:
    """Launch `programs` programs, one a processor, that meet `count` times."""
    arrived.zero_()
    barrier_kernel[(programs,)](arrived, count, num_warps=4)
