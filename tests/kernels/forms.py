"""The forms that an operation has, torch's, Triton's and C's, as a table that tests run over."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import GELU, RELU2, SILU, Activation
from spd.kernels.native.build import (
    DTYPE_FLAGS,
    FEATURES,
    processor_features,
    unavailable_reason,
    usable_instructions,
)
from spd.kernels.native.calls import ROUND_FIELDS

HERE = [
    f"{name} {dtype}"
    for dtype in DTYPE_FLAGS
    for name in usable_instructions(dtype)
    if processor_features() >= FEATURES[name]
]
"""Of the instructions and dtypes that there are C kernels of, those that can be tried here."""
needs_compiled = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C kernels here: {unavailable_reason()}"
)
COMPILED = [pytest.param(name, marks=needs_compiled) for name in HERE]
EVERY: list[Any] = ["torch", "triton", *COMPILED]
PAGE = 64


def parametrize_forms(
    rows: Sequence[tuple[Any, ...]], default_rows: Sequence[int], *forms: Any
) -> list[Any]:
    """Return params (form, *row) of forms, or of all; the default lane has Triton's default_rows
    only.

    The interpreter is hundreds of times slower than the others.
    """
    params = []
    for form in forms or EVERY:
        name, marks = (form, ()) if isinstance(form, str) else (form.values[0], form.marks)
        for index, row in enumerate(rows):
            slow = (pytest.mark.slow,) if name == "triton" and index not in default_rows else ()
            params.append(pytest.param(name, *row, marks=(*marks, *slow)))
    return params


def entry_places(page: int, size: int, dtype: torch.dtype, values: bool) -> Tensor:
    """Return where the C kernels keep each element of a head's keys or values [page, size] in it.

    In order unless the size is a multiple of 32; else as right-side tiles [16 pairs][16 columns][2]
    of bfloat16, [32][16] of others, whose columns are keys, or elements of values.
    """
    places = torch.arange(page * size).view(page, size)
    if size % 32:
        return places
    column, depth = (places % size, places // size) if values else (places // size, places % size)
    tiles = (size, page) if values else (page, size)
    pairs = depth % 32 // 2 * 32 + column % 16 * 2 + depth % 2
    inside = pairs if dtype == torch.bfloat16 else depth % 32 * 16 + column % 16
    assert not any(side % 32 for side in tiles)
    return column // 32 * 32 * tiles[1] + depth // 32 * 1024 + column % 32 // 16 * 512 + inside


def to_native_pages(pool: Tensor, values: bool) -> Tensor:
    """Return pages [N, page, K, D] as the C kernels keep them: head by head, in places."""
    page, _, size = pool.shape[1:]
    entries = pool.transpose(1, 2).flatten(2)
    native = torch.empty_like(entries)
    native[..., entry_places(page, size, pool.dtype, values).flatten()] = entries
    return native.view(pool.shape)


def from_native_pages(pool: Tensor, values: bool) -> Tensor:
    """Return pages [N, page, K, D] of what `to_native_pages` returns, or of codes."""
    page, heads, size = pool.shape[1:]
    places = entry_places(page, size, pool.dtype, values)
    entries = pool.view(len(pool), heads, page * size)[..., places.flatten()]
    return entries.view(len(pool), heads, page, size).transpose(1, 2)


ROUNDED = 2.0**-8
"""Half a unit in the last place of bfloat16, as a share of the value."""


@dataclass(frozen=True)
class Form:
    """One form of the operations on the device that runs it."""

    name: str
    ops: Any
    device: str
    dtypes: tuple[torch.dtype, ...]
    """Types whose products can be trusted there."""

    @property
    def native(self) -> bool:
        return self.name in HERE

    def types(self, turn: int) -> tuple[torch.dtype, ...]:
        """Return all dtypes, or in the interpreter, which is slow, one by turns."""
        interpreted = self.name == "triton" and self.device == "cpu"
        return self.dtypes[turn % len(self.dtypes) :][:1] if interpreted else self.dtypes


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def near(
    result: Tensor, expected: Tensor, plain: Tensor, slack: float = 4.0, size: float | None = None
) -> None:
    """Assert an error of at most twice plain torch's in the same type, plus `slack` roundings of a
    size.

    The size is 1 and that of the right ones where it is not given: plain torch may be luckily
    right.
    """
    assert (
        result.dtype == plain.dtype and result.shape == expected.shape and result.isfinite().all()
    )
    size = 1 + expected.abs().max().item() if size is None else size
    allowed = (
        2 * (plain.double() - expected).abs().max().item()
        + slack * torch.finfo(result.dtype).eps * size
    )
    assert (result.double() - expected).abs().max() <= allowed


def assert_rounded(result: Tensor, exact: Tensor, slack: float = 4.0, floor: float = 1e-4) -> None:
    """Assert a result within `slack` roundings of the value, or of the sums' error where that is
    small."""
    assert result.isfinite().all()
    rounding = torch.finfo(result.dtype).eps / 2
    floor = min(floor, 1e-5) if result.dtype == torch.float32 else floor
    error = (result.double() - exact).abs()
    assert (error <= slack * rounding * exact.abs() + floor * exact.abs().max()).all(), error.max()


ACTS = [SILU, GELU, RELU2, Activation("silu", 0.7), Activation("swiglu", 0.9, 1.702)]


def apply_activation(x: Tensor, act: Activation) -> Tensor:
    """Apply an activation to a first product's rows, by its definition in x's dtype."""
    if act.kind == "relu2":
        return x.clamp(min=0) ** 2
    gate, up = x.chunk(2, dim=-1)
    limit = math.inf if act.limit is None else act.limit
    up = up.clamp(-limit, limit)
    if act.kind == "gelu":
        return F.gelu(gate, approximate="tanh") * up
    if act.kind == "silu":
        return (gate / (1 + (-gate).exp())).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return (up + 1) * gate / (1 + (-act.alpha * gate).exp())


def random_rotations(
    count: int, size: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [count, size] of random angles."""
    angles = torch.rand(count, size // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos = angles.cos().repeat(1, 2)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return cos.to(device, dtype), sin.to(device, dtype)


def form_of(request: pytest.FixtureRequest, name: str, stem: str) -> Any:
    """Return the form `name` of the module spd.kernels.STEM; C's library has all operations."""
    if name == "native":
        if request.getfixturevalue("device") != "cpu":
            pytest.skip("C kernels run on a CPU")
        return request.getfixturevalue("native_with")(HERE[0])
    if name == "triton":
        pytest.importorskip("triton")
    suffix = "_triton" if name == "triton" else ""
    return importlib.import_module(f"spd.kernels.{stem}{suffix}")


def round_state(**tensors: Tensor) -> Any:
    """Return a round's state, with zeros for tensors that the operation does not read, for C takes
    all."""
    flat = torch.zeros(1, 1, dtype=torch.int64)
    ring = torch.zeros(tensors.get("times", flat).shape[0], 1, 1, dtype=torch.int64)
    return SimpleNamespace(**{**dict.fromkeys(ROUND_FIELDS, flat), "ring": ring, **tensors})
