"""How near the C kernels' attention comes to the memory's read rate, and what it does in caches.

    python -m benchmarks.cpu_attention [--shapes 0.35B,...] [--contexts 128,...] [--rows 1,...]
                                       [--threads 1,2] [--kv auto,int8] [--repetitions 60] [--out FILE]

Keys and values come from memory: a pass runs many layers, whose pages together are larger than any cache.
"cold" is that pass's share of the read rate of a plain reader with as many threads, measured in the same
run. Its bytes are the keys and values that a window sees, counted once for all of its rows. "warm" is the
same share where every page of a table is one page, which stays in the first caches: where it is above 1,
memory is the limit. Beside it stand the multiplications of a nanosecond. One thread is measured by its
processor time, several by the wall: those need a quiet machine. Each layer counts its least time.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import describe_commit, describe_machine
from spd.formats.hub import spd_cache_folder
from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.native.build import find_compiler
from spd.kernels.native.calls import Step
from spd.kernels.native.library import NativeKernels, open_library
from spd.runtime.round.kv_cache import lazy_zeros

SCHEMA = "spd.benchmarks.cpu_attention/1"
PAGE = 64
COLD_BYTES = 192 << 20
"""Bytes of the keys and values that a pass reads at least: several times the last cache."""
READER = """
#include <stdint.h>
uint64_t sum(const uint64_t *from, long count)
{
    uint64_t sums[32] = {0}, total = 0;
    for (long i = 0; i < count; i += 32)
        for (int j = 0; j < 32; j++) sums[j] += from[i + j];
    for (int j = 0; j < 32; j++) total += sums[j];
    return total;
}
"""


@dataclass(frozen=True)
class Shape:
    """The attention heads of a model, and a layer's sliding window, 0 for none."""

    heads: int
    kv_heads: int
    size: int
    sliding: int = 0

    def seen_bytes(self, context: int, rows: int, kv: str) -> int:
        """Return the bytes of the keys and values that the last `rows` rows of a context see."""
        seen = min(context, self.sliding + rows - 1) if self.sliding else context
        entry = self.size + 2 if kv == "int8" else 2 * self.size
        return 2 * seen * self.kv_heads * entry


SHAPES = {
    "0.35B": Shape(16, 8, 64),
    "Gemma 3 270M": Shape(4, 1, 256),
    "Gemma 3 270M sliding": Shape(4, 1, 256, 512),
    "SmolLM2 135M": Shape(9, 3, 64),
    "1.5B": Shape(12, 2, 128),
}


@dataclass(frozen=True)
class Figure:
    """What one shape reaches at one context with so many rows and threads."""

    shape: str
    context: int
    rows: int
    threads: int
    kv: str  # "int8" for a cache in eight bits
    gigabytes: float  # a second, from memory
    cold: float  # share of the read rate
    warm: float  # share of the read rate, from one page
    products: float  # multiplications of a pass in caches, a nanosecond


