"""The gated delta rule: a state for each head that decays, is corrected by each token, and is read by it.

The state written back is that of committed tokens only. The tokens after it, whose fate the next round
knows, are kept in rings as the recurrence consumed them, and a pass begins by applying those that were
accepted. So the state is read once and written once a pass, however many drafts it verifies, and each token's
update is the same float32 arithmetic whether it is decoded, verified, or applied again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from spd.kernels.recurrent.short_conv import Segments

NORM_EPSILON = 1e-6
"""Inside the root of a query's or key's length."""


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


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of each head, times silu(gate), rounded once: x float32 [T, H, dv] to [T, H * dv].

    gate [T, H * dv], rows with any stride, has the result's dtype; weight float32 [dv] is every head's.
    """
    normed = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    opened = gate.float().view(x.shape)
    return (normed * (opened * opened.sigmoid())).to(gate.dtype).flatten(1)
