"""Norm, rotation and cache write in one launch, of keys and values and of latents, in every form.

Against float64, row by row, and with what stands beside the rows' own places left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.dispatch import load_kernels
from tests.kernels.forms import (
    Form,
    assert_rounded,
    from_native_pages,
    near,
    normal,
    random_rotations,
)

PAGES = 5
PAGE = 64
TABLE = 40
UNTOUCHED = 7.0
EPSILON = 0.05
"""Large, so that its absence would be seen."""


@dataclass
class Inputs:
    """Arguments of one call, on pools that hold sevens."""

    wide: Tensor
    """Of keys and values: qkv [T, (H + 2 K) * D]. Of latents: queries that stand apart, then what
    is kept."""
    turning: RotatedRows
    weight: Tensor | None
    heads: int
    kv_heads: int
    size: int
    rank: int | None = None

    def cast(self, dtype: torch.dtype) -> Inputs:
        weight = None if self.weight is None else self.weight.to(dtype)
        cos = self.turning.cos.to(dtype)
        turning = replace(self.turning, cos=cos, sin=self.turning.sin.to(dtype))
        return replace(self, wide=self.wide.to(dtype), turning=turning, weight=weight)

    def of(self, rows: slice) -> Inputs:
        assert self.turning.positions is not None
        positions = self.turning.positions[rows]
        kv_slots = self.turning.kv_slots[rows]
        turning = replace(self.turning, positions=positions, kv_slots=kv_slots)
        return replace(self, wide=self.wide[rows], turning=turning)

    def run(self, form: Form | None) -> list[Tensor]:
        """Return the query and the pools' entries [slots, numbers]; by definition if form is
        None."""
        width = self.size + self.rank if self.rank else self.size
        shape = (PAGES, PAGE, width) if self.rank else (PAGES, PAGE, self.kv_heads, self.size)
        pools = [self.wide.new_full(shape, UNTOUCHED) for _ in range(1 if self.rank else 2)]
        query = self._define(pools) if form is None else self._call(form, pools)
        if form is not None and form.native and not self.rank:
            keys, values = pools
            pools = [from_native_pages(keys, False), from_native_pages(values, True)]
        return [query, *(pool.flatten(0, 1).flatten(1) for pool in pools)]

    def _split(self) -> tuple[Tensor, Tensor]:
        """Return queries [T, H, R] and latents [T, L + R], cut from wider rows as in a layer."""
        assert self.rank is not None and self.weight is not None
        query = self.wide[:, 3 : 3 + self.heads * (7 + self.size)].unflatten(1, (self.heads, -1))[
            ..., 7:
        ]
        return query, self.wide[:, -(self.rank + self.size) :]

    def _call(self, form: Form, pools: list[Tensor]) -> Tensor:
        if self.rank:
            query, latent = self._split()
            return form.ops.latent_store(
                query=query,
                latent=latent,
                rows=self.turning,
                norm=self.weight,
                epsilon=EPSILON,
                pages=pools[0],
            )
        weight = self.weight.float() if form.native and self.weight is not None else self.weight
        return form.ops.rotary_store(
            qkv=self.wide,
            rows=self.turning,
            qk_weight=weight,
            epsilon=EPSILON,
            pools=pools,
            num_heads=self.heads,
        )

    def _define(self, pools: list[Tensor]) -> Tensor:
        """Compute the result by definition."""
        half = self.size // 2
        places = self.turning.kv_slots

        def normed(x: Tensor) -> Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()

        def rotated(x: Tensor) -> Tensor:
            cos = self.turning.cos[self.turning.positions][:, None, :half]
            sin = self.turning.sin[self.turning.positions][:, None, half:]
            first = x[..., :half]
            second = x[..., half:]
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        if self.rank:
            query, latent = self._split()
            key = rotated(latent[:, None, self.rank :])[:, 0]
            entries = torch.cat((normed(latent[:, : self.rank]) * self.weight, key), -1)
            pools[0].flatten(0, 1)[places] = entries
            return rotated(query)
        fused = self.wide.view(len(self.wide), -1, self.size)
        keyed = fused[:, : self.heads + self.kv_heads]
        keyed = rotated(keyed if self.weight is None else normed(keyed) * self.weight)
        pools[0].flatten(0, 1)[places] = keyed[:, self.heads :]
        pools[1].flatten(0, 1)[places] = fused[:, self.heads + self.kv_heads :]
        return keyed[:, : self.heads]


def make(
    form: Form,
    rows: int,
    heads: tuple[int, int],
    size: int,
    normed: bool = True,
    rank: int | None = None,
) -> Inputs:
    """Return float32 inputs for a form's device; heads: of queries, of keys."""
    cos, sin = random_rotations(TABLE, size, form.device, torch.float32)
    order = torch.Generator().manual_seed(rows)
    positions, slots = (torch.randperm(n, generator=order)[:rows] for n in (TABLE, PAGES * PAGE))
    turning = RotatedRows(cos, sin, positions.to(form.device), slots.to(form.device))
    width = 3 + heads[0] * (7 + size) + rank + size if rank else (heads[0] + 2 * heads[1]) * size
    shape = (rank,) if rank else (sum(heads), size)
    weight = None
    if normed:
        generator = torch.Generator().manual_seed(6)
        weight = (torch.randn(shape, generator=generator).abs() + 0.5).to(form.device)
    wide = normal(rows, width, seed=5).to(form.device)
    return Inputs(
        wide=wide,
        turning=turning,
        weight=weight,
        heads=heads[0],
        kv_heads=heads[1],
        size=size,
        rank=rank,
    )


