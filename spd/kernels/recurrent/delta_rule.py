"""The gated delta rule: a state for each head that each token decays, corrects and then queries.

The state written back is that of committed tokens only. The tokens after it, which the next round
accepts or rejects, are stored in rings as the recurrence consumed them, and a pass begins by
applying those that were accepted. So the state is read once and written once a pass, however many
drafts it verifies, and each token's update is the same float32 arithmetic whether it is decoded,
verified, or applied again.

Full prompt chunks are computed by a few products instead of a step a token: within a chunk, each
token's write to the state depends on the writes of the tokens before it, a triangular system that
is solved once. Its sums have another order, so full chunks are a program of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from spd.kernels.recurrent.short_conv import Segments

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key that is normed."""
CHUNK = 32
"""Rows of a chunk; the products' shapes do not depend on the number of chunks."""


class DeltaMemory(NamedTuple):
    """One layer's state of S slots, float32: H value heads, of which H / Hk share a key head."""

    state: Tensor  # [S, H, dk, dv] at position `Segments.applied`; not read where that is 0
    keys: Tensor  # [S, D, Hk, dk] normed, at position % D; D >= the rows of two windows
    values: Tensor  # [S, D, H, dv]
    gates: Tensor  # [S, D, H, 2]: the decay, and the factor of the correction, or of the value


class DeltaRule(NamedTuple):
    """The update of a head's state by a token.

    It decays by exp(-exp(rate) * softplus(step + bias)) first.
    """

    rate: Tensor  # float32 [H]
    bias: Tensor  # float32 [H]
    corrects: bool = True  # False as in Mamba-2: a value is added without subtracting the state's

    def gates(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decay's logarithm and the factor of the correction or value, float32 [..., H]
        each."""
        steps = raw.float()
        size = self.rate.shape[0]
        amount = steps[..., :size].sigmoid() if self.corrects else softplus(steps + self.bias)
        return -self.rate.exp() * softplus(steps[..., -size:] + self.bias), amount


def normalize(x: Tensor) -> Tensor:
    """Return x divided by the length of its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _apply_token(
    state: Tensor, key: Tensor, value: Tensor, gates: Tensor, corrects: bool
) -> Tensor:
    """Return the state [H, dk, dv] after one token: key [H, dk, 1], value [H, 1, dv], gates [H,
    2]."""
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

    def expand_heads(x: Tensor) -> Tensor:
        """Repeat x [Hk, dk] as [H, dk, 1]."""
        return x.repeat_interleave(heads // key_heads, 0).unsqueeze(-1)

    for slot, first, count, start, keep, applied in rows.runs():
        current = state[slot] if applied else torch.zeros_like(state[slot])
        # Token by token, so that every token's arithmetic has one shape.
        for position in range(applied, start + count):
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
                    query = normalize(query) * width**-0.5
                    key = normalize(key)
                values[slot, place] = value.view(heads, size)
                keys[slot, place] = key
                decay, amount = rule.gates(raw_gates[row])
                gates[slot, place] = torch.stack((decay.exp(), amount), -1)
            current = _apply_token(
                current,
                key=expand_heads(keys[slot, place]),
                value=values[slot, place, :, None],
                gates=gates[slot, place],
                corrects=rule.corrects,
            )
            if position >= start:
                out[row] = (current * expand_heads(query)).sum(1)
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
            chunk_rows = slice(begin, min(begin + CHUNK, first + count))
            padding = CHUNK - (chunk_rows.stop - begin)  # rows of zeros, which change no state
            query, key, value = torch.split(
                mixed[chunk_rows], [key_heads * width] * 2 + [heads * size], 1
            )
            gates = torch.stack(rule.gates(raw_gates[chunk_rows]))
            query, key = (x.view(-1, key_heads, width) for x in (query, key))
            if rule.corrects:
                query = normalize(query) * width**-0.5
                key = normalize(key)
            query, key, value = (
                pad(
                    x.repeat_interleave(heads // x.shape[1], 1), (0, 0, 0, 0, 0, padding)
                ).transpose(0, 1)
                for x in (query, key, value.view(-1, heads, size))
            )
            gates = pad(gates, (0, 0, 0, padding)).mT
            outputs, state = _apply_chunk(
                state=state, query=query, key=key, value=value, gates=gates, corrects=rule.corrects
            )
            out[chunk_rows] = outputs.transpose(0, 1)[: chunk_rows.stop - begin]
        memory.state[slot] = state
    return out


def _apply_chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, gates: Tensor, corrects: bool
) -> tuple[Tensor, Tensor]:
    """Return the results of a chunk's rows, [H, L, dv], and the state [H, dk, dv] after it.

    query and key [H, L, dk]; value [H, L, dv]; gates [2, H, L]: log decays and correction factors.
    """
    decay, correct = gates
    log_decay = decay.cumsum(1)
    row_decay = (
        (log_decay[:, :, None] - log_decay[:, None]).tril().exp().tril()
    )  # from a row to a later one
    start_decay = log_decay.exp()[..., None]  # from before the chunk to a row
    written = value * correct[..., None]
    if corrects:
        written = (value - (key @ state) * start_decay) * correct[..., None]
        system = key @ key.mT * row_decay * correct[..., None]
        for row in range(CHUNK - 1):
            written[:, row + 1 :] -= system[:, row + 1 :, row, None] * written[:, row, None]
    read = (query @ state) * start_decay + (query @ key.mT * row_decay) @ written
    end_decay = (log_decay[:, -1:] - log_decay).exp()[..., None]  # from a row to the end
    return read, state * start_decay[:, -1:] + (key * end_decay).mT @ written


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
) -> Tensor:
    """Compute `Kernels.gated_norm` by torch."""
    activated_gate = gate.float().reshape(x.shape)
    activated_gate = activated_gate * activated_gate.sigmoid()
    x = x * activated_gate if gate_first else x
    normed = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    return (normed if gate_first else normed * activated_gate).to(gate.dtype).flatten(1)
