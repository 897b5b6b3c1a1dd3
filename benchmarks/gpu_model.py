"""Predict the times of kernels on an H200 from a few constants, beside what was measured there.

    python -m benchmarks.gpu_model [--report FILE]

Each model is a sum of terms: bytes at the rate at which a kernel streams, instructions at the rate
at which they are issued, and constant times of a launch. A term that explains a missed gate says
what to change; `PLANNED` predicts the times after such a change, made or not, so that the next run on a
GPU tests the prediction. Times are in microseconds, sizes in bytes. No GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from spd.kernels.attention.attention_chunks import (
    CODE_CHUNKS,
    LARGE_FROM,
    SMALL_CHUNK,
    TWICE_FROM,
)
from spd.kernels.launch import Device
from spd.kernels.linear.skinny_config import config_for

REPORT = ROOT / "benchmarks/results/gpu_suite.json"
H200 = Device(processors=132, shared=227 * 1024, capability=(9, 0))
STREAM_RATE = 4.52e12 / 1e6
"""Bytes a microsecond that the head's product streams."""
CLOCK = 1755.0
"""Cycles a microsecond at which instructions were issued."""


@dataclass(frozen=True)
class Case:
    """A kernel on sizes that the suite measures."""

    kind: str
    name: str
    measured: float
    predicted: float
    planned: float | None
    """The time that is predicted after the planned change, where there is one."""

    @property
    def ratio(self) -> float:
        """Return the predicted time over the measured one."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class ProductModel:
    """Model of a product of 16-bit weights [n, k] at one row."""

    launch: float = 1.1
    first_bytes: float = 1.35
    """x from the second-level cache, the first line of weights, and the epilogue."""
    uneven_share: float = 0.07
    """Part of the streaming time in which some processors have no bytes left to read."""
    max_uneven: float = 3.0
    split: float = 0.9
    """A second round trip where K is split."""

    def time(self, n: int, k: int) -> float:
        """Return the time of one product."""
        stream = 2 * n * k / STREAM_RATE
        split = self.split if config_for(n, k, 2, H200).split_k > 1 else 0.0
        uneven = min(self.max_uneven, self.uneven_share * stream)
        return self.launch + self.first_bytes + stream + uneven + split


@dataclass(frozen=True)
class CodesModel:
    """Model of a product of weights in few bits: instructions bind it, not bytes."""

    instructions: float
    """Instructions of 32 rows by 128 columns of weights, in both warps of a program."""
    rate_at: float = 4.03e6
    """Weights a microsecond at `rate_instructions`."""
    rate_instructions: float = 286
    constants: tuple[float, float, float] = (6.3, 5.9, 3.9)
    """Of a launch whose K is split into eight parts, into fewer, and not at all."""

    def time(self, n: int, k: int) -> float:
        """Return the time of one product."""
        rate = self.rate_at * self.rate_instructions / self.instructions
        parts = config_for(n, k, 1, H200).split_k
        eight, four, none = self.constants
        return n * k / rate + (eight if parts >= 8 else four if parts > 1 else none)


BLOCK_BYTES = 128 * 128 * 2 * 2
"""Keys and values of 128 positions of one head, in 16 bits."""
CODE_BLOCK_BYTES = 128 * (128 + 2) * 2
"""The same in eight bits, with a scale a row."""
QUERY_HEADS = 4
"""Query heads of a key head."""
PARTIAL_BYTES = 4 * (128 + 2)
"""A row's float32 sums of a chunk, its maximum and its sum of weights."""
CODE_INSTRUCTIONS = 2 * 916
"""Instructions a warp of 128 codes' keys and values, of which the loop takes 64 at a time."""
ROTARY_LAUNCH = 2.03
"""A launch that rotates one row's heads and writes its keys and values, as measured."""
ROTATED_HEADS = 16
"""Heads that a program rotates at a time."""
ROTATED_INSTRUCTIONS = {"queries": 375, "keys": 570}
"""Instructions a warp of so many heads, as counted in the program for sm_90."""
ROTATED_WAIT = 0.4
"""Angles that are found by positions, and queries that are written and read again."""


