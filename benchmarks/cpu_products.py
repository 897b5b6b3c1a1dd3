"""Measure the C kernels' products, and which of two bounds holds them: reading or multiplying.

    python -m benchmarks.cpu_products [--instructions AVX2,...] [--shapes 0.35B,4096x1024,...]
                                      [--forms bf16,iq4,Q4_K,...] [--rows 1,4,8,16]
                                      [--repetitions 60] [--json]

A line is a form of weights [N, K] with whole activations or those of `--activations int8`, by one
set of instructions. Times are microseconds of one thread's processor time, the least of all calls.
Weights are read in turn, so that they come from memory, and the numbers of rows are tried in turn,
too. `read` is the time of the weight's bytes at the rate of a plain reader; `multiply` is that of
its products at the rate of independent instructions of this processor, vdpbf16ps or FMA for whole
rows, vpdpbusd or what stands for it for rounded ones. Both rates are measured in the same run. `of
bound` is the greater of both for the largest number of rows, over the time that these took: where
it is near 1, no kernel of such products is faster.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu_attention import read_rate
from benchmarks.environment import describe_commit, describe_machine
from spd.formats.hub import spd_cache_folder
from spd.kernels.capabilities import CodeKind
from spd.kernels.linear.few_bits import quantize_int8
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.native import build
from spd.kernels.native.calls import Step
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import ROUNDED, AnyMatrix, PackedWeight
from spd.kernels.seeded import seeded_generator

SCHEMA = "spd.benchmarks.cpu_products/1"
BYTES_IN_TURN = 1 << 26
"""Bytes of weights of one form, more than a cache holds."""
MODELS = {"0.35B": ("2048x1024", "1024x1024", "6144x1024", "1024x3072", "8192x1024")}
"""The matrices of a model: attention's two, the MLP's two, and the head."""
SHAPES = ["1024x1024", "4096x1024", "2048x8192"]
ROUNDED_KINDS: tuple[CodeKind, ...] = ("iq4", "int5", "int6")
"""What `--quantize int4` rounds to."""
FORMS = ["bf16", "int8", *ROUNDED_KINDS, "Q4_K", "Q8_0", "Q4_0", "Q6_K"]
MULTIPLIER = """
#include "vector.h"
#if SPD_NEON
typedef float32x4_t floats;
typedef uint32x4_t bytes;
#define OWN(x) __asm__ volatile("" : "+w"(x))
#define WHOLE(sum) vfmaq_f32(sum, x, x)
#define BYTES(sum) four_dot(sum, y, numbers)
#elif SPD_WIDE
typedef __m512 floats;
typedef __m512i bytes;
#define OWN(x) __asm__ volatile("" : "+v"(x))
#define BYTES(sum) dot(sum, y, numbers, 0)
#if SPD_PAIRS
#define WHOLE(sum) _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x)
#else
#define WHOLE(sum) _mm512_fmadd_ps(x, x, sum)
#endif
#else
typedef __m256 floats;
typedef __m256i bytes;
#define OWN(x) __asm__ volatile("" : "+x"(x))
#define WHOLE(sum) _mm256_fmadd_ps(x, x, sum)
#define BYTES(sum) eight_dot(sum, y, y, 0)
#endif
#define ALL(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9)
enum { LANES = sizeof(floats) / 4, TIMES = 10000 };
static const int8_t numbers[4];

#define SUM(i) floats sum##i = {0};
#define ADD(i) OWN(x); sum##i = WHOLE(sum##i);
#define KEEP(i) OWN(sum##i);
long multiply_whole(void)
{
    floats x = {0};
    ALL(SUM)
    for (long n = 0; n < TIMES; n++) { ALL(ADD) ALL(KEEP) }
    return (SPD_PAIRS ? 2L : 1L) * LANES * 10 * TIMES;
}

#define SUM_OF_BYTES(i) bytes sum##i = {0};
#define ADD_BYTES(i) OWN(y); sum##i = BYTES(sum##i);
long multiply_bytes(void)
{
    bytes y = {0};
    ALL(SUM_OF_BYTES)
    for (long n = 0; n < TIMES; n++) { ALL(ADD_BYTES) ALL(KEEP) }
    return 4L * LANES * 10 * TIMES;
}
"""
"""Multiplications that wait for nothing; each function returns how many."""


@dataclass(frozen=True)
class Figure:
    """The times of one weight's products, in microseconds by the number of rows."""

    instructions: str
    form: str
    shape: str
    activations: str
    read: float  # the weight's bytes at the read rate
    multiply: dict[int, float]  # the products at the multiply rate
    times: dict[int, float]

    @property
    def of_bound(self) -> float:
        """Return the greater bound of the most rows, as a share of their time."""
        rows = max(self.times)
        return max(self.read, self.multiply[rows]) / self.times[rows]


def draw_weight(form: str, width: int, depth: int) -> AnyMatrix:
    """Return a random weight [width, depth]: plain, as `--quantize` makes it, or of a GGUF type."""
    from tests.kernels.gguf_cases import drawn_blocks, grouped

    plain = torch.randn(width, depth, generator=seeded_generator())
    for kind in ROUNDED_KINDS:
        if form == kind:
            return quantize_groups(plain, kind)
    if form == "int8":
        return quantize_int8(plain)
    if form == "bf16":
        return plain.bfloat16()
    return grouped(form, drawn_blocks(form, width, depth), width)


