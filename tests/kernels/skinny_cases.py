"""What the tests of the skinny products share: random operands, keys of draws, and how close is
close."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spd.kernels.linear.few_bits import GroupedWeight, pack_nibbles, quantize_int8
from spd.kernels.linear.skinny_config import LinearConfig
from spd.kernels.linear.tiled_weight import TiledWeight, tile_weight
from spd.runtime.models.gguf_forms import FORMS
from tests.kernels.forms import normal
from tests.kernels.gguf_cases import drawn_blocks, grouped

SMALL = LinearConfig(block_n=16, block_k=32, stages=2)


CODED = [
    *(("int4", 96, 128, group, zeros) for group in (32, 64) for zeros in (False, True)),
    ("int8", 96, 128, 64, True),
    *((kind, 70, 224, 224, False) for kind in ("int4", "int8", "e2m1", "e4m3")),
    *(("e2m1", 70, 96, group, False) for group in (16, 32)),
    ("e2m1", 33, 48, 16, False),
    ("int4", 100, 1040, 1040, True),
    ("int8", 32, 256, 128, False),
    ("e4m3", 40, 200, 128, False),  # the last group partial
]
"""Weights in codes: kind, width, depth, group, whether there are zeros."""


def drawn(
    kind: str, width: int, depth: int, group: int, zeros: bool, wide: bool = True, count: int = 0
) -> GroupedWeight:
    """Return a random weight of any code, seeded by its sizes."""
    generator = torch.Generator().manual_seed(width * depth + group)
    rows = width * max(1, count)
    num_codes = 16 if kind in ("int4", "e2m1") else 256
    codes = torch.randint(0, num_codes, (rows, depth), generator=generator).to(torch.uint8)
    if kind == "e4m3":
        codes = torch.where(codes & 127 == 127, codes - 1, codes)
    groups = math.ceil(depth / group)
    scales = torch.rand(rows, groups, generator=generator) * 0.02 + 0.001
    zero = torch.randint(0, num_codes, (rows, groups), generator=generator).to(torch.uint8)
    stored_codes = pack_nibbles(codes) if kind in ("int4", "e2m1") else codes
    scales = scales if wide else scales.bfloat16()
    weight = GroupedWeight(kind, stored_codes, scales, zero if zeros else None, group)  # type: ignore[arg-type]
    return weight.as_experts(count) if count else weight


def make_weight(
    n: int, k: int, device: str, kind: str = "int8", columns: bool = False
) -> TiledWeight:
    """Return a random int8 weight whose rows' scales differ much, one of any codes by "kind
    group", or one of a GGUF type's blocks."""
    factors = (1 + normal(k, seed=k).abs()).to(device) if columns else None
    if kind == "int8":
        weight = quantize_int8(
            normal(n, k, seed=n + k) * torch.exp2(torch.arange(n) % 5 - 2.0)[:, None]
        )
    elif kind in FORMS:
        weight = grouped(kind, drawn_blocks(kind, n, k), n)
    else:
        code, group = kind.split()
        weight = drawn(code, n, k, int(group), code.startswith("int") and group != "128")
    return tile_weight(replace(weight.map_tensors(lambda part: part.to(device)), columns=factors))


def exact(weight: Tensor | TiledWeight) -> Tensor:
    """Return a weight's values by their definition, in float64."""
    if isinstance(weight, Tensor):
        return weight.double()
    if weight.group:
        return weight.plain(torch.float64)
    wide = weight.codes.double() * weight.scales.double()
    return wide if weight.columns is None else wide * weight.columns.double()


class Operands:
    """Random operands of one shape, the residual stream's squares in `parts` uneven parts.

    `weight` [N, K] is fed rows as they are, `fed` and `pair` [2 N, K] normed ones, which in eight
    bits bring the norm's weight along.
    """

    def __init__(
        self,
        n: int,
        k: int,
        rows: int,
        dtype: torch.dtype,
        device: str,
        parts: int = 3,
        kind: str = "plain",
    ) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + k * 10 + rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.x = draw(rows, k)
        self.residual = draw(rows, n)
        self.scale = draw(k)
        self.tail = draw(n)
        self.bias = draw(n)
        self.pair_bias = draw(2 * n)
        self.weight: Any
        self.fed: Any
        self.pair: Any
        if kind == "plain":
            self.weight = self.fed = draw(n, k)
            self.pair = draw(2 * n, k)
        else:
            self.weight, self.fed, self.pair = (
                make_weight(n=size, k=k, device=device, kind=kind, columns=columns)
                for size, columns in ((n, False), (n, True), (2 * n, True))
            )
        self.weights = self.weight, self.fed, self.pair
        self.squares = squares_of(self.x, parts)


def squares_of(x: Tensor, parts: int) -> Tensor:
    chunks = x.float().square().tensor_split(parts, dim=1)
    return torch.stack([chunk.sum(1) for chunk in chunks], dim=1)


Keys = tuple[Tensor, Tensor, int, Tensor]


def sample_operands(
    slots: int, window: int, device: str, dtype: torch.dtype, vocab: int = 77, k: int = 64
) -> tuple[Operands, Keys]:
    """Return windows of rows at positions beyond 32 bits; the first slot draws at temperature 0."""
    seed = torch.arange(slots, device=device) * 7**20 - 2**62
    first = torch.arange(slots, device=device) * 2**31 + 5
    temperature = torch.linspace(0.0, 1.5, slots, device=device)
    return Operands(vocab, k, slots * window, dtype, device), (seed, first, 3, temperature)