def rotation_time(kind: str, heads: int, programs: int) -> float:
    """Return the time in which programs that share a processor rotate so many heads each."""
    return programs * ROTATED_INSTRUCTIONS[kind] * -(-heads // ROTATED_HEADS) / CLOCK


@dataclass(frozen=True)
class AttentionModel:
    """Model of decode attention at one row: 8 key heads of 128, two programs a processor."""

    launch: float = 5.0
    item: float = 1.57
    """The chain from an item's number to its first keys."""
    next_chunk: float = 1.57
    """The same for the next chunk of a run."""
    max_run: int = 1
    """The most chunks of a run, whose number is the one with which all take the least time."""
    block: float = 4.23
    """128 keys and values, at the rate of two programs that share a processor."""
    ramp: float = 3.0
    """The first bytes of programs that begin together, where all places are taken."""
    borders: tuple[tuple[int, int], ...] = ((0, 128), (4096, 512))
    """(position, size of the chunks from there on), ascending."""
    counter: bool = False
    """True where a program takes the next item once it is free, not every 264th."""
    heads: int = 8
    programs: int = 2 * H200.processors
    block_bytes: int = BLOCK_BYTES

    def chunks(self, context: int) -> list[int]:
        """Return the keys of each chunk of a context."""
        sizes = []
        position = 0
        while position < context:
            size = next(size for start, size in reversed(self.borders) if position >= start)
            sizes.append(min(size, context - position))
            position += size
        return sizes

    combining_rate: float = 0.0
    """Bytes a microsecond of partial sums that one program combines; 0: a launch does."""
    rotates: bool = False
    """True where each run rotates its queries first, and a slot's last run its keys."""

    def time(self, slots: int, context: int, rows: int = 1) -> float:
        """Return the time of `slots` requests of `context` keys each, `rows` queries of each."""
        chunks = self.chunks(context)
        best = min(self._run_time(chunks, slots, 2**step, rows) for step in range(self.max_run))
        if self.combining_rate:
            best += rows * QUERY_HEADS * len(chunks) * PARTIAL_BYTES / self.combining_rate
        return best

    def _run_time(self, chunks: Sequence[int], slots: int, run: int, rows: int) -> float:
        """Return the time without combining, of runs of so many chunks."""
        runs = [chunks[first : first + run] for first in range(0, len(chunks), run)]
        count = len(runs) * slots * self.heads
        block = self.block
        sharing = 2
        if count <= H200.processors:  # no two programs share a processor
            block = count * self.block_bytes / STREAM_RATE
            sharing = 1
        launch = self.launch + (self.ramp if count > self.programs else 0.0)
        run_costs = [
            self.item
            + self.next_chunk * (len(sizes) - 1)
            + sum(block * -(-keys // 128) for keys in sizes)
            for sizes in runs
        ]
        if self.rotates:
            queries = ROTATED_WAIT + rotation_time("queries", rows * QUERY_HEADS, sharing)
            run_costs = [cost + queries for cost in run_costs]
            run_costs[-1] += rotation_time("keys", rows, sharing)
        costs = sorted(run_costs * (slots * self.heads), reverse=True)
        if not self.counter:
            return launch + max(
                sum(costs[first :: self.programs])
                for first in range(min(self.programs, len(costs)))
            )
        ends = [0.0] * self.programs
        for cost in costs:
            heappush(ends, heappop(ends) + cost)
        return launch + max(ends)


@dataclass(frozen=True)
class DeltaShape:
    """A layer of gated DeltaNet: value heads, with states of 128 by 128 in float32."""

    name: str
    heads: int

    def state_bytes(self, slots: int) -> int:
        """Return the bytes of the slots' states."""
        return slots * self.heads * 128 * 128 * 4


DELTA_SHAPES = (DeltaShape("Qwen3.5-27B", 48), DeltaShape("Qwen3.5-35B-A3B", 32))
STATE_RATE = 4.98e12 / 1e6
"""Bytes a microsecond at which states are read and written."""
STEP_INSTRUCTIONS = 1164
"""Instructions a warp of one token's step on its part of the state."""


def warps_per_scheduler(shape: DeltaShape, slots: int) -> float:
    """Return the warps that each of a processor's four schedulers serves in turn."""
    return shape.heads * slots * 4 / (4 * H200.processors)


def replayed_delta(shape: DeltaShape, slots: int, k: int) -> float:
    """Return the time of a round that applies accepted tokens again, then its own.

    Memory and arithmetic hardly overlap. `k` // 2 accepted tokens are applied before the k + 1 own
    rows, and the last committed one.
    """
    steps = k // 2 + 1 + k + 1
    step = STEP_INSTRUCTIONS * warps_per_scheduler(shape, slots) / CLOCK
    return 1.1 + 2 * shape.state_bytes(slots) / STATE_RATE + step * steps


RING_ROWS = 24
"""Rows of u, 128 float32 a head, that a row may read besides the state; heads share their k."""
ROW_INSTRUCTIONS = 1223
"""Instructions a warp of a row, as counted in the program for sm_90: four parts of its keys of 91
each, and 859 for two products with its part of the state and two with a block's updates."""
BLOCK_INSTRUCTIONS = 602
"""The same of a block of 16 positions, before its first row."""
FOLD_INSTRUCTIONS = 16 * 215
"""The same of a block that is folded into the state."""
LAUNCH = 2.2


def delta_by_position(shape: DeltaShape, slots: int, k: int) -> float:
    """Return the time of a round whose state is read once, and written once in 16 positions.

    A window of k + 1 rows ends a block in (k + 1) / 16 of all rounds. Half of the instructions run
    while bytes are read.
    """
    ring = slots * shape.heads * RING_ROWS * 128 * 4
    num_bytes = shape.state_bytes(slots) * 17 / 16 + ring
    ends = (k + 1) / 16
    instructions = (k + 1) * ROW_INSTRUCTIONS + BLOCK_INSTRUCTIONS * (1 + ends)
    instructions += FOLD_INSTRUCTIONS * ends
    issued = instructions * warps_per_scheduler(shape, slots) / CLOCK
    return LAUNCH + num_bytes / STREAM_RATE + issued / 2


PRODUCT = ProductModel()
ATTENTION = AttentionModel()
"""As it was measured: chunks one by one, every 264th by the same program, combined by a launch."""
PLANNED_ATTENTION = replace(
    ATTENTION,
    launch=3.4,
    next_chunk=0.3,
    max_run=3,
    borders=((0, SMALL_CHUNK), (TWICE_FROM, 2 * SMALL_CHUNK), (LARGE_FROM, 4 * SMALL_CHUNK)),
    counter=True,
    combining_rate=112e3,
)
"""Runs of chunks in one loop, by a counter, combined by the last arriver."""
ROTATING_ATTENTION = replace(PLANNED_ATTENTION, rotates=True)
"""The same with the rotation before it, which was a launch."""
CODE_ATTENTION = replace(
    PLANNED_ATTENTION,
    max_run=2,
    # Bytes bind, or instructions: two programs have two warps on each of four schedulers.
    block=max(ATTENTION.block * CODE_BLOCK_BYTES / BLOCK_BYTES, 2 * CODE_INSTRUCTIONS / CLOCK),
    borders=tuple((begin, CODE_CHUNKS * size) for begin, size in PLANNED_ATTENTION.borders),
    block_bytes=CODE_BLOCK_BYTES,
)
"""The same of codes."""
CODES = {"int8": CodesModel(286), "int4": CodesModel(286), "fp8": CodesModel(317)}
"""int8 has 257 instructions and takes int4's time."""
PLANNED_CODES = {
    "int8": CodesModel(250, constants=(4.5, 5.2, 3.4)),
    "int4": CodesModel(220, constants=(4.5, 5.2, 3.4)),
    "fp8": CodesModel(285, constants=(4.5, 5.2, 3.4)),
}
"""One logic operation a pair of codes, 256 bytes a step, scales fetched with the weights."""


def cases(report: dict[str, Any]) -> Iterator[Case]:
    """Yield each case of a suite's report that a model predicts."""
    kernels = report["probes"]["kernel_table"]["result"]["cases"]
    for name, case in kernels.items():
        rows = case.get("rows", {})
        if "1" not in rows:
            continue
        measured = rows["1"][0]
        if sizes := re.fullmatch(r"(int8|int4|fp8) (\d+)x(\d+)", name):
            n = int(sizes[2])
            k = int(sizes[3])
            kind = sizes[1]
            planned = PLANNED_CODES[kind].time(n, k)
            yield Case("few bits", name, measured, CODES[kind].time(n, k), planned)
        elif sizes := re.fullmatch(r".* (?:qkv|out|gate_up|down|head) (\d+)x(\d+)", name):
            predicted = PRODUCT.time(int(sizes[1]), int(sizes[2]))
            yield Case("16 bits", name, measured, predicted, planned=None)
        elif sizes := re.fullmatch(r"paged_attention (\d+) slots (\d+)", name):
            slots = int(sizes[1])
            context = int(sizes[2])
            planned = PLANNED_ATTENTION.time(slots, context)
            predicted = ATTENTION.time(slots, context)
            yield Case("attention", name, measured, predicted, planned)
    recurrent = report["probes"]["recurrent_table"]["result"]["cases"]
    for shape in DELTA_SHAPES:
        for k in (0, 1, 4, 8):
            measured = recurrent[f"delta_rule {shape.name} 16 slots"]["rows"][f"k={k}"][0]
            yield Case(
                "states",
                f"delta_rule {shape.name} 16 slots k={k}",
                measured,
                replayed_delta(shape, 16, k),
                delta_by_position(shape, 16, k),
            )


def table(rows: Sequence[Case]) -> str:
    """Return a Markdown table of the cases, and a line of each kind's ratios."""
    lines = [
        "| kernel | measured us | model us | ratio | after the planned change us |",
        "|---|--:|--:|--:|--:|",
    ]
    for case in rows:
        planned = "" if case.planned is None else f"{case.planned:.1f}"
        lines.append(
            f"| {case.name} | {case.measured:.1f} | {case.predicted:.1f} | {case.ratio:.2f} "
            f"| {planned} |"
        )
    lines.append("")
    for kind in dict.fromkeys(case.kind for case in rows):
        ratios = sorted(case.ratio for case in rows if case.kind == kind)
        lines.append(
            f"{kind}: {len(ratios)} cases, model over measured {ratios[0]:.2f} to {ratios[-1]:.2f}, "
            f"median {statistics.median(ratios):.2f}"
        )
    return "\n".join(lines)


def code_lines() -> str:
    """Return a line for each context: attention to 16 bits and to codes, by the model."""
    lines = []
    for slots, context in itertools.product((1, 16), (1024, 4096, 32768)):
        wide_us = PLANNED_ATTENTION.time(slots, context)
        coded_us = CODE_ATTENTION.time(slots, context)
        lines.append(
            f"paged_attention {slots} slots {context}: {wide_us:.1f} us in 16 bits, "
            f"{coded_us:.1f} us in int8, {wide_us / coded_us:.2f} x"
        )
    return "\n".join(lines)


def rotary_lines() -> str:
    """Return a line for each context: rotation and attention in two launches and in one."""
    lines = []
    for slots, context, rows in itertools.product((1, 16), (1024, 4096, 32768), (1, 5)):
        two_us = ROTARY_LAUNCH + PLANNED_ATTENTION.time(slots, context, rows)
        one_us = ROTATING_ATTENTION.time(slots, context, rows)
        lines.append(
            f"rotary_attention {slots} slots {context}, {rows} rows: {two_us:.1f} us by two "
            f"launches, {one_us:.1f} us by one"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    report = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))
    print(f"{report['gpu']}, commit {report['commit'][:8]}\n")
    print(table(list(cases(report))))
    print(f"\n{code_lines()}\n\n{rotary_lines()}")


if __name__ == "__main__":
    main()
