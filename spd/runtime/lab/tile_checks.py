"""The widest tiles of tokens of a GPU that leave every bit as narrow ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.kernels.linear.few_bits import quantize_int8
from spd.kernels.linear.skinny_config import TOKEN_TILES
from spd.kernels.linear.skinny_linear import AnyWeight, Norm
from spd.kernels.linear.tiled_weight import tile_weight
from spd.kernels.seeded import seeded_generator
from spd.runtime.load.token_tiles import (
    WEIGHT_DTYPES,
    TokenTileLimits,
    describe_kernel_environment,
    store_tile_limits,
)
from spd.runtime.plan.kernel_choice import OLDEST_CAPABILITY

TESTED_SHAPES = ((6144, 4096), (24576, 1024), (1000, 320))
"""[n, k] of a weight that adds to a stream, of gate and up, and of a head with odd sizes."""
TESTED_ROWS = TOKEN_TILES[-1]


class TileAnswer(TypedDict("TileBound", {"for": dict[str, str]})):
    """The widest tiles of one kind of GPU, and the file that stores them, if it was written."""

    widest: TokenTileLimits
    file: str | None


Operands = tuple[AnyWeight | Norm | None, ...]
Results = Tensor | tuple[Tensor, ...]


def find_widest_tiles(cache_folder: Callable[[], Path]) -> list[TileAnswer]:
    """Check each kind of GPU here that runs the kernels, and store its widest exact tiles in a
    file.

    cache_folder: returns the folder of these files.
    """
    answers: list[TileAnswer] = []
    for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
        kernel_environment = describe_kernel_environment(device)
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY or any(
            kernel_environment == answer["for"] for answer in answers
        ):
            continue
        with torch.cuda.device(device):
            widest = widest_exact_tiles(partial(load_kernels, "triton", None), device)
        answers.append(
            {
                "for": kernel_environment,
                "widest": widest,
                "file": store_tile_limits(cache_folder, kernel_environment, widest),
            }
        )
    return answers


def widest_exact_tiles(
    load: Callable[[TokenTileLimits], Kernels],
    device: torch.device,
    kinds: Sequence[str] = WEIGHT_DTYPES,
    shapes: Sequence[tuple[int, int]] = TESTED_SHAPES,
) -> TokenTileLimits:
    """Run products with ever wider tiles on a GPU; return the widest tile of each kind of weights
    that changes no bit.

    load: makes kernels with limits of tiles.
    """
    widest = dict.fromkeys(kinds, TOKEN_TILES[0])
    for kind in kinds:
        products = list(_operations(kind, device, shapes))
        for tile in TOKEN_TILES[1:]:
            narrow = load({})
            wide = load({kind: tile})
            if not all(
                _gives_same_bits(getattr(narrow, name), getattr(wide, name), operands)
                for name, operands in products
            ):
                break
            widest[kind] = tile
    return widest


def _gives_same_bits(
    narrow: Callable[..., Results], wide: Callable[..., Results], operands: Operands
) -> bool:
    """True if two forms of an operation give the same bits, on a GPU also replayed as a graph."""

    expected = narrow(*operands)
    is_same = _equal_bits(expected, wide(*operands))
    if not is_same or _first_tensor(expected).device.type == "cpu":
        return is_same
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = wide(*operands)
    graph.replay()
    return _equal_bits(expected, captured)


def _first_tensor(results: Results) -> Tensor:
    """Return the first of an operation's results."""
    return _as_tuple(results)[0]


def _equal_bits(expected: Results, actual: Results) -> bool:
    """True if two results have the same bits, tensor by tensor; 0.0 and -0.0 differ."""
    pairs = zip(_as_tuple(expected), _as_tuple(actual), strict=True)
    return all(torch.equal(_as_bytes(one), _as_bytes(other)) for one, other in pairs)


def _as_tuple(results: Results) -> tuple[Tensor, ...]:
    """Return an operation's results as a tuple, also a single one."""
    return results if isinstance(results, tuple) else (results,)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, uint8 [n]."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _operations(
    kind: str, device: torch.device, shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, Operands]]:
    """Yield operations with their operands, whose results show all that a tile might change."""
    generator = seeded_generator(device)
    dtype = torch.float16 if kind == "float16" else torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    def weight(n: int, k: int) -> AnyWeight:
        wide: Tensor = draw(n, k) / k**0.5
        return tile_weight(quantize_int8(wide)) if kind == "int8" else wide

    (n, k), (both, inner), (vocab, hidden) = shapes
    yield "linear", (draw(TESTED_ROWS, k), weight(n, k), None, None, None, draw(TESTED_ROWS, n))
    norm = Norm(draw(TESTED_ROWS, 65).float().square() * inner / 65, 1e-6)
    yield "norm_gate_up", (draw(TESTED_ROWS, inner), weight(both, inner), None, None, norm)
    yield "head_logits", (draw(TESTED_ROWS, hidden), weight(vocab, hidden))
