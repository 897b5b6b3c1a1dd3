"""The gated delta rule: a state for each head that decays, is corrected by each token, and is read by it.

The state written back is that of committed tokens only. The tokens after it, whose fate the next round
knows, are kept in rings as the recurrence consumed them, and a pass begins by applying those that were
accepted. So the state is read once and written once a pass, however many drafts it verifies, and each token's
update is the same float32 arithmetic whether it is decoded, verified, or applied again.

Whole chunks of a prompt go by a few products in place of a step a token: within a chunk, what each token
writes into the state depends on what the ones before it wrote, a triangular system that is solved once. Sums
run in another order there, so whole chunks are a program of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from spd.kernels.recurrent.short_conv import Segments

NORM_EPSILON = 1e-6
"""Inside the root of a query's or key's length."""
CHUNK = 32
"""Rows; the products' shapes do not depend on how many of them there are."""


class DeltaMemory(NamedTuple):
    """What one layer keeps of S slots, float32: H value heads, of which H / Hk share a key head."""

    state: Tensor  # [S, H, dk, dv] as of `Segments.applied`; not read where that is 0
    keys: Tensor  # [S, D, Hk, dk] normed, at position % D; D >= the rows of two windows
    values: Tensor  # [S, D, H, dv]
    gates: Tensor  # [S, D, H, 2]: the decay, and how much is corrected


def unit(x: Tensor) -> Tensor:
    """x over the length of its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def log_decay(step: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """The logarithm of a step's decay, of each head."""
    return -rate.exp() * softplus(step + bias)


def _apply(state: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
    """The state [H, dk, dv] after one token: key [H, dk, 1], value [H, 1, dv], gates [H, 2]."""
    state = state * gates[:, 0, None, None]
    correction = (value - (state * key).sum(1, keepdim=True)) * gates[:, 1, None, None]
    return state + key * correction


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rate: Tensor, bias: Tensor, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """What each row reads of its slot's state, float32 [T, H, dv]; see `DeltaMemory`, written in place.

    mixed float32 [T, 2 * Hk * dk + H * dv]: queries, keys, values. raw_gates [T, 2 * H], rows with any
    stride: corrections before the sigmoid, then steps. rate and bias float32 [H]: a step's decay is
    exp(-exp(rate) * softplus(step + bias)).
    Value head h reads query and key head h // (H / Hk). Rows outside of every segment give zeros.
    Source: Yang et al. 2024, Gated Delta Networks (2412.06464), as Qwen3-Next and Qwen3.5 apply it.
    """
    state, keys, values, gates = memory
    (heads, width, size), key_heads, depth = state.shape[1:], keys.shape[2], keys.shape[1]
    out = mixed.new_zeros(mixed.shape[0], heads, size)

    def spread(x: Tensor) -> Tensor:
        """[Hk, dk] as [H, dk, 1]."""
        return x.repeat_interleave(heads // key_heads, 0).unsqueeze(-1)

    for slot, first, count, start, keep, applied in rows.runs():
        current = state[slot] if applied else torch.zeros_like(state[slot])
        for position in range(applied, start + count):  # one by one: every token's arithmetic has one shape
            place, row = position % depth, first + position - start
            if position == keep:
                state[slot] = current
            if position >= start:
                query, key, value = torch.split(mixed[row], [key_heads * width] * 2 + [heads * size])
                correct, step = raw_gates[row].float().chunk(2)
                keys[slot, place] = unit(key.view(key_heads, width))
                values[slot, place] = value.view(heads, size)
                decay = log_decay(step, rate, bias).exp()
                gates[slot, place] = torch.stack((decay, correct.sigmoid()), -1)
            current = _apply(
                current, spread(keys[slot, place]), values[slot, place, :, None], gates[slot, place]
            )
            if position >= start:
                asked = unit(query.view(key_heads, width)) * width**-0.5
                out[row] = (current * spread(asked)).sum(1)
        if keep == start + count:
            state[slot] = current
    return out


def delta_chunks(
    mixed: Tensor, raw_gates: Tensor, rate: Tensor, bias: Tensor, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """As `delta_rule` up to rounding, of runs that stay as a whole and begin where their states stand.

    So the states are written as of the runs' ends; the rings are neither read nor written.
    Source: Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule (2406.06484), with the
    decay of Gated Delta Networks (2412.06464).
    """
    (heads, width, size), key_heads = memory.state.shape[1:], memory.keys.shape[2]
    out = mixed.new_zeros(mixed.shape[0], heads, size)
    for slot, first, count, start, keep, applied in rows.runs():
        assert applied == start and keep == start + count
        state = memory.state[slot] if start else torch.zeros_like(memory.state[slot])
        for begin in range(first, first + count, CHUNK):
            own = slice(begin, min(begin + CHUNK, first + count))
            missing = CHUNK - (own.stop - begin)  # rows of zeros, which neither decay nor correct
            query, key, value = torch.split(mixed[own], [key_heads * width] * 2 + [heads * size], 1)
            correct, step = raw_gates[own].float().chunk(2, 1)
            gates = torch.stack((log_decay(step, rate, bias), correct.sigmoid()))
            query, key = (unit(x.view(-1, key_heads, width)) for x in (query, key))
            made, state = _chunk(
                state,
                *(
                    pad(x.repeat_interleave(heads // x.shape[1], 1), (0, 0, 0, 0, 0, missing)).transpose(0, 1)
                    for x in (query * width**-0.5, key, value.view(-1, heads, size))
                ),
                *pad(gates, (0, 0, 0, missing)).mT,
            )
            out[own] = made.transpose(0, 1)[: own.stop - begin]
        memory.state[slot] = state
    return out


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, correct: Tensor
) -> tuple[Tensor, Tensor]:
    """What the rows of a chunk read, [H, L, dv], and the state [H, dk, dv] behind it.

    query and key [H, L, dk], normed; value [H, L, dv]; decay, a logarithm, and correct [H, L].
    """
    total = decay.cumsum(1)
    fade = (total[:, :, None] - total[:, None]).tril().exp().tril()  # from a row to a later one
    faded = total.exp()[..., None]  # from before the chunk to a row
    written = (value - (key @ state) * faded) * correct[..., None]
    system = key @ key.mT * fade * correct[..., None]
    for row in range(CHUNK - 1):
        written[:, row + 1 :] -= system[:, row + 1 :, row, None] * written[:, row, None]
    read = (query @ state) * faded + (query @ key.mT * fade) @ written
    left = (total[:, -1:] - total).exp()[..., None]  # from a row to the end
    return read, state * faded[:, -1:] + (key * left).mT @ written


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of each head, times silu(gate), rounded once: x float32 [T, H, dv] to [T, H * dv].

    gate [T, H * dv], rows with any stride, has the result's dtype; weight float32 [dv] is every head's.
    """
    normed = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    opened = gate.float().view(x.shape)
    return (normed * (opened * opened.sigmoid())).to(gate.dtype).flatten(1)
