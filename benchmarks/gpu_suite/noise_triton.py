# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Philox bits and Gumbel noise by themselves, of the functions that the drawing kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div
from spd.kernels.sampling.philox_triton import gumbel4, interleave4, random_bits4

GROUPS = 256
"""Of four token ids a program."""


@triton.jit
def noise_kernel(seed, position, out, stream, vocab_size, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Store bits (int64) or Gumbel noise (float32) of a row's block of token ids."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    key = tl.load(seed + row)
    at = tl.load(position + row)
    if BITS:
        bits0, bits1, bits2, bits3 = random_bits4(key, at, stream, groups)
        values = interleave4(bits0, bits1, bits2, bits3).to(tl.int64)
    else:
        noise0, noise1, noise2, noise3 = gumbel4(key, at, stream, groups)
        values = interleave4(noise0, noise1, noise2, noise3)
    ids = 4 * first + tl.arange(0, 4 * GROUPS)
    tl.store(out + row * vocab_size + ids, values, mask=ids < vocab_size)


def _noise(
    seed: Tensor, position: Tensor, stream: int, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    seed = seed + torch.zeros_like(position)
    position = position + torch.zeros_like(seed)
    out = torch.empty((*seed.shape, vocab_size), dtype=dtype, device=seed.device)
    grid = (seed.numel(), ceil_div(vocab_size, 4 * GROUPS))
    bits = dtype == torch.int64
    noise_kernel[grid](
        seed, position, out, stream, vocab_size, BITS=bits, GROUPS=GROUPS, enable_fp_fusion=False
    )
    return out


def random_bits(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return 32 random bits for every token id: int64 [..., V] from seed [...] and position [...],
    int64."""
    return _noise(
        seed=seed, position=position, stream=stream, vocab_size=vocab_size, dtype=torch.int64
    )


def gumbel(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [..., V], for seed [...] and absolute position [...],
    int64."""
    return _noise(
        seed=seed, position=position, stream=stream, vocab_size=vocab_size, dtype=torch.float32
    )
