"""What the tests of the skinny products share: random operands, keys of draws, and how close is close."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.linear.skinny_config import LinearConfig

SMALL = LinearConfig(block_n=16, block_k=32, stages=2)


class Operands:
    """Random operands of one shape, the residual stream's squares in `parts` uneven parts."""

    def __init__(self, n: int, k: int, rows: int, dtype: torch.dtype, device: str, parts: int = 3) -> None:
        generator = torch.Generator().manual_seed(n * 1000 + k * 10 + rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.x, self.residual, self.scale = normal(rows, k), normal(rows, n), normal(k)
        self.weight, self.bias = normal(n, k), normal(n)
        self.pair, self.pair_bias = normal(2 * n, k), normal(2 * n)
        self.squares = squares_of(self.x, parts)


def squares_of(x: Tensor, parts: int) -> Tensor:
    chunks = x.float().square().tensor_split(parts, dim=1)
    return torch.stack([chunk.sum(1) for chunk in chunks], dim=1)


def close(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Error at most twice that of plain torch in the same type, and a little where that is luckily small."""
    assert found.dtype == plain.dtype and found.shape == exact.shape
    size = 1.0 + exact.abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 2 * torch.finfo(found.dtype).eps * size
    assert (found.double() - exact).abs().max().item() <= allowed


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


Keys = tuple[Tensor, Tensor, int, Tensor]


def sample_operands(
    slots: int, window: int, device: str, dtype: torch.dtype, vocab: int = 77, k: int = 64
) -> tuple[Operands, Keys]:
    """Windows of rows at positions beyond 32 bits; the first slot draws at temperature 0."""
    seed = torch.arange(slots, device=device) * 7**20 - 2**62
    first = torch.arange(slots, device=device) * 2**31 + 5
    heat = torch.linspace(0.0, 1.5, slots, device=device)
    return Operands(vocab, k, slots * window, dtype, device), (seed, first, 3, heat)
