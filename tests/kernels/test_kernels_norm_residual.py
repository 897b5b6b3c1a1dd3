"""The norm behind a block: against float64, and each row by itself."""

from __future__ import annotations

import pytest
import torch

from spd.kernels.linear import rows as reference

twin = pytest.importorskip("spd.kernels.linear.rows_triton")
EPSILON = 1e-6


@pytest.mark.parametrize(("rows", "n"), [(5, 16), (5, 80), (5, 300), (1, 1), (3, 2), (1, 77)])
def test_against_its_definition(device: str, dtypes: tuple[torch.dtype, ...], rows: int, n: int) -> None:
    for dtype in dtypes:
        torch.manual_seed(n)
        y, residual = (torch.randn(rows, n).to(device, dtype) for _ in range(2))
        weight = torch.randn(n, device=device)
        wide = y.double()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * weight.double()
        right = residual.double() + normed
        for form in (reference, twin):
            x, squares = form.norm_residual(y, weight, EPSILON, residual)
            assert x.dtype == dtype
            assert (x - right).abs().max() <= 2 * (right.to(dtype) - right).abs().max() + 1e-5
            torch.testing.assert_close(squares.sum(1), x.float().square().sum(1), rtol=1e-5, atol=0)


def test_a_row_alone_is_the_row_among_others(device: str) -> None:
    y, residual, weight = torch.randn(7, 80), torch.randn(7, 80), torch.randn(80)
    y, residual, weight = y.to(device), residual.to(device), weight.to(device)
    whole = twin.norm_residual(y, weight, EPSILON, residual)
    for row in range(7):
        alone = twin.norm_residual(y[row : row + 1], weight, EPSILON, residual[row : row + 1])
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, whole, strict=True))
