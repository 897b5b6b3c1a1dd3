"""What the tests of the C kernels share: noise, and how far a result may be off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spd.kernels.native.build import obstacle

needs_compiled = pytest.mark.skipif(obstacle() is not None, reason=f"no C kernels here: {obstacle()}")
PAGE = 64
ROUNDED = 2.0**-8
"""Half a unit in the last place of bfloat16, as a share of the value."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def assert_rounded(got: Tensor, exact: Tensor, slack: float = 4.0, floor: float = 1e-4) -> None:
    """Within `slack` roundings of the value, or of the sums' own error where that is small."""
    assert got.isfinite().all()
    error = (got.double() - exact).abs()
    assert (error <= slack * ROUNDED * exact.abs() + floor * exact.abs().max()).all(), error.max()
