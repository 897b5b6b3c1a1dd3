# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `head_input`: one program a row, or a half of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import pdl_options, power_of_two
from spd.kernels.linear.head_input import HeadRows, PairNorms
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.round.window import Rows


@triton.jit(do_not_specialize=["slots", "width", "depth", "states_stride", "masked"])
def head_input_kernel(
    token_ids, table, states, positions, token_norm, hidden_norm, out, stored_states, slots, width, depth,
    states_stride, masked, epsilon,
    H: tl.constexpr, BLOCK: tl.constexpr, HIDDEN_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, 0) norms the embedding, (row, 1) the state, and copies it to stored_states if
    any."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_state = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < H
    position = tl.load(positions + row)
    if is_state == 0:
        token = tl.load(token_ids + row)
        visible = tl.where(position == masked, 0, H)
        value = tl.load(table + token * H + column, mask=column < visible, other=0.0).to(tl.float32)
        scale = tl.load(token_norm + column, mask=inside, other=0.0).to(tl.float32)
    else:
        slot = tl.minimum(row // width, slots - 1)
        place = (position + depth - 1) % depth
        source = states + slot * states_stride + place * H + column
        state = tl.load(source, mask=inside, other=0.0)
        if stored_states is not None:
            tl.store(stored_states + row * H + column, state, mask=inside)
        value = state.to(tl.float32)
        scale = tl.load(hidden_norm + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / H + epsilon) * scale
    second = is_state == 0 if HIDDEN_FIRST else is_state == 1
    to = out + row * (2 * H) + tl.where(second, H, 0) + column
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def head_input(
    token_ids: Tensor, table: Tensor, batch: HeadRows, norms: PairNorms, keeps_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Launch `Kernels.head_input`; the table and the states of a slot are contiguous."""
    rows = token_ids.shape[0]
    size = table.shape[1]
    states = batch.states
    assert states is not None
    out = torch.empty((rows, 2 * size), dtype=table.dtype, device=table.device)
    stored_states = (
        torch.empty((rows, size), dtype=table.dtype, device=table.device) if keeps_state else None
    )
    head_input_kernel[(rows, 2)](
        token_ids,
        table,
        states.rings,
        batch.positions,
        norms.token,
        norms.hidden,
        out,
        stored_states,
        states.rings.shape[0],
        batch.width,
        states.depth,
        states.rings.stride(0),
        norms.masked,
        norms.epsilon,
        HIDDEN_FIRST=norms.hidden_first,
        **row_options(size, table.device),
    )
    return out, stored_states


def row_options(size: int, device: torch.device) -> dict[str, int]:
    """Return constants and options of a program that holds a full row of `size` elements."""
    warps = 4 if size <= 2048 else 8
    return {"H": size, "BLOCK": power_of_two(size), "num_warps": warps, **pdl_options(device)}


@triton.jit(do_not_specialize=["width", "depth", "rows_stride", "states_stride"])
def keep_states_kernel(
    rows, positions, valid, kv_slots, states, page_states, width, depth, rows_stride, states_stride,
    H: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one row [S * W] of `rows`, whose slots have the stride rows_stride."""
    wait_and_release(PDL)
    at = tl.program_id(0).to(tl.int64)
    slot = at // width
    column = tl.arange(0, BLOCK)
    is_stored = column < tl.where(tl.load(valid + at) != 0, H, 0)
    value = tl.load(rows + slot * rows_stride + at % width * H + column, mask=is_stored, other=0.0)
    place = tl.load(positions + at) % depth
    tl.store(states + slot * states_stride + place * H + column, value, mask=is_stored)
    kv_slot = tl.load(kv_slots + at)
    ends = tl.where(kv_slot % PAGE == PAGE - 1, H, 0)
    tl.store(page_states + kv_slot // PAGE * H + column, value, mask=is_stored & (column < ends))


def keep_states(
    hidden: Tensor, rows: Rows, rings: Tensor, page_states: Tensor, page_size: int
) -> None:
    """Launch `Kernels.keep_states`; a slot's rows are contiguous, invalid rows write nothing."""
    slots, width, size = hidden.shape
    keep_states_kernel[(slots * width,)](
        hidden,
        rows.positions.contiguous(),
        rows.valid.contiguous(),
        rows.kv_slots.contiguous(),
        rings,
        page_states,
        width,
        rings.shape[1] - 1,
        hidden.stride(0),
        rings.stride(0),
        PAGE=page_size,
        **row_options(size, hidden.device),
    )
