"""Probe: does a Triton `tl.dot` product with the weights on the M side give a row the same bits always.

Compared by `torch.equal`: token tiles 16, 32 and 64, 1 to 16 rows, every position of the row in its tile,
other neighbours; for contrast, torch's own `F.linear` for 1 to 16 rows. Then the speed of both against
the measured read rate, since an invariant kernel that is slow decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.kernels import GemmConfig, launch_skinny_gemm, skinny_gemm
from benchmarks.gpu_suite.measure import relative_error, time_calls

TILES = (16, 32, 64)
MAX_ROWS = 16
EQUALITY_SHAPES = ((4096, 1024), (6144, 4096), (4096, 14336), (1000, 320))
SPEED_SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
CONFIGS = (
    GemmConfig(),
    GemmConfig(block_n=128, block_k=64, stages=4),
    GemmConfig(block_n=64, block_k=64),
)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def random_operands(
    n: int, k: int, rows: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (N, K) and tokens (rows, K) whose product has unit variance."""
    generator = torch.Generator(device=device).manual_seed(seed)
    w = torch.randn((n, k), generator=generator, device=device) / k**0.5
    x = torch.randn((rows, k), generator=generator, device=device)
    return w.to(dtype), x.to(dtype)


def row_count_differences(product: Product, w: torch.Tensor, x: torch.Tensor) -> list[int]:
    """Return the row counts M for which some row of product(w, x[:M]) differs from the row alone."""
    alone = torch.cat([product(w, x[row : row + 1].contiguous()) for row in range(x.shape[0])])
    return [
        rows
        for rows in range(1, x.shape[0] + 1)
        if not torch.equal(product(w, x[:rows].contiguous()), alone[:rows])
    ]


def position_differences(product: Product, w: torch.Tensor, x: torch.Tensor) -> list[int]:
    """Return the positions at which x[0], placed among other neighbours, gives other bits than first."""
    wanted = product(w, x)[0]
    found = []
    for position in range(1, x.shape[0]):
        moved = x.roll(position, 0).contiguous()
        # New neighbours of other magnitudes: a row must not depend on what stands beside it.
        others = torch.arange(x.shape[0], device=x.device) != position
        moved[others] *= -3
        if not torch.equal(product(w, moved)[position], wanted):
            found.append(position)
    return found


def check_equality(
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    configs: Sequence[GemmConfig],
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Compare bits for every shape, dtype and config; empty lists of differences are what is hoped for."""
    found = []
    for seed, (n, k) in enumerate(shapes):
        for dtype in dtypes:
            w, x = random_operands(n, k, MAX_ROWS, dtype, device, seed)
            exact = x.double() @ w.double().T
            case: dict[str, Any] = {"n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")}
            case["linear_rows_that_differ"] = row_count_differences(_linear, w, x)
            case["linear_error"] = relative_error(F.linear(x, w), exact)
            case["triton"] = [_check_config(w, x, exact, config) for config in configs]
            found.append(case)
    return found


def _linear(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _check_config(
    w: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, config: GemmConfig
) -> dict[str, Any]:
    outputs = {tile: skinny_gemm(w, x, tile, config) for tile in TILES}
    first = outputs[TILES[0]]
    per_tile = {
        str(tile): {
            "equal_to_tile_16": torch.equal(output, first),
            "rows_that_differ": row_count_differences(_tiled(tile, config), w, x),
            "positions_that_differ": position_differences(_tiled(tile, config), w, x),
            "error": relative_error(output, exact),
        }
        for tile, output in outputs.items()
    }
    return {"config": vars(config) | {}, "tiles": per_tile}


def _tiled(tile: int, config: GemmConfig) -> Product:
    return lambda w, x: skinny_gemm(w, x, tile, config)


def matrix_instructions(dtype: torch.dtype, tile: int, config: GemmConfig) -> dict[str, Any]:
    """Return which matrix instructions Triton chose, with registers and spills."""
    w, x = random_operands(256, 256, MAX_ROWS, dtype, "cuda", 0)
    y = torch.empty((MAX_ROWS, 256), dtype=dtype, device="cuda")
    compiled = launch_skinny_gemm(w, x, y, tile, config)
    ptx = compiled.asm["ptx"]
    names = sorted({word for word in ("wgmma.mma_async", "mma.sync") if word in ptx})
    return {
        "instructions": names,
        "registers": getattr(compiled, "n_regs", None),
        "spills": getattr(compiled, "n_spills", None),
        "shared_bytes": compiled.metadata.shared,
    }


def measure_speed(read_rate: float) -> list[dict[str, Any]]:
    """Time 1, 4, 8 and 16 rows for model-sized weights, in rotation over more than 256 MB of them."""
    found = []
    for n, k in SPEED_SHAPES:
        copies = max(2, -(-(256 << 20) // (2 * n * k)))
        operands = [
            random_operands(n, k, MAX_ROWS, torch.bfloat16, "cuda", seed) for seed in range(copies)
        ]
        for rows in (1, 4, 8, 16):
            pairs = [(w, x[:rows].contiguous()) for w, x in operands]
            floor_ms = 1e3 * operands[0][0].nbytes / read_rate
            y = torch.empty((rows, n), dtype=torch.bfloat16, device="cuda")
            times = {"linear": time_calls([_call_linear(w, x) for w, x in pairs])}
            for config in CONFIGS:
                name = f"triton_n{config.block_n}_k{config.block_k}_s{config.stages}"
                times[name] = time_calls([_call_triton(w, x, y, config) for w, x in pairs])
            shares = {name: floor_ms / one["median"] for name, one in times.items()}
            case = {"n": n, "k": k, "rows": rows, "floor_ms": floor_ms}
            found.append({**case, "ms": times, "share_of_read_rate": shares})
    return found


def _call_linear(w: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, w)


def _call_triton(
    w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, config: GemmConfig
) -> Callable[[], object]:
    return lambda: launch_skinny_gemm(w, x, y, 16, config)


def run() -> dict[str, Any]:
    """Check the bits, name the instructions, then time."""
    dtypes = (torch.bfloat16, torch.float16)
    equality = check_equality(EQUALITY_SHAPES, dtypes, CONFIGS)
    instructions = {
        f"{config.block_n}x{tile}x{config.block_k}": matrix_instructions(
            torch.bfloat16, tile, config
        )
        for config in CONFIGS
        for tile in TILES
    }
    read_rate = float(measure_read(1.0, repeats=10)["bytes_per_second"])
    return {
        "equality": equality,
        "instructions": instructions,
        "read_bytes_per_second": read_rate,
        "speed": measure_speed(read_rate),
    }