def least_seconds(calls: list[Callable[[], object]], repetitions: int, threads: int) -> float:
    """Return the sum of each call's least time of so many passes over all of them.

    That is the processor time of one thread, else the wall's.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    least = [math.inf] * len(calls)
    for _ in range(repetitions + 1):
        for i, call in enumerate(calls):
            began = clock()
            call()
            least[i] = min(least[i], clock() - began)
    return sum(least)


def read_rate(repetitions: int, threads: int) -> float:
    """Return the bytes a second that threads read from large pages, by a plain loop in C."""
    memory = lazy_zeros((COLD_BYTES // 8,), torch.int64, "cpu")
    memory.fill_(1)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "reader.c")
        source.write_text(READER, encoding="utf-8")
        library = Path(folder, "reader.so")
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*find_compiler(), *flags, str(source), "-o", str(library)], check=True)
        reader = ctypes.CDLL(str(library)).sum
    count = 48 if threads == 1 else 2
    piece = COLD_BYTES // count // threads

    def read(begin: int) -> None:
        reader(ctypes.c_void_p(memory.data_ptr() + begin), ctypes.c_long(piece // 8))

    with ThreadPoolExecutor(threads) as pool:

        def work(first: int) -> None:
            begins = [(first * threads + i) * piece for i in range(threads)]
            list(pool.map(read, begins) if threads > 1 else map(read, begins))

        calls: list[Callable[[], object]] = [partial(work, i) for i in range(count)]
        return piece * threads * count / least_seconds(calls, repetitions, threads)


class Passes:
    """Passes over many layers of one shape, each with its own pages in one pair of pools."""

    def __init__(
        self, kernels: NativeKernels, shape: Shape, context: int, rows: int, kv: str
    ) -> None:
        self.kernels = kernels
        self.shape = shape
        self.kv = kv
        self.context = context
        self.rows = rows
        self.pages = -(-context // PAGE)
        first_seen = max(0, context - rows - shape.sliding + 1) if shape.sliding else 0
        self.unseen = first_seen // PAGE
        """Pages before the sliding window, which are never read."""
        self.layers = -(-COLD_BYTES // shape.seen_bytes(context, rows, kv))
        entries = (self.layers * (self.pages - self.unseen) + 1, PAGE, shape.kv_heads)
        dtype = torch.int8 if kv == "int8" else torch.bfloat16
        self.pools: tuple[Tensor, ...] = tuple(
            lazy_zeros((*entries, shape.size), dtype, "cpu") for _ in range(2)
        )
        entry = torch.randn(PAGE, shape.kv_heads, shape.size)
        for pool in self.pools:
            pool.copy_((40 * entry).clamp(-127, 127) if kv == "int8" else entry)
        if kv == "int8":
            scales = [lazy_zeros(entries, torch.float16, "cpu").fill_(1 / 40) for _ in range(2)]
            self.pools = (*self.pools, *scales)

    def calls(self, cold: bool) -> list[Callable[[], object]]:
        """Return a pass's calls: of pages in order, or of tables with one page."""
        made: list[Step] = []
        with self.kernels.record_calls(made):
            self.held = [self.attend(layer if cold else None) for layer in range(self.layers)]
        return [partial(function, structure, threads) for function, (structure, threads) in made]

    def attend(self, layer: int | None) -> list[Tensor]:
        """Record a layer's attention, and return the tensors that it reads."""
        shape = self.shape
        seen = self.pages - self.unseen
        numbers = torch.ones(seen, dtype=torch.int64)
        if layer is not None:
            numbers += torch.arange(seen) + layer * seen
        table = torch.cat((torch.zeros(self.unseen, dtype=torch.int64), numbers)).unsqueeze(0)
        positions = torch.arange(self.context - self.rows, self.context).unsqueeze(0)
        windows = Windows(
            positions, torch.ones_like(positions, dtype=torch.bool), table, [self.context], [None]
        )
        sliding = shape.sliding or None
        heads = AttentionHeads(shape.heads, shape.kv_heads, shape.size, sliding=(sliding,))
        plan = self.kernels.plan_attention(windows, heads, PAGE, torch.bfloat16)
        query = torch.randn(1, self.rows, shape.heads, shape.size, dtype=torch.bfloat16)
        params = AttentionParams(shape.size**-0.5, sliding)
        out = self.kernels.paged_attention(query, self.pools, plan, params)
        return [table, positions, query, out]

    def seconds(self, cold: bool, threads: int, repetitions: int) -> float:
        """Return the least time of a pass."""
        self.kernels.threads = threads
        return least_seconds(self.calls(cold), repetitions, threads)


def measure(passes: Passes, name: str, threads: int, rate: float, repetitions: int) -> Figure:
    """Return what passes reach, as shares of the read rate."""
    shape = passes.shape
    nbytes = passes.layers * shape.seen_bytes(passes.context, passes.rows, passes.kv)
    cold = passes.seconds(True, threads, repetitions)
    warm = passes.seconds(False, threads, repetitions)
    elements = passes.layers * shape.seen_bytes(passes.context, passes.rows, "auto") / 2
    products = elements * passes.rows * shape.heads / shape.kv_heads
    return Figure(
        shape=name,
        context=passes.context,
        rows=passes.rows,
        threads=threads,
        kv=passes.kv,
        gigabytes=nbytes / cold / 1e9,
        cold=nbytes / cold / rate,
        warm=nbytes / warm / rate,
        products=products / warm / 1e9,
    )


def main() -> None:
    """Measure, print, and write a JSON file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [*map(int, text.split(","))]  # noqa: E731
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[*SHAPES])
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 3500, 8192, 16384])
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--kv", type=lambda text: text.split(","), default=["auto"])
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kernels = open_library(spd_cache_folder, "bfloat16")
    rates = {threads: read_rate(options.repetitions, threads) for threads in options.threads}
    for threads, rate in rates.items():
        print(f"{kernels.instructions}: {threads} threads read {rate / 1e9:.1f} GB/s", flush=True)
    figures = []
    for name, context, rows, kv in itertools.product(
        options.shapes, options.contexts, options.rows, options.kv
    ):
        passes = Passes(kernels, SHAPES[name], context, rows, kv)
        for threads in options.threads:
            figure = measure(passes, name, threads, rates[threads], options.repetitions)
            figures.append(asdict(figure))
            print(
                f"{name:21} {context:6} keys {rows:3} rows {threads} threads, {kv}:"
                f" {figure.gigabytes:5.1f} GB/s, cold {figure.cold:.2f}, warm {figure.warm:.2f},"
                f" {figure.products:4.0f} products/ns",
                flush=True,
            )
    if options.out:
        head = {"schema": SCHEMA, **describe_commit(), "machine": describe_machine()}
        result = {**head, "read_bytes_per_second": rates, "figures": figures}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
