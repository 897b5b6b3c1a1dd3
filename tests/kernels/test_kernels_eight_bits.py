"""Products by weights of eight bits: right, the same bits for a row in any company, and bounded errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear import skinny_linear_triton as twin
from spd.kernels.linear.eight_bits import block_scales, int8_rows
from spd.kernels.linear.skinny_config import LinearConfig
from spd.kernels.linear.skinny_linear import ScaledWeight

EPSILON = 1e-5
SPLIT = LinearConfig(block_n=32, block_k=64, split_k=2, stages=2)
SHAPES = [(16, 16, 1), (160, 140, 5), (1, 1, 1), (34, 131, 1)]
"""(N, K, T): less than a block of scales, partial last blocks both ways, one row and column, odd sizes."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(kind: str, n: int, k: int, device: str, columns: bool = False) -> ScaledWeight:
    """A random weight whose scales differ much from group to group."""
    wide = normal(n, k, seed=n + k) * torch.exp2(torch.arange(n) % 5 - 2.0)[:, None]
    factors = (1 + normal(k, seed=k).abs()).to(device) if columns else None
    if kind == "int8":
        made = int8_rows(wide)
        return ScaledWeight(made.values.to(device), made.scales.to(device), factors)
    scale_inv = torch.exp2(normal(-(-n // 128), -(-k // 128), seed=k)) / 3
    scales = block_scales(scale_inv, n)
    return ScaledWeight(wide.to(torch.float8_e4m3fn).to(device), scales.to(device), factors)


def exact(weight: ScaledWeight) -> Tensor:
    """The definition, value by value, in float64."""
    values, scales = weight.values.double(), weight.scales.double()
    row, column = torch.arange(values.shape[0])[:, None], torch.arange(values.shape[1])
    wide = values * (scales[row] if scales.dim() == 1 else scales[row // 16, column // 128])
    return wide if weight.columns is None else wide * weight.columns.double()


def close(found: Tensor, plain: Tensor, right: Tensor, size: float) -> None:
    """Error at most twice that of plain torch in the same type, and a little where that is luckily small."""
    allowed = 2 * (plain.double() - right).abs().max().item() + 4 * torch.finfo(found.dtype).eps * size
    assert found.dtype == plain.dtype and found.isfinite().all()
    assert (found.double() - right).abs().max().item() <= allowed


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("n", "k", "rows"), SHAPES)
def test_products(kind: str, n: int, k: int, rows: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    plain_weight = make(kind, n, k, device)
    fed = make(kind, n, k, device, columns=True)
    right, right_fed = exact(plain_weight), exact(fed)
    for dtype in dtypes:
        x, residual = normal(rows, k, seed=1).to(device, dtype), normal(rows, n, seed=2).to(device, dtype)
        squares = x.float().square().sum(-1, keepdim=True)
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPSILON)
        size = 1 + (x.double().abs() @ right_fed.abs().T).max().item() / k**0.5
        for config in (SPLIT, None):
            for weight, wide in ((plain_weight, right), (fed, right_fed)):
                case = (x, squares, EPSILON, weight, None)
                found = twin.norm_linear(*case, config=config)
                close(found, reference.norm_linear(*case), normed @ wide.T, size)
            found, _ = twin.linear_residual(x, plain_weight, None, residual, config=config)
            plain, _ = reference.linear_residual(x, plain_weight, None, residual)
            close(found, plain, residual.double() + x.double() @ right.T, size)
            logits = twin.head_logits(x, plain_weight, config=config)
            close(logits, reference.head_logits(x.float(), plain_weight), x.double() @ right.T, size)
            if n % 2 == 0:
                case = (x, squares, EPSILON, fed, None)
                gate, up = (normed @ right_fed.T).chunk(2, dim=-1)
                value = torch.nn.functional.silu(gate) * up
                found = twin.norm_gate_up(*case, config=config)
                close(found, reference.norm_gate_up(*case), value, 1 + value.abs().max().item())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(
    kind: str, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    weight = make(kind, 96, 260, device, columns=True)
    for dtype in dtypes:
        x = normal(40, 260, seed=3).to(device, dtype)
        squares = x.float().square().sum(-1, keepdim=True)
        whole = twin.norm_gate_up(x, squares, EPSILON, weight, None)
        logits = twin.head_logits(x, weight)
        for first, count in ((0, 1), (7, 3), (17, 16), (20, 20)):
            part = slice(first, first + count)
            alone = twin.norm_gate_up(x[part], squares[part], EPSILON, weight, None)
            assert torch.equal(alone, whole[part])
            assert torch.equal(twin.head_logits(x[part], weight), logits[part])


def test_int8_is_within_half_a_step() -> None:
    wide = normal(33, 70, seed=4) * torch.exp2(torch.arange(33) - 16.0)[:, None]
    wide[5] = 0
    made = int8_rows(wide)
    assert ((made.plain(torch.float32) - wide).abs() <= 0.5001 * made.scales[:, None]).all()
    assert made.values.abs().amax(1).tolist() == [127] * 5 + [0] + [127] * 27
    assert made.scales[5] == 1 and not made.values[5].any()
    half = int8_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5]]))
    assert half.values.tolist() == [[127, 0, 2, -2]]


def test_blocks_keep_their_scales_when_weights_are_joined() -> None:
    first, second = torch.rand(2, 3), torch.rand(1, 3)
    joined = torch.cat((block_scales(first, 144), block_scales(second, 80)))
    values = torch.ones(224, 300).to(torch.float8_e4m3fn)
    wide = ScaledWeight(values, joined).plain(torch.float32)
    assert wide[143, 127] == first[1, 0] and wide[144, 128] == second[0, 1] and wide[127, 299] == first[0, 2]
