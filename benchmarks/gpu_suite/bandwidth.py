"""Probe: what device memory gives, read alone and read plus write, through Triton and through
torch.

The read figure is the denominator of every roofline fraction; a copy says less, since it counts
both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_suite.kernels import copy, read_sum
from benchmarks.gpu_suite.measure import time_calls

GIB = 1 << 30
CONFIGS = ((2048, 4, 4), (4096, 8, 2), (4096, 8, 4), (8192, 8, 2), (8192, 16, 2))
"""Block, warps, programs a multiprocessor."""


def random_words(count: int, device: str, seed: int = 0) -> torch.Tensor:
    """Return random int32 values: zeros move faster than data does."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(
        -(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device, generator=generator
    )


def wrapped_sum(values: torch.Tensor) -> int:
    """Return the sum modulo 2**32, which integer addition in any order gives exactly."""
    return int(values.sum(dtype=torch.int64).item()) % 2**32


def measure_read(gib: float, device: str = "cuda", repeats: int = 30) -> dict[str, Any]:
    """Time a Triton read-reduce for every config; the best one's rate is `bytes_per_second`."""
    x = random_words(int(gib * GIB) // 4, device)
    expected = wrapped_sum(x)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    rates = []
    for block, warps, programs in CONFIGS:
        partial = torch.full((programs * multiprocessors,), -1, dtype=torch.int32, device=device)
        read_sum(x, partial, block, warps)
        if wrapped_sum(partial) != expected:
            raise AssertionError(f"read_sum with block {block} and {warps} warps gave another sum")
        times = time_calls([_read_call(x, partial, block, warps)], repeats)
        config = {"block": block, "warps": warps, "programs_per_multiprocessor": programs}
        rates.append(
            {**config, "ms": times, "bytes_per_second": x.nbytes / (times["median"] / 1e3)}
        )
    best = max(rates, key=lambda rate: float(rate["bytes_per_second"]))
    return {"bytes": x.nbytes, "bytes_per_second": best["bytes_per_second"], "configs": rates}


def _read_call(
    x: torch.Tensor, partial: torch.Tensor, block: int, warps: int
) -> Callable[[], None]:
    return lambda: read_sum(x, partial, block, warps)


def run(gib: float = 4.0) -> dict[str, Any]:
    """Measure read (Triton, torch), copy (Triton, torch) and fill; rates count every byte moved."""
    read = measure_read(gib)
    x = random_words(int(gib * GIB) // 4, "cuda")
    out = torch.zeros_like(x)
    programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    copy(x=x, out=out, programs=programs, block=4096, warps=8)
    if not torch.equal(x, out):
        raise AssertionError("copy_kernel did not copy")
    floats = x.view(torch.float32).nan_to_num_().clamp_(-1, 1)
    sizes = {
        "read_torch_sum": (time_calls([lambda: floats.sum()]), x.nbytes),
        "copy_triton": (
            time_calls([lambda: copy(x=x, out=out, programs=programs, block=4096, warps=8)]),
            2 * x.nbytes,
        ),
        "copy_torch": (time_calls([lambda: out.copy_(x)]), 2 * x.nbytes),
        "fill_torch": (time_calls([lambda: out.fill_(7)]), x.nbytes),
    }
    rates = {
        name: {"ms": times, "bytes_per_second": moved / (times["median"] / 1e3)}
        for name, (times, moved) in sizes.items()
    }
    return {"read_triton": read, **rates}
