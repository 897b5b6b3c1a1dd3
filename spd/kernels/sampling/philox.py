"""Counter-based noise: Philox4x32-10 as torch integers, uniforms and Gumbel noise from it.

The integers are the same in every form (torch, interpreter, GPU), so a draw depends on its seed,
position, stream and token id only. Source: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011), constants of Random123.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10

STREAM_TARGET = 0  # the stream of emitted draws; coupled draft models use it, too


def _multiply_high_low(value: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of value * multiplier, both below 2**32.

    Int64 wraps, and loses no bit.
    """
    product = value * multiplier
    return (product >> 32) & MASK, product & MASK


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Encrypt four 32-bit counters under two 32-bit keys; every word is an int64 tensor.

    All arguments broadcast against each other. Returns the four output words, each in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply_high_low(c0, MULTIPLIERS[0])
        high1, low1 = _multiply_high_low(c2, MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + WEYL[0]) & MASK
        k1 = (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def random_bits(seed: Tensor, position: Tensor, stream: int | Tensor, vocab_size: int) -> Tensor:
    """Return 32 random bits for every token id: int64 [..., V] from seed [...] and position [...].

    Key: the two halves of the 64-bit seed. Counter: (v >> 2, position, stream, 0), lane v & 3.
    stream: one number, or one for each position [...].
    """
    groups = torch.arange((vocab_size + 3) // 4, device=seed.device)
    where = position.unsqueeze(-1)
    zero = torch.zeros_like(where)
    key = (seed.unsqueeze(-1) & MASK, (seed.unsqueeze(-1) >> 32) & MASK)
    streams = zero + (stream.unsqueeze(-1) if isinstance(stream, Tensor) else stream)
    words = philox((groups, where & MASK, streams, zero), key)
    lanes = torch.stack([word + torch.zeros_like(words[0]) for word in words], dim=-1)
    return lanes.flatten(-2)[..., :vocab_size].contiguous()


def uniform(bits: Tensor) -> Tensor:
    """Return float32 uniforms in [2**-33, 1 - 2**-24] from 32-bit integers."""
    return (bits.to(torch.float32) * 2.0**-32).clamp(2.0**-33, 1.0 - 2.0**-24)


def gumbel(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [..., V], for seed [...] and absolute position
    [...]."""
    uniforms = uniform(random_bits(seed, position, stream, vocab_size))
    if uniforms.device.type != "cpu":
        return -torch.log(-torch.log(uniforms))
    # A row at a time: on CPU a logarithm's last bit may depend on its element's index in a tensor.
    rows = [-torch.log(-torch.log(row.clone())) for row in uniforms.reshape(-1, vocab_size)]
    return torch.stack(rows).view(uniforms.shape)
