# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `head_input`: one program a row, and half of it where there are two."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import Signature, overlap, power_of_two
from spd.kernels.overlap_triton import release, wait

_PAIRS = ("slots", "width", "depth", "states_stride", "masked")


@triton.jit(do_not_specialize=_PAIRS)
def head_input_kernel(
    token_ids, table, states, positions, token_norm, hidden_norm, out, kept, slots, width, depth,
    states_stride, masked, epsilon,
    H: tl.constexpr, BLOCK: tl.constexpr, HIDDEN_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, 0) norms the embedding, (row, 1) the state, and stores it where `kept` is given."""
    wait(PDL)
    release(PDL)
    row, is_state = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < H
    position = tl.load(positions + row)
    if is_state == 0:
        token = tl.load(token_ids + row)
        shown = tl.where(position == masked, 0, H)
        value = tl.load(table + token * H + column, mask=column < shown, other=0.0).to(tl.float32)
        scale = tl.load(token_norm + column, mask=inside, other=0.0).to(tl.float32)
    else:
        slot = tl.minimum(row // width, slots - 1)
        place = (position + depth - 1) % depth
        source = states + slot * states_stride + place * H + column
        state = tl.load(source, mask=inside, other=0.0)
        if kept is not None:
            tl.store(kept + row * H + column, state, mask=inside)
        value = state.to(tl.float32)
        scale = tl.load(hidden_norm + column, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / H + epsilon) * scale
    second = is_state == 0 if HIDDEN_FIRST else is_state == 1
    to = out + row * (2 * H) + tl.where(second, H, 0) + column
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def head_input(
    token_ids: Tensor,
    table: Tensor,
    states: Tensor,
    depth: int,
    positions: Tensor,
    width: int,
    token_norm: Tensor,
    hidden_norm: Tensor,
    epsilon: float,
    masked: int,
    hidden_first: bool,
    *,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `head_input.head_input`; table contiguous, the states of a slot too."""
    rows, size = token_ids.shape[0], table.shape[1]
    out = torch.empty((rows, 2 * size), dtype=table.dtype, device=table.device)
    kept = torch.empty((rows, size), dtype=table.dtype, device=table.device) if keeps_state else None
    head_input_kernel[(rows, 2)](
        token_ids,
        table,
        states,
        positions,
        token_norm,
        hidden_norm,
        out,
        kept,
        states.shape[0],
        width,
        depth,
        states.stride(0),
        masked,
        epsilon,
        H=size,
        BLOCK=power_of_two(size),
        HIDDEN_FIRST=hidden_first,
        num_warps=warps_for(size),
        **overlap(table.device),
    )
    return out, kept


def warps_for(size: int) -> int:
    """Warps of a program that holds a whole row of `size` elements."""
    return 4 if size <= 2048 else 8


_KEPT = ("width", "depth", "rows_stride", "states_stride")


@triton.jit(do_not_specialize=_KEPT)
def keep_states_kernel(
    rows,
    positions,
    valid,
    kv_slots,
    states,
    page_states,
    width,
    depth,
    rows_stride,
    states_stride,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row [S * W] of `rows`, whose slots lie rows_stride apart."""
    wait(PDL)
    release(PDL)
    at = tl.program_id(0).to(tl.int64)
    slot, column = at // width, tl.arange(0, BLOCK)
    kept = column < tl.where(tl.load(valid + at) != 0, H, 0)
    value = tl.load(rows + slot * rows_stride + at % width * H + column, mask=kept, other=0.0)
    place = tl.load(positions + at) % depth
    tl.store(states + slot * states_stride + place * H + column, value, mask=kept)
    kv_slot = tl.load(kv_slots + at)
    ends = tl.where(kv_slot % PAGE == PAGE - 1, H, 0)
    tl.store(page_states + kv_slot // PAGE * H + column, value, mask=kept & (column < ends))


def keep_states(
    rows: Tensor,
    positions: Tensor,
    valid: Tensor,
    kv_slots: Tensor,
    states: Tensor,
    page_states: Tensor,
    page_size: int,
) -> None:
    """See `head_input.keep_states`; every slot's rows contiguous, rows that are not valid write nothing."""
    slots, width, size = rows.shape
    keep_states_kernel[(slots * width,)](
        rows,
        positions.contiguous(),
        valid.contiguous(),
        kv_slots.contiguous(),
        states,
        page_states,
        width,
        states.shape[1] - 1,
        rows.stride(0),
        states.stride(0),
        H=size,
        PAGE=page_size,
        BLOCK=power_of_two(size),
        num_warps=warps_for(size),
        **overlap(rows.device),
    )


def signatures() -> dict[str, Signature]:
    """As launched for a model 4096 wide, and for one 7168 wide."""
    found: dict[str, Signature] = {}
    for size in (4096, 7168):
        block = {"H": size, "BLOCK": power_of_two(size), "PDL": True}
        options = {"num_warps": warps_for(size)}
        names = ("table", "states", "token_norm", "hidden_norm", "out")
        types = dict.fromkeys(("token_ids", "positions"), "*i64") | dict.fromkeys(names, "*bf16")
        types |= dict.fromkeys(_PAIRS, "i32") | {"epsilon": "fp32"}
        pairs = Signature(
            head_input_kernel, types, block | {"HIDDEN_FIRST": False}, options, unspecialized=_PAIRS
        )
        types = dict.fromkeys(("positions", "kv_slots"), "*i64") | {"valid": "*i1"}
        types |= dict.fromkeys(("rows", "states", "page_states"), "*bf16") | dict.fromkeys(_KEPT, "i32")
        kept = Signature(keep_states_kernel, types, block | {"PAGE": 64}, options, unspecialized=_KEPT)
        with_state = replace(pairs, types=pairs.types | {"kept": "*bf16"})
        found |= {f"pairs_{size}": pairs, f"pairs_state_{size}": with_state, f"keep_states_{size}": kept}
    return found
