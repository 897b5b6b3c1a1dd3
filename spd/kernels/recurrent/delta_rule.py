"""The gated delta rule: a state for each head that each token decays, corrects and then queries.

The written state stands at multiples of `BLOCK` positions only. A row is computed from the state at
the last multiple and the tokens since: rings hold each one's key, its update (what it adds to the
state along its key) and its decay. So a row's bits follow from its absolute position, whatever rows
its pass has and whatever was accepted before it. A pass reads the state once; it writes it where
committed tokens have passed a border, once in `BLOCK` positions. Where a window passes one, the
same function folds the block into the next state, which is not written.

Full prompt chunks are computed by a few products, from the first border to the last: within a
chunk, each token's update depends on those of the tokens before it, a triangular system that is
solved once. Its sums have another order, so full chunks are a program of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.state_blocks import BLOCK, last_border

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key that is normed."""
CHUNK = 32
"""Rows of a chunk; the products' shapes do not depend on the number of chunks."""


class DeltaMemory(NamedTuple):
    """One layer's state of S slots, float32: H value heads, of which H / Hk share a key head.

    Rings of D rows hold position p at p % D; D is a multiple of `BLOCK`, and at least `BLOCK` and
    the rows of two windows.
    """

    state: Tensor  # [S, H, dk, dv] at position `Segments.applied`; not read where that is 0
    keys: Tensor  # [S, D, Hk, dk] normed, but for a factor
    updates: Tensor  # [S, D, H, dv]
    gates: (
        Tensor  # [S, D, H, 2]: the decay, and this factor of the key, 1 where it is stored normed
    )


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


