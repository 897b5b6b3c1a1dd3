# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `round_commit`: one launch, one program a slot, the only one that accesses its
state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import power_of_two
from spd.kernels.round.commit import EMISSION_HEAD, FAILED, FULL, GOING_ON, STOPPED
from spd.kernels.round.window import COMMITTED, NUM_TIMES, RoundTensors, RoundWindow
from spd.kernels.round.window_triton import timer_and_now, write_time

_GOING_ON = tl.constexpr(GOING_ON)
_STOPPED = tl.constexpr(STOPPED)
_FULL = tl.constexpr(FULL)
_FAILED = tl.constexpr(FAILED)
_HEAD = tl.constexpr(EMISSION_HEAD)
_COMMITTED = tl.constexpr(COMMITTED)
_NUM_TIMES = tl.constexpr(NUM_TIMES)


_NOT_SPECIALIZED = (
    "draft_stride",
    "sampled_stride",
    "finite_stride",
    "tokens_stride",
    "stop_stride",
    "generated_stride",
    "ring_stride",
    "slot_stride",
    "depth",
    "k",
    "stops",
    "now",
)


# One warp, because a slot's length and state are read before they are written, without a barrier.
@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def commit_kernel(
    draft, num_drafts, sampled, finite, tokens, length, length_limit, stop_ids, active, generated,
    ring, counter, accepted, times, match, draft_stride, sampled_stride, finite_stride, tokens_stride,
    stop_stride, generated_stride, ring_stride, slot_stride, depth, k, stops, now,
    ROWS: tl.constexpr, STOPS: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_ACCEPTED: tl.constexpr,
    TIMER: tl.constexpr,
):  # fmt: skip
    """Commit a slot's window and store its emission; lane i is row i of the window."""
    s = tl.program_id(0).to(tl.int64)
    write_time(times, counter, depth, now, s == 0, _COMMITTED, _NUM_TIMES, TIMER)
    row = tl.arange(0, ROWS)
    inside = row <= k
    samples = tl.load(sampled + s * sampled_stride + row, mask=inside, other=0)
    ids = tl.load(draft + s * draft_stride + row, mask=row < k, other=0)
    is_finite = tl.load(finite + s * finite_stride + row, mask=inside, other=1)
    lane = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids + s * stop_stride + lane, mask=lane < stops, other=0)
    valid_drafts = tl.load(num_drafts + s)
    size = tl.load(length + s)
    limit = tl.load(length_limit + s)
    is_live = tl.load(active + s) != 0
    place = tl.load(counter) % depth
    if HAS_ACCEPTED:
        leading = tl.load(accepted + s).to(tl.int32)
    else:
        # Row k has no draft, so it always differs.
        leading = tl.min(tl.where((ids == samples) & (row < k) & (row < valid_drafts), ROWS, row))
    hits = (samples[:, None] == stop_id[None, :]) & (lane < stops)[None, :]
    is_stop = tl.max(hits.to(tl.int32), axis=1) > 0
    # After the accepted rows neither of the two changes the result.
    stop_row = tl.min(tl.where(is_stop, row, k + 1))
    bad_row = tl.min(tl.where(is_finite == 0, row, k + 1))
    count = tl.where(is_live, tl.minimum(tl.minimum(leading, stop_row) + 1, bad_row), 0)
    reason = tl.where(size + count >= limit, _FULL, _GOING_ON)
    reason = tl.where((stop_row <= leading) & (stop_row < bad_row), _STOPPED, reason)
    # A row without finite logits has no token, so it cannot be a stop either.
    reason = tl.where((bad_row <= leading) & (bad_row <= stop_row), _FAILED, reason)
    reason = tl.where(is_live, reason, _GOING_ON)
    is_committed = row < count
    tl.store(tokens + s * tokens_stride + size + row, samples, mask=is_committed)
    if HAS_COUNTS:
        # Atomic, for one token may be committed twice in a window; sums of integers have no order.
        ones = tl.full((ROWS,), 1, tl.int32)
        counts = generated + s * generated_stride + samples
        tl.atomic_add(counts, ones, mask=is_committed, sem="relaxed")
    tl.store(length + s, size + count)
    tl.store(active + s, is_live & (reason == _GOING_ON))
    at = ring + place * ring_stride + s * slot_stride
    matched = tl.load(match + s)
    tl.store(at, size)
    tl.store(at + 1, valid_drafts)
    tl.store(at + 2, leading)
    tl.store(at + 3, count)
    tl.store(at + 4, reason)
    tl.store(at + 5, k)
    tl.store(at + 6, matched)
    tl.store(at + _HEAD + row, samples, mask=inside)
    tl.store(at + _HEAD + k + 1 + row, ids, mask=row < k)


def round_commit(
    state: RoundTensors,
    window: RoundWindow,
    sampled: Tensor,
    finite: Tensor,
    accepted: Tensor | None = None,
    generated: Tensor | None = None,
) -> None:
    """Launch `Kernels.round_commit`; rows of sampled and finite have stride 1."""
    draft = window.draft
    length = state.length
    stops = state.stop_ids
    ring = state.ring
    slots, k = draft.shape
    timer, now = timer_and_now(commit_kernel)
    sizes = {"ROWS": power_of_two(k + 1), "STOPS": power_of_two(stops.shape[1])}
    kinds = {
        "HAS_COUNTS": generated is not None,
        "HAS_ACCEPTED": accepted is not None,
        "TIMER": timer,
    }
    commit_kernel[(slots,)](
        draft,
        window.num_drafts,
        sampled,
        finite,
        state.tokens,
        length,
        state.length_limit,
        stops,
        state.active,
        length if generated is None else generated,
        ring,
        state.counter,
        length if accepted is None else accepted,
        state.times,
        state.match,
        draft.stride(0),
        sampled.stride(0),
        finite.stride(0),
        state.tokens.stride(0),
        stops.stride(0),
        0 if generated is None else generated.stride(0),
        ring.stride(0),
        ring.stride(1),
        ring.shape[0],
        k,
        stops.shape[1],
        now,
        **sizes,
        **kinds,
        num_warps=1,
    )