def multiply_rates(instructions: str) -> dict[str, float]:
    """Return the multiplications a second of whole and of rounded rows, by a plain loop in C."""
    folder = Path(build.__file__).parent
    flags = [*build.FLAGS, *build.INSTRUCTION_FLAGS[instructions], f"-I{folder}"]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "multiplier.c")
        source.write_text(MULTIPLIER, encoding="utf-8")
        library = Path(temporary, "multiplier.so")
        command = [
            *build.find_compiler(),
            *flags,
            str(source),
            "-o",
            str(library),
            *build.LIBRARIES,
        ]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    rates = {}
    for name, function in (("whole", loaded.multiply_whole), ("int8", loaded.multiply_bytes)):
        function.restype = ctypes.c_long
        rates[name] = max(_rate(function) for _ in range(200))
    return rates


def _rate(function: Callable[[], int]) -> float:
    began = time.thread_time_ns()
    count = function()
    return count / (time.thread_time_ns() - began) * 1e9


class Products:
    """Products of copies of one weight, which are read in turn, by one thread."""

    def __init__(self, native: NativeKernels, form: str, shape: str) -> None:
        self.native = native
        self.form = form
        self.shape = shape
        width, depth = (int(size) for size in shape.split("x"))
        self.packed = native.pack(draw_weight(form, width, depth))
        parameters = self.packed.quant_parameters.values()
        self.nbytes = sum(tensor.nbytes for tensor in (self.packed.tiles, *parameters))
        self.products = width * depth
        count = max(2, BYTES_IN_TURN // self.packed.tiles.nbytes)
        self.copies = [replace(self.packed, tiles=self.packed.tiles.clone()) for _ in range(count)]
        self.operands: list[Tensor] = []
        """What recorded calls read and write."""

    def calls(self, rows: int, rounds_rows: bool) -> list[Callable[[], object]]:
        """Return a call for each copy, of so many rows."""
        steps: list[Step] = []
        x = torch.randn(rows, self.packed.depth, generator=seeded_generator()).to(self.native.dtype)
        self.operands.append(x)
        with self.native.record_calls(steps):
            for copy in self.copies:
                weight: PackedWeight = replace(copy, rounds_rows=rounds_rows)
                self.operands.append(self.native.packed_linear(x, weight, None, ROUNDED))
        return [partial(function, structure, threads) for function, (structure, threads) in steps]

    def measure(
        self, row_counts: list[int], repetitions: int, read: float, rates: dict[str, float]
    ) -> list[Figure]:
        """Return the figures of whole rows, and for codes of rounded ones. read: bytes a second."""
        names = ["whole"] if self.form == "bf16" else ["whole", "int8"]
        calls = {
            (name, rows): self.calls(rows, name == "int8") for name in names for rows in row_counts
        }
        least = dict.fromkeys(calls, math.inf)
        copies = itertools.cycle(range(len(self.copies)))
        for _ in range(repetitions):
            for key, of_copies in calls.items():
                call = of_copies[next(copies)]
                began = time.thread_time_ns()
                call()
                least[key] = min(least[key], (time.thread_time_ns() - began) / 1000)
        return [
            Figure(
                instructions=self.native.instructions,
                form=self.form,
                shape=self.shape,
                activations=name,
                read=self.nbytes / read * 1e6,
                multiply={rows: self.products * rows / rates[name] * 1e6 for rows in row_counts},
                times={rows: least[name, rows] for rows in row_counts},
            )
            for name in names
        ]


def print_figure(figure: Figure) -> None:
    """Print a line of the table."""
    times = [f"{time_:.0f}" for time_ in figure.times.values()]
    multiply = [f"{time_:.0f}" for time_ in figure.multiply.values()]
    has_ratio = {1, 8} <= figure.times.keys()
    ratio = f"{figure.times[8] / figure.times[1]:.2f}" if has_ratio else ""
    cells = [
        figure.instructions,
        f"{figure.form} {figure.shape}",
        figure.activations,
        *times,
        f"{figure.read:.0f}",
        " / ".join(multiply),
        f"{figure.of_bound:.2f}",
        ratio,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure; print a table in Markdown, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = lambda text: text.split(",")  # noqa: E731
    here = [
        name
        for name in build.usable_instructions("bfloat16")
        if build.processor_features() >= build.FEATURES[name]
    ]
    parser.add_argument("--instructions", type=words, default=here)
    parser.add_argument("--shapes", type=words, default=[*SHAPES, *MODELS])
    parser.add_argument("--forms", type=words, default=FORMS)
    parser.add_argument("--rows", type=words, default=["1", "4", "8", "16"])
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    row_counts = [int(rows) for rows in options.rows]
    shapes = dict.fromkeys(shape for name in options.shapes for shape in MODELS.get(name, (name,)))
    read = read_rate(options.repetitions, 1)
    figures = []
    rates = {name: multiply_rates(name) for name in options.instructions}
    if not options.json:
        print(f"one thread reads {read / 1e9:.1f} GB/s")
        for name, kind_rates in rates.items():
            each = ", ".join(f"{rate / 1e9:.0f} ({kind})" for kind, rate in kind_rates.items())
            print(f"{name}: products a nanosecond: {each}")
        heads = " | ".join(f"{rows} rows" for rows in row_counts)
        bounds = "read | multiply | of bound | v8/d1"
        print(f"\n| instructions | weight | activations | {heads} | {bounds} |")
        print(f"|---|---|---|{'--:|' * (len(row_counts) + 4)}")
    for name in options.instructions:
        native = NativeKernels(build.library_path(spd_cache_folder, name))
        native.threads = 1
        for shape in shapes:
            for form in options.forms:
                products = Products(native, form, shape)
                for figure in products.measure(row_counts, options.repetitions, read, rates[name]):
                    figures.append({**asdict(figure), "of_bound": figure.of_bound})
                    if not options.json:
                        print_figure(figure)
    if options.json:
        head = {"schema": SCHEMA, **describe_commit(), "machine": describe_machine()}
        rates_json = {"read_bytes_per_second": read, "products_per_second": rates}
        print(json.dumps({**head, **rates_json, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
