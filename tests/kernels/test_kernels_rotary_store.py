"""Norm, rotation and cache write in one launch: against float64, the torch composition, and row by row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from spd.kernels.attention import rotary_store as reference
from spd.kernels.attention.rotary_store import RotatedRows, apply_rotary, store_kv
from spd.kernels.linear.rms_norm import rms_norm

twin = pytest.importorskip("spd.kernels.attention.rotary_store_triton")

PAGES, PAGE, TABLE = 5, 8, 40
EPSILON = 0.05
"""Large, so that its absence would be seen."""


@dataclass
class Inputs:
    """Arguments of one call on pools that hold sevens."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor | None
    heads: int
    kv_heads: int
    size: int

    def pools(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (PAGES, PAGE, self.kv_heads, self.size)
        return tuple(torch.full(shape, 7.0, dtype=dtype, device=self.qkv.device) for _ in range(2))  # type: ignore[return-value]

    def run(self, operation, rows=slice(None)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        """(query, key pool, value pool) of some rows."""
        pools = self.pools(self.qkv.dtype)
        turning = RotatedRows(self.cos, self.sin, self.positions[rows], self.slots[rows])
        query = operation(self.qkv[rows], turning, self.weight, EPSILON, pools, self.heads)
        return query, *pools

    def double(self) -> Inputs:
        weight = None if self.weight is None else self.weight.double()
        return Inputs(
            self.qkv.double(),
            self.cos.double(),
            self.sin.double(),
            self.positions,
            self.slots,
            weight,
            self.heads,
            self.kv_heads,
            self.size,
        )


def make(
    device: str,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    size: int,
    normed: bool = True,
    table: torch.dtype | None = None,
) -> Inputs:
    torch.manual_seed(0)
    angle = torch.rand(TABLE, size // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    weight = (torch.rand(sum(heads), size) + 0.5).to(device, dtype) if normed else None
    return Inputs(
        torch.randn(rows, (heads[0] + 2 * heads[1]) * size).to(device, dtype),
        torch.cat((cos, cos), -1).to(device, table or dtype),
        torch.cat((-sin, sin), -1).to(device, table or dtype),
        torch.randperm(TABLE)[:rows].to(device),
        torch.randperm(PAGES * PAGE)[:rows].to(device),
        weight,
        *heads,
        size,
    )


def exact(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition in float64, written out."""
    x = inputs.double()
    fused = x.qkv.view(-1, x.heads + 2 * x.kv_heads, x.size)
    rotated, value = fused[:, : x.heads + x.kv_heads], fused[:, x.heads + x.kv_heads :]
    if x.weight is not None:
        rotated = rotated / (rotated.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * x.weight
    half = x.size // 2
    cos, sin = x.cos[x.positions][:, None, :half], x.sin[x.positions][:, None, half:]
    first, second = rotated[..., :half], rotated[..., half:]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    keys, values = x.pools(torch.float64)
    keys.flatten(0, 1)[x.slots] = rotated[:, x.heads :]
    values.flatten(0, 1)[x.slots] = value
    return rotated[:, : x.heads], keys, values


@pytest.mark.parametrize(
    ("rows", "heads", "size", "normed"),
    [
        (1, (4, 2), 16, True),
        (5, (3, 1), 80, True),
        (3, (7, 7), 96, False),
        (4, (6, 2), 6, True),
        (1, (1, 1), 2, True),
        (2, (3, 3), 2, False),
        (1, (3, 1), 34, True),
    ],
)
def test_against_its_definition(
    device: str, dtypes: tuple[torch.dtype, ...], rows: int, heads: tuple[int, int], size: int, normed: bool
) -> None:
    for dtype in dtypes:
        inputs = make(device, dtype, rows, heads, size, normed)
        found = inputs.run(twin.rotary_store)
        expected, plain = exact(inputs), inputs.run(reference.rotary_store)
        for ours, theirs, right in zip(found, plain, expected, strict=True):
            assert ours.dtype == dtype and ours.shape == right.shape
            error, allowed = (ours - right).abs().max(), (theirs - right).abs().max()
            assert error <= 2 * allowed + 1e-6
        assert torch.equal(found[2], plain[2]), "values are copied"


def test_tables_may_be_finer_than_the_model(device: str) -> None:
    inputs = make(device, torch.float16, 3, (4, 2), 16, table=torch.float32)
    for operation in (twin.rotary_store, reference.rotary_store):
        for found, right in zip(inputs.run(operation), exact(inputs), strict=True):
            assert found.dtype == torch.float16 and (found - right).abs().max() < 4e-3


def test_rows_without_a_place_share_one(device: str) -> None:
    """Rows that must not be kept write one slot, whichever wins, and nothing but their slot is touched."""
    inputs = make(device, torch.float32, 6, (4, 2), 16)
    inputs.slots[2:] = 3
    _, keys, values = inputs.run(twin.rotary_store)
    touched = set(inputs.slots.tolist())
    for pool in (keys, values):
        written = (pool.flatten(0, 1) != 7).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(written) == touched
    _, right, _ = exact(inputs)
    assert (keys.flatten(0, 1)[inputs.slots[:2]] - right.flatten(0, 1)[inputs.slots[:2]]).abs().max() < 1e-5


def test_a_row_alone_is_the_row_among_others(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        inputs = make(device, dtype, 9, (5, 2), 32)
        query, keys, values = inputs.run(twin.rotary_store)
        for i in range(9):
            alone, key, value = inputs.run(twin.rotary_store, slice(i, i + 1))
            slot = inputs.slots[i]
            assert torch.equal(alone[0], query[i])
            assert torch.equal(key.flatten(0, 1)[slot], keys.flatten(0, 1)[slot])
            assert torch.equal(value.flatten(0, 1)[slot], values.flatten(0, 1)[slot])


def test_an_odd_head_is_refused(device: str) -> None:
    """The halves of a rotation are equal: config.json's heads are refused before, with its name."""
    inputs = make(device, torch.float32, 1, (1, 1), 3)
    for operation in (twin.rotary_store, reference.rotary_store):
        with pytest.raises(ValueError, match="3 values of a head cannot be rotated in pairs"):
            inputs.run(operation)


@pytest.mark.parametrize("normed", [True, False])
def test_the_torch_form_is_the_composition(normed: bool) -> None:
    inputs = make("cpu", torch.float16, 4, (4, 2), 16, normed)
    fused = inputs.qkv.view(4, 8, 16)
    rotated = fused[:, :6] if inputs.weight is None else rms_norm(fused[:, :6], inputs.weight, EPSILON)
    rows = [table[inputs.positions].unsqueeze(1) for table in (inputs.cos, inputs.sin)]
    rotated = apply_rotary(rotated, *rows)
    keys, values = inputs.pools(torch.float16)
    store_kv(rotated[:, 4:], fused[:, 6:], (keys, values), inputs.slots)
    for found, right in zip(inputs.run(reference.rotary_store), (rotated[:, :4], keys, values), strict=True):
        assert torch.equal(found, right)