CASES: list[tuple[int, tuple[int, int], int, bool, int | None]] = [
    # rows, heads of queries and of keys, size that is rotated, whether heads are normed, rank of
    # latents
    (1, (4, 2), 16, True, None),
    (5, (3, 1), 80, True, None),
    (3, (7, 7), 96, False, None),
    (5, (2, 2), 24, True, None),
    (5, (4, 2), 64, False, None),
    (4, (6, 2), 6, True, None),
    (1, (1, 1), 2, True, None),
    (2, (3, 3), 2, False, None),
    (1, (3, 1), 34, True, None),
    (6, (5, 1), 8, True, 24),
    (9, (4, 1), 32, True, 128),
    (9, (3, 1), 8, True, 40),
    (5, (1, 1), 2, True, 1),
    (3, (3, 1), 6, True, 33),
]


@pytest.mark.parametrize(("rows", "heads", "size", "normed", "rank"), CASES)
def test_rotation_and_store_equal_their_definition(
    form: Form, rows: int, heads: tuple[int, int], size: int, normed: bool, rank: int | None
) -> None:
    """Values are copied, and nothing but the rows' own places is written; of a row alone, the same
    bits."""
    if form.native and (size % 8 or (rank or 0) % 8):
        pytest.skip("heads of the C kernels are multiples of 8")
    torch_form = Form("torch", load_kernels("torch"), form.device, form.dtypes)
    for dtype in form.types(rows):
        inputs = make(form=form, rows=rows, heads=heads, size=size, normed=normed, rank=rank).cast(
            dtype
        )
        result = inputs.run(form)
        right = inputs.cast(torch.float64).run(None)
        for ours, plain, exact in zip(result, inputs.run(torch_form), right, strict=True):
            if form.native:
                assert_rounded(ours, exact)
            elif form.name == "torch":
                assert (ours - exact).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)
            else:
                near(ours, exact, plain, size=None if rank else 2.5e-7 / torch.finfo(dtype).eps)
        if not rank:
            assert torch.equal(result[2].double(), right[2]), "values are copied"
        unwritten = torch.ones(PAGES * PAGE, dtype=torch.bool, device=form.device)
        unwritten[inputs.turning.kv_slots] = False
        assert all((pool[unwritten] == UNTOUCHED).all() for pool in result[1:])
        for i in {0, rows - 1} if form.name != "torch" else ():
            alone = inputs.of(slice(i, i + 1)).run(form)
            place = int(inputs.turning.kv_slots[i])
            assert torch.equal(alone[0][0], result[0][i])
            assert all(
                torch.equal(alone[p][place], result[p][place]) for p in range(1, len(result))
            )
