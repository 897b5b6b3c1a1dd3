# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Counters that the programs of one launch share: who is last, and whose turn is next.

Each counter is zero before a launch and zero again after it. A launch that dies leaves counts.
`plan_attention` zeroes attention's counters in each pass; those of a `LinearWorkspace` are zeroed
when it is made and after a round that failed (`Decoder.zero_counters`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_to_arrive(counters, at, count):
    """True in the last of `count` programs; what the others have stored is visible to it then."""
    tl.debug_barrier()
    last = tl.atomic_add(counters + at, 1, sem="acq_rel") == count - 1
    tl.store(counters + at, 0, mask=last)
    return last


@triton.jit
def next_turn(counter, turns):
    """Return the next of `turns` that no program has taken, or one beyond them.

    The first turns are those of the programs' own numbers. A program asks once before its first
    turn and once in each, so that the last of all asks is known: it resets the counter.
    """
    asked = tl.atomic_add(counter, 1, sem="relaxed")
    programs = tl.num_programs(0)
    tl.store(counter, 0, mask=asked == programs + turns - 1)
    return programs + asked
