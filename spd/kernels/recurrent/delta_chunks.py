"""The gated delta rule by chunks of a prompt: a few products in place of a step a token.

Within a chunk, what each token writes into the state depends on what the ones before it wrote: a triangular
system, solved once. Sums run in another order than the recurrence's, so a prompt's whole chunks are a program
of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from spd.kernels.recurrent.delta_rule import DeltaMemory, log_decay, unit
from spd.kernels.recurrent.short_conv import Segments

CHUNK = 32
"""Rows; the products' shapes do not depend on how many of them there are."""


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
