"""Measure what `--activations int8` saves: products with whole and with rounded rows.

A line is a form of weights by one set of instructions: microseconds of one thread's processor time,
the least of 60 calls. Weights are read in turn, so that they come from memory. `v8/d1`: 8 rows
against 1. Every set of instructions that this processor has is measured:

    python -m benchmarks.int8_activations [--rows 1,4,8,16] [--shapes 4096x4096,1024x2816]
        [--forms int4,Q4_K,int8]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from spd.formats.hub import spd_cache_folder
from spd.kernels.linear.few_bits import GroupedWeight, quantize_int4, quantize_int8
from spd.kernels.native.build import FEATURES, library_path, processor_features, usable_instructions
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import ROUNDED, PackedWeight
from spd.kernels.seeded import seeded_generator

CALLS = 60
SUPER_BLOCK = 256
BYTES_IN_TURN = 1 << 26
"""Bytes of weights of one form, more than a cache holds."""


def random_weight(form: str, width: int, depth: int) -> GroupedWeight:
    """Return a random weight [width, depth] in a form: int4, int8 or GGUF's Q4_K."""
    generator = seeded_generator()
    if form in ("int4", "int8"):
        plain = torch.randn(width, depth, generator=generator)
        return quantize_int4(plain) if form == "int4" else quantize_int8(plain)

    def draw_bytes(columns: int) -> torch.Tensor:
        return torch.randint(0, 256, (width, columns), generator=generator).to(torch.uint8)

    def draw_factors() -> torch.Tensor:
        return torch.rand(width, depth // SUPER_BLOCK, generator=generator).half()

    return GroupedWeight(
        "int4",
        draw_bytes(depth // 2),
        draw_bytes(depth // 32),
        None,
        32,
        minima=draw_bytes(depth // 32),
        factors=draw_factors(),
        minimum_factors=draw_factors(),
    )


def product_time(native: NativeKernels, weights: list[PackedWeight], rows: int) -> float:
    """Return the least microseconds of a product of so many rows."""
    x = torch.randn(rows, weights[0].depth).to(native.dtype)
    times = []
    for call in range(CALLS):
        weight = weights[call % len(weights)]
        begin = time.thread_time_ns()
        native.packed_linear(x, weight, None, ROUNDED)
        times.append(time.thread_time_ns() - begin)
    return min(times) / 1000


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--shapes", default="4096x4096,1024x2816")
    parser.add_argument("--forms", default="int4,Q4_K,int8")
    options = parser.parse_args()
    row_counts = [int(rows) for rows in options.rows.split(",")]
    heads = [f"{rows} rows" for rows in row_counts]
    print(f"| instructions | weight | activations | {' | '.join(heads)} | v8/d1 |")
    print(f"|---|---|---|{'---|' * (len(heads) + 1)}")
    for name in usable_instructions("bfloat16"):
        if not processor_features() >= FEATURES[name]:
            continue
        native = NativeKernels(library_path(spd_cache_folder, name))
        native.threads = 1
        for shape in options.shapes.split(","):
            width, depth = (int(size) for size in shape.split("x"))
            for form in options.forms.split(","):
                packed = native.pack(random_weight(form, width, depth))
                count = max(2, BYTES_IN_TURN // packed.tiles.nbytes)
                copies = [replace(packed, tiles=packed.tiles.clone()) for _ in range(count)]
                for rounds_rows in (False, True):
                    weights = [replace(copy, rounds_rows=rounds_rows) for copy in copies]
                    times = {rows: product_time(native, weights, rows) for rows in row_counts}
                    ratio = f"{times[8] / times[1]:.2f}" if {1, 8} <= times.keys() else ""
                    cells = [f"{times[rows]:.0f}" for rows in row_counts]
                    kept = "int8" if rounds_rows else "whole"
                    print(
                        f"| {name} | {form} {shape} | {kept} | {' | '.join(cells)} | {ratio} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