@dataclass
class Block:
    """The tokens of `BLOCK` positions; those that are not yet there add nothing."""

    keys: Tensor  # [H, BLOCK, dk]
    updates: Tensor  # [H, BLOCK, dv]
    decays: Tensor  # [H, BLOCK]

    @classmethod
    def load(cls, memory: DeltaMemory, slot: int, begin: int, end: int) -> Block:
        """Return the block at `begin` with the tokens before `end`, from a slot's rings."""
        num_known = max(0, min(end - begin, BLOCK))
        place = begin % memory.keys.shape[1]
        rows = slice(place, place + num_known)
        decays = pad(memory.gates[slot, rows, :, 0].T, (0, BLOCK - num_known), value=1.0)
        keys, updates = (
            pad(
                ring[slot, rows].repeat_interleave(len(decays) // ring.shape[2], 1).transpose(0, 1),
                (0, 0, 0, BLOCK - num_known),
            )
            for ring in (memory.keys, memory.updates)
        )
        return cls(keys, updates, decays)

    def decay_products(self) -> Tensor:
        """Return the decay at each row since each token, [H, BLOCK, 1 + BLOCK]; 0 of later tokens.

        The first column is the decay since before the block.
        """
        size = BLOCK, 1 + BLOCK
        is_later = torch.ones(size, dtype=torch.bool, device=self.decays.device).triu(1)
        factors = self.decays[:, :, None].expand(-1, *size).masked_fill(is_later, 1.0)
        return factors.cumprod(1).tril(1)

    def fold(self, state: Tensor) -> Tensor:
        """Return the state [H, dk, dv] at the block's end, of that at its begin."""
        decay = self.decay_products()[:, -1, :, None]
        return state * decay[:, :1] + (self.keys * decay[:, 1:]).mT @ self.updates

    def run(
        self,
        state: Tensor,
        new_rows: range,
        query: Tensor,
        value: Tensor,
        amount: Tensor,
        corrects: bool,
    ) -> Tensor:
        """Fill in the updates of rows `new_rows`; return what they read, [H, BLOCK, dv].

        state is that at the block's begin. query [H, BLOCK, dk], value [H, BLOCK, dv] and amount
        [H, BLOCK], the factor of the correction or value, are read of rows `new_rows`, each in its
        place: products have one shape, so a row's bits do not depend on how many there are.
        """
        decay = self.decay_products()
        if corrects:
            predicted = (self.keys @ state) * decay[:, :, :1]
            system = (self.keys @ self.keys.mT * decay[:, :, 1:]).tril(-1)
        for row in new_rows:
            update = value[:, row]
            if corrects:
                update = update - predicted[:, row]
                update = update - (system[:, row, :, None] * self.updates).sum(1)
            self.updates[:, row] = update * amount[:, row, None]
        scores = query @ self.keys.mT * decay[:, :, 1:]
        return (query @ state) * decay[:, :, :1] + scores @ self.updates


@dataclass
class _Pass:
    """The rows of a pass, by heads, and what they read."""

    mixed: Tensor
    raw_gates: Tensor
    rule: DeltaRule
    memory: DeltaMemory
    out: Tensor

    def split(self, rows: slice, before: int, size: int) -> tuple[Tensor, ...]:
        """Return queries, keys, values [H, size, ...] and gates [2, H, size] of rows.

        `before` rows of zeros come first, and some last.
        """
        padding = (0, 0, before, size - before - (rows.stop - rows.start))
        heads, width, value_size = self.memory.state.shape[1:]
        key_heads = self.memory.keys.shape[2]
        query, key, value = torch.split(
            pad(self.mixed[rows], padding), [key_heads * width] * 2 + [heads * value_size], 1
        )
        query, key = (x.reshape(size, key_heads, width) for x in (query, key))
        if self.rule.corrects:
            query = normalize(query) * width**-0.5
            key = normalize(key)
        gates = torch.stack(self.rule.gates(pad(self.raw_gates[rows], padding))).mT
        query, key, value = (
            x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1).contiguous()
            for x in (query, key, value.reshape(size, heads, value_size))
        )
        return query, key, value, gates

    def run_rows(
        self, slot: int, first: int, start: int, end: int, keep: int, applied: int
    ) -> None:
        """Run the rows of positions `start` to `end`, the first of which is row `first`.

        The state is written as of `keep`, and rows from there on are stored in the rings.
        """
        memory = self.memory
        state = torch.zeros_like(memory.state[slot])
        if applied:
            state.copy_(memory.state[slot])
        for begin in range(applied, end, BLOCK):
            block = Block.load(memory, slot, begin, start)
            new_rows = range(max(begin, start), min(begin + BLOCK, end))
            if new_rows:
                rows = slice(first + new_rows.start - start, first + new_rows.stop - start)
                self._run_block(block, state, rows, new_rows.start - begin)
                self._store(slot, block, range(max(new_rows.start, keep), new_rows.stop))
            border = begin + BLOCK
            if border < end or border == keep:
                state = block.fold(state)
            if border == keep:
                memory.state[slot] = state

    def _run_block(self, block: Block, state: Tensor, rows: slice, before: int) -> None:
        """Run rows that `before` tokens of a block precede."""
        query, key, value, (decay, amount) = self.split(rows, before, BLOCK)
        new_rows = range(before, before + rows.stop - rows.start)
        inside = slice(new_rows.start, new_rows.stop)
        block.keys[:, inside] = key[:, inside]
        block.decays[:, inside] = decay.exp()[:, inside]
        results = block.run(state, new_rows, query, value, amount, self.rule.corrects)
        self.out[rows] = results[:, inside].transpose(0, 1)

    def _store(self, slot: int, block: Block, positions: range) -> None:
        """Store a block's tokens of some positions in the rings of a slot."""
        if positions:
            keys, updates, gates = (ring[slot] for ring in self.memory[1:])
            depth, key_heads = keys.shape[:2]
            group = len(block.keys) // key_heads
            place = positions.start % depth
            to = slice(place, place + len(positions))
            inside = slice(positions.start % BLOCK, positions.start % BLOCK + len(positions))
            keys[to] = block.keys[::group, inside].transpose(0, 1)
            updates[to] = block.updates[:, inside].transpose(0, 1)
            gates[to, :, 0] = block.decays[:, inside].T
            gates[to, :, 1] = 1.0

    def run_chunks(self, slot: int, first: int, start: int, end: int) -> None:
        """Run the rows of positions `start` to `end`, both borders, in chunks."""
        state = self.memory.state[slot]
        if not start:
            state.zero_()
        for begin in range(first, first + end - start, CHUNK):
            rows = slice(begin, min(begin + CHUNK, first + end - start))
            query, key, value, gates = self.split(rows, 0, CHUNK)
            gates[..., rows.stop - rows.start :] = 0.0  # rows beyond change no state
            results, after = _apply_chunk(
                state=state,
                query=query,
                key=key,
                value=value,
                gates=gates,
                corrects=self.rule.corrects,
            )
            state.copy_(after)
            self.out[rows] = results.transpose(0, 1)[: rows.stop - rows.start]


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Compute `Kernels.delta_rule` by torch."""
    heads, _, size = memory.state.shape[1:]
    out = mixed.new_zeros(mixed.shape[0], heads, size)
    row_pass = _Pass(mixed, raw_gates, rule, memory, out)
    for slot, first, count, start, keep, applied in rows.runs():
        row_pass.run_rows(slot, first, start, start + count, keep, applied)
    return out


def delta_chunks(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Compute `Kernels.delta_chunks` by torch."""
    heads, _, size = memory.state.shape[1:]
    out = mixed.new_zeros(mixed.shape[0], heads, size)
    row_pass = _Pass(mixed, raw_gates, rule, memory, out)
    for slot, first, count, start, keep, applied in rows.runs():
        end = start + count
        assert applied == last_border(start) and keep == last_border(end)
        border = min(last_border(start + BLOCK - 1), end)
        row_pass.run_rows(slot, first, start, border, min(keep, border), applied)
        if border < keep:
            row_pass.run_chunks(slot, first + border - start, border, keep)
        last = max(border, keep)
        row_pass.run_rows(slot, first + last - start, last, end, keep, keep)
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
