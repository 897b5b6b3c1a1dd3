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

NORM_EPSILON = 1e-6  # inside the root of a query's or key's length
CHUNK = 32  # rows; the products' shapes do not depend on how many of them there are


class DeltaMemory(NamedTuple):
    """What one layer keeps of S slots, float32: H value heads, of which H / Hk share a key head."""

    state: Tensor  # [S, H, dk, dv] as of `Segments.applied`; not read where that is 0
    keys: Tensor  # [S, D, Hk, dk] normed, at position % D; D >= the rows of two windows
    values: Tensor  # [S, D, H, dv]
    gates: Tensor  # [S, D, H, 2]: the decay, and how much is corrected, or written


class DeltaRule(NamedTuple):
    """What a step does to a head's state: first, a decay of exp(-exp(rate) * softplus(step + bias))."""

    rate: Tensor  # float32 [H]
    bias: Tensor  # float32 [H]
    corrects: bool = True  # else as Mamba-2: a token is written whatever the state says of its key

    def gates(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The decay's logarithm, and how much is corrected or written, float32 [..., H], of raw gates."""
        steps = raw.float()
        size = self.rate.shape[0]
        amount = steps[..., :size].sigmoid() if self.corrects else softplus(steps + self.bias)
        return -self.rate.exp() * softplus(steps[..., -size:] + self.bias), amount


def unit(x: Tensor) -> Tensor:
    """x over the length of its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _apply(state: Tensor, key: Tensor, value: Tensor, gates: Tensor, corrects: bool) -> Tensor:
    """The state [H, dk, dv] after one token: key [H, dk, 1], value [H, 1, dv], gates [H, 2]."""
    state = state * gates[:, 0, None, None]
    if corrects:
        value = value - (state * key).sum(1, keepdim=True)
    return state + key * (value * gates[:, 1, None, None])


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Compute `Kernels.delta_rule` by torch."""
    state, keys, values, gates = memory
    heads, width, size = state.shape[1:]
    key_heads = keys.shape[2]
    depth = keys.shape[1]
    out = mixed.new_zeros(mixed.shape[0], heads, size)

    def spread(x: Tensor) -> Tensor:
        """[Hk, dk] as [H, dk, 1]."""
        return x.repeat_interleave(heads // key_heads, 0).unsqueeze(-1)

    for slot, first, count, start, keep, applied in rows.runs():
        current = state[slot] if applied else torch.zeros_like(state[slot])
        for position in range(
            applied, start + count
        ):  # one by one: every token's arithmetic has one shape
            place = position % depth
            row = first + position - start
            if position == keep:
                state[slot] = current
            if position >= start:
                query, key, value = torch.split(
                    mixed[row], [key_heads * width] * 2 + [heads * size]
                )
                query = query.view(key_heads, width)
                key = key.view(key_heads, width)
                if rule.corrects:
                    query = unit(query) * width**-0.5
                    key = unit(key)
                values[slot, place] = value.view(heads, size)
                keys[slot, place] = key
                decay, amount = rule.gates(raw_gates[row])
                gates[slot, place] = torch.stack((decay.exp(), amount), -1)
            kept = spread(keys[slot, place]), values[slot, place, :, None], gates[slot, place]
            current = _apply(current, *kept, rule.corrects)
            if position >= start:
                out[row] = (current * spread(query)).sum(1)
        if keep == start + count:
            state[slot] = current
    return out


def delta_chunks(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Compute `Kernels.delta_chunks` by torch."""
    heads, width, size = memory.state.shape[1:]
    key_heads = memory.keys.shape[2]
    out = mixed.new_zeros(mixed.shape[0], heads, size)
    for slot, first, count, start, keep, applied in rows.runs():
        assert applied == start and keep == start + count
        state = memory.state[slot] if start else torch.zeros_like(memory.state[slot])
        for begin in range(first, first + count, CHUNK):
            own = slice(begin, min(begin + CHUNK, first + count))
            missing = CHUNK - (own.stop - begin)  # rows of zeros, which neither decay nor correct
            query, key, value = torch.split(mixed[own], [key_heads * width] * 2 + [heads * size], 1)
            gates = torch.stack(rule.gates(raw_gates[own]))
            query, key = (x.view(-1, key_heads, width) for x in (query, key))
            if rule.corrects:
                query = unit(query) * width**-0.5
                key = unit(key)
            query, key, value = (
                pad(
                    x.repeat_interleave(heads // x.shape[1], 1), (0, 0, 0, 0, 0, missing)
                ).transpose(0, 1)
                for x in (query, key, value.view(-1, heads, size))
            )
            gates = pad(gates, (0, 0, 0, missing)).mT
            made, state = _chunk(state, query, key, value, gates, rule.corrects)
            out[own] = made.transpose(0, 1)[: own.stop - begin]
        memory.state[slot] = state
    return out


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, gates: Tensor, corrects: bool
) -> tuple[Tensor, Tensor]:
    """What the rows of a chunk read, [H, L, dv], and the state [H, dk, dv] behind it.

    query and key [H, L, dk]; value [H, L, dv]; gates [2, H, L], of which the decay is a logarithm.
    """
    decay, correct = gates
    total = decay.cumsum(1)
    fade = (total[:, :, None] - total[:, None]).tril().exp().tril()  # from a row to a later one
    faded = total.exp()[..., None]  # from before the chunk to a row
    written = value * correct[..., None]
    if corrects:
        written = (value - (key @ state) * faded) * correct[..., None]
        system = key @ key.mT * fade * correct[..., None]
        for row in range(CHUNK - 1):
            written[:, row + 1 :] -= system[:, row + 1 :, row, None] * written[:, row, None]
    read = (query @ state) * faded + (query @ key.mT * fade) @ written
    left = (total[:, -1:] - total).exp()[..., None]  # from a row to the end
    return read, state * faded[:, -1:] + (key * left).mT @ written


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
) -> Tensor:
    """Compute `Kernels.gated_norm` by torch."""
    opened = gate.float().reshape(x.shape)
    opened = opened * opened.sigmoid()
    x = x * opened if gate_first else x
    normed = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    return (normed if gate_first else normed * opened).to(gate.dtype).flatten(1)
