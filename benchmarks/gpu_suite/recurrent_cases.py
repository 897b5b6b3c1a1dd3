"""Kernels of recurrent layers; see `kernel_cases` for the columns.

Bytes are those of each slot's state, read once and written once, as former versions moved them
whatever k is: a state is read once a round and written once in 16 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_suite.graph_timer import Call
from benchmarks.gpu_suite.kernel_cases import EPSILON, Bench, Case, Rows
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.state_blocks import BLOCK, last_border
from spd.runtime.round.limits import recurrent_ring_depth

TAPS = 4
START = 1000
"""The position of a first slot's rows, in the middle of a block; others begin behind it."""
SPARE = 4
LENGTHS = (0, 1, 4, 8)
"""Drafts a round that are measured."""


@dataclass(frozen=True)
class DeltaShape:
    """A layer's value heads and key heads, all of one size."""

    name: str
    heads: int
    key_heads: int
    size: int = 128

    @property
    def channels(self) -> int:
        """Return the channels of queries, keys and values."""
        return (2 * self.key_heads + self.heads) * self.size

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one slot's states."""
        return self.heads * self.size * self.size * 4


SHAPES = (DeltaShape("Qwen3.5-27B", 48, 16), DeltaShape("Qwen3.5-35B-A3B", 32, 16))


def windows(bench: Bench, slots: int, k: int) -> Segments:
    """Return a round's rows, after one that accepted half of its drafts.

    Slots begin at all places in a block, so that some windows pass a border, and some states are
    written.
    """
    slot = torch.arange(slots, device=bench.timer.device)
    start = START + slot % BLOCK
    former = start - 1 - k // 2
    counts = bench.integers(slots, fill=k + 1)
    table = torch.stack((slot, slot * (k + 1), counts, start, start // BLOCK * BLOCK))
    return Segments(table, former // BLOCK * BLOCK)


def prompt(bench: Bench, rows: int) -> Segments:
    """Return the rows of a full chunk in the middle of a prompt."""
    end = last_border(START + rows)
    table = [bench.integers(1, fill=value) for value in (0, 0, rows, START, end)]
    return Segments(torch.stack(table), bench.integers(1, fill=last_border(START)))


def memory(bench: Bench, shape: DeltaShape, slots: int, depth: int) -> DeltaMemory:
    """Return random states and rings, of decays between 0 and 1."""

    def drawn(*sizes: int) -> Tensor:
        return torch.randn((slots, *sizes), device=bench.timer.device)

    keys = torch.nn.functional.normalize(drawn(depth, shape.key_heads, shape.size), dim=-1)
    state = drawn(shape.heads, shape.size, shape.size)
    updates = drawn(depth, shape.heads, shape.size)
    return DeltaMemory(state, keys, updates, drawn(depth, shape.heads, 2).sigmoid())


def operands(bench: Bench, shape: DeltaShape, rows: int) -> tuple[Tensor, Tensor, DeltaRule]:
    """Return the rule's operands: convolved channels, gates, and each head's two constants."""
    device = bench.timer.device
    rate = torch.randn(shape.heads, device=device)
    bias = torch.randn(shape.heads, device=device)
    mixed = torch.randn(rows, shape.channels, device=device)
    return mixed, bench.normal(rows, 2 * shape.heads), DeltaRule(rate, bias)


def delta_case(
    bench: Bench, shape: DeltaShape, slots: int, lengths: Sequence[int] = LENGTHS
) -> Rows:
    """Measure rounds of k drafts a slot; the share counts states alone."""
    table_rows = Rows()
    nbytes = 2 * slots * shape.state_bytes
    memories = [
        memory(bench, shape, slots, recurrent_ring_depth(max(lengths) + 1))
        for _ in range(bench.timer.copies(nbytes))
    ]
    for k in lengths:
        mixed, gates, rule = operands(bench, shape, slots * (k + 1))
        rows = windows(bench, slots, k)
        calls: list[Call] = [
            partial(bench.kernels.delta_rule, mixed, gates, rule, copy, rows) for copy in memories
        ]
        table_rows[f"k={k}"] = bench.row(calls, nbytes)
    return table_rows


def conv_case(
    bench: Bench, shape: DeltaShape, slots: int, lengths: Sequence[int] = LENGTHS
) -> Rows:
    """Measure convolutions of rounds of k drafts and the gated norm, against torch's
    convolution."""
    table_rows = Rows()
    device = bench.timer.device
    channels = shape.channels
    weight = torch.randn(TAPS, channels, device=device)
    ring = bench.normal(slots, TAPS - 1 + 2 * (max(lengths) + 1), channels)
    for k in lengths:
        count = slots * (k + 1)
        values = shape.heads * shape.size
        x = bench.normal(count, channels + values)
        rows = windows(bench, slots, k)
        together = torch.randn(slots, channels, k + TAPS, device=device)
        rival = partial(
            torch.nn.functional.conv1d,
            together,
            weight.t()[:, None].contiguous(),
            None,
            groups=channels,
        )
        call = partial(bench.kernels.short_conv, x[:, :channels], weight, None, ring, rows)
        table_rows[f"k={k}"] = bench.row([call], None, [rival])
        read = torch.randn(count, shape.heads, shape.size, device=device)
        norm = weight[0, : shape.size]
        table_rows[f"norm k={k}"] = bench.row(
            [partial(bench.kernels.gated_norm, read, x[:, channels:], norm, EPSILON)], None
        )
    return table_rows


def chunks_case(bench: Bench, shape: DeltaShape, rows: int) -> Rows:
    """Measure a prompt chunk; the second column is one layer's tokens a second, the rival a step a
    token.

    The convolution before it has the last row.
    """
    mixed, gates, rule = operands(bench, shape, rows)
    chunk_memory = memory(bench, shape, 1, recurrent_ring_depth(0))
    step_memory = memory(bench, shape, 1, recurrent_ring_depth(rows))
    run = prompt(bench, rows)
    steps = partial(bench.kernels.delta_rule, mixed, gates, rule, step_memory, run)
    chunks = partial(bench.kernels.delta_chunks, mixed, gates, rule, chunk_memory, run)
    weight = torch.randn(TAPS, shape.channels, device=bench.timer.device)
    ring = bench.normal(1, TAPS - 1 + SPARE, shape.channels)
    convolve = partial(
        bench.kernels.short_conv, bench.normal(rows, shape.channels), weight, None, ring, run
    )
    table_rows = Rows()
    for name, call, rival in (
        ("rule", chunks, [steps]),
        ("convolution", convolve, None),
    ):
        us, _, other = bench.row([call], None, rival)
        table_rows[name] = [us, 1e6 * rows / us if us else None, other]
    return table_rows


def recurrent_cases() -> dict[str, Case]:
    """Every case by its name."""
    cases: dict[str, Case] = {}
    for shape in SHAPES:
        for slots in (1, 4, 16, 64):
            cases[f"delta_rule {shape.name} {slots} slots"] = partial(
                delta_case, shape=shape, slots=slots
            )
            cases[f"short_conv {shape.name} {slots} slots"] = partial(
                conv_case, shape=shape, slots=slots
            )
        cases[f"delta_chunks {shape.name}"] = partial(chunks_case, shape=shape, rows=256)
    return cases
