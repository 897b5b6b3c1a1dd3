# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `round_commit`: one launch, one program a slot, which alone touches the slot's state."""

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


_VARYING = (
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


# One warp: it reads a slot's length and state before it writes them, with nothing between to wait for.
@triton.jit(do_not_specialize=_VARYING)
def commit_kernel(
    draft, num_drafts, sampled, finite, tokens, length, length_limit, stop_ids, active, generated,
    ring, counter, accepted, times, match, draft_stride, sampled_stride, finite_stride, tokens_stride,
    stop_stride, generated_stride, ring_stride, slot_stride, depth, k, stops, now,
    ROWS: tl.constexpr, STOPS: tl.constexpr, COUNTED: tl.constexpr, GIVEN: tl.constexpr,
    TIMER: tl.constexpr,
):  # fmt: skip
    """Lane i is row i of the slot's window."""
    s = tl.program_id(0).to(tl.int64)
    write_time(times, counter, depth, now, s == 0, _COMMITTED, _NUM_TIMES, TIMER)
    row = tl.arange(0, ROWS)
    inside = row <= k
    samples = tl.load(sampled + s * sampled_stride + row, mask=inside, other=0)
    ids = tl.load(draft + s * draft_stride + row, mask=row < k, other=0)
    sound = tl.load(finite + s * finite_stride + row, mask=inside, other=1)
    lane = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids + s * stop_stride + lane, mask=lane < stops, other=0)
    real = tl.load(num_drafts + s)
    size = tl.load(length + s)
    limit = tl.load(length_limit + s)
    live = tl.load(active + s) != 0
    place = tl.load(counter) % depth
    if GIVEN:
        right = tl.load(accepted + s).to(tl.int32)
    else:
        # Row k has no draft, so it always differs.
        right = tl.min(tl.where((ids == samples) & (row < k) & (row < real), ROWS, row))
    hits = (samples[:, None] == stop_id[None, :]) & (lane < stops)[None, :]
    is_stop = tl.max(hits.to(tl.int32), axis=1) > 0
    # Beyond what was accepted neither of the two changes anything.
    stop = tl.min(tl.where(is_stop, row, k + 1))
    bad = tl.min(tl.where(sound == 0, row, k + 1))
    count = tl.where(live, tl.minimum(tl.minimum(right, stop) + 1, bad), 0)
    reason = tl.where(size + count >= limit, _FULL, _GOING_ON)
    reason = tl.where((stop <= right) & (stop < bad), _STOPPED, reason)
    # A row without finite logits has no token, so that it cannot be a stop either.
    reason = tl.where((bad <= right) & (bad <= stop), _FAILED, reason)
    reason = tl.where(live, reason, _GOING_ON)
    kept = row < count
    tl.store(tokens + s * tokens_stride + size + row, samples, mask=kept)
    if COUNTED:
        # Atomic, for one token may be committed twice in a window; integers add up in any order.
        ones = tl.full((ROWS,), 1, tl.int32)
        tl.atomic_add(generated + s * generated_stride + samples, ones, mask=kept, sem="relaxed")
    tl.store(length + s, size + count)
    tl.store(active + s, live & (reason == _GOING_ON))
    at = ring + place * ring_stride + s * slot_stride
    matched = tl.load(match + s)
    tl.store(at, size)
    tl.store(at + 1, real)
    tl.store(at + 2, right)
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
    """Rows of sampled and finite have stride 1."""
    draft = window.draft
    length = state.length
    stops = state.stop_ids
    ring = state.ring
    slots, k = draft.shape
    timer, now = timer_and_now(commit_kernel)
    counts = length if generated is None else generated
    given = length if accepted is None else accepted
    sizes = {"ROWS": power_of_two(k + 1), "STOPS": power_of_two(stops.shape[1])}
    kinds = {"COUNTED": generated is not None, "GIVEN": accepted is not None, "TIMER": timer}
    commit_kernel[(slots,)](
        *(draft, window.num_drafts, sampled, finite),
        *(state.tokens, length, state.length_limit, stops, state.active),
        *(counts, ring, state.counter, given, state.times, state.match),
        *(rows.stride(0) for rows in (draft, sampled, finite, state.tokens, stops)),
        0 if generated is None else generated.stride(0),
        *(ring.stride(0), ring.stride(1), ring.shape[0], k, stops.shape[1], now),
        **sizes,
        **kinds,
        num_warps=1,
    )
