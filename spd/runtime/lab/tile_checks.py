"""Ask a GPU how wide its tiles of tokens may be: as wide as leaves every bit as narrow ones have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.kernels.linear.few_bits import quantize_int8, tile_weight
from spd.kernels.linear.skinny_config import TILES
from spd.kernels.linear.skinny_linear import AnyWeight, Norm
from spd.runtime.load.token_tiles import KINDS, TokenTileLimits, bound_to, keep_answer
from spd.runtime.plan.kernel_choice import OLDEST_CAPABILITY

SHAPES = ((6144, 4096), (24576, 1024), (1000, 320))
"""Of a weight that adds to a stream, of gate and up, and of a head: with all instructions, and odd sizes."""
ASKED_ROWS = TILES[-1]


def find_widest_tiles(cache: Callable[[], Path]) -> list[dict[str, Any]]:
    """Ask each kind of GPU here that runs the kernels, and keep what it answers."""
    answers: list[dict[str, Any]] = []
    for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
        bound = bound_to(device)
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY or any(bound == answer["for"] for answer in answers):
            continue
        with torch.cuda.device(device):
            widest = widest_exact_tiles(partial(load_kernels, "triton", None), device)
        answers.append({"for": bound, "widest": widest, "file": keep_answer(cache, bound, widest)})
    return answers


def widest_exact_tiles(
    load: Callable[[TokenTileLimits], Kernels],
    device: torch.device,
    kinds: Sequence[str] = KINDS,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> TokenTileLimits:
    """The widest tile of each kind that leaves every bit as narrow ones have it; `load` makes kernels."""
    widest = dict.fromkeys(kinds, TILES[0])
    for kind in kinds:
        products = list(_products(kind, device, shapes))
        for tile in TILES[1:]:
            narrow = load({})
            wide = load({kind: tile})
            if not all(
                _alike(getattr(narrow, name), getattr(wide, name), given)
                for name, given in products
            ):
                break
            widest[kind] = tile
    return widest


def _alike(narrow: Callable[..., Any], wide: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Whether two forms of an operation give the same bits, on a GPU also where the second is replayed."""

    def same(found: Any) -> bool:
        pairs = zip(right, found, strict=True) if isinstance(right, tuple) else [(right, found)]
        return all(torch.equal(one, other) for one, other in pairs)

    right = narrow(*given)
    eager = same(wide(*given))
    if not eager or given[0].device.type == "cpu":
        return eager
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = wide(*given)
    graph.replay()
    return same(captured)


def _products(
    kind: str, device: torch.device, shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operations with their arguments, whose results tell of all that a tile might change."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float16 if kind == "float16" else torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    def weight(n: int, k: int) -> AnyWeight:
        wide: Tensor = draw(n, k) / k**0.5
        return tile_weight(quantize_int8(wide)) if kind == "int8" else wide

    (n, k), (both, inner), head = shapes
    yield "linear", (draw(ASKED_ROWS, k), weight(n, k), None, None, None, draw(ASKED_ROWS, n))
    norm = Norm(draw(ASKED_ROWS, 65).float().square() * inner / 65, 1e-6)
    yield "norm_gate_up", (draw(ASKED_ROWS, inner), weight(both, inner), None, None, norm)
    yield "head_logits", (draw(ASKED_ROWS, head[1]), weight(*head))
