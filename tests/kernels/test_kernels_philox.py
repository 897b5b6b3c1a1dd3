# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Noise: published vectors, counters and ends.

Triton's are the same integers, and its draws are ordered.
"""

from __future__ import annotations

import math

import pytest
import torch

from spd.kernels.sampling import philox

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from benchmarks.gpu_suite import noise_triton  # noqa: E402
from spd.kernels.sampling import philox_triton  # noqa: E402
from spd.kernels.sampling.philox_triton import draw_rank, rank_is_finite, rank_token  # noqa: E402

PUBLISHED = [
    # (counter, key, output) of philox4x32-10 in Random123's known-answer file.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words_of(*counters: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, philox.philox(*(tuple(map(torch.tensor, words)) for words in counters))))  # type: ignore[arg-type]


def test_counter_is_group_position_stream_and_lane() -> None:
    assert all(words_of(counter, key) == words for counter, key, words in PUBLISHED)
    seed = (0x12345678 << 32) | 0x9ABCDEF0
    position = 77
    bits = philox.random_bits(torch.tensor(seed), torch.tensor(position), 3, 10)
    for token in range(10):
        words = words_of((token >> 2, position, 3, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert int(bits[token]) == words[token & 3]


@pytest.mark.parametrize("stream", [philox.STREAM_TARGET, 3])
@pytest.mark.parametrize("vocab", [1, 3, 17, 1000, 5003])
def test_bits_are_the_same_integers_and_noise_is_the_same_to_a_last_bit(
    vocab: int, stream: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (2, 3), generator=generator).to(device)
    positions = torch.randint(2**33, (2, 3), generator=generator).to(device)
    bits = noise_triton.random_bits(seed, positions, stream, vocab)
    assert torch.equal(bits, philox.random_bits(seed, positions, stream, vocab))
    noise = noise_triton.gumbel(seed, positions, stream, vocab)
    expected = philox.gumbel(seed, positions, stream, vocab)
    torch.testing.assert_close(noise, expected, rtol=3e-7, atol=3e-7)


@triton.jit
def ends_kernel(bits, out):
    at = tl.arange(0, 2)
    tl.store(out + at, philox_triton.gumbel_from_bits(tl.load(bits + at).to(tl.uint32)))


def test_uniforms_are_clamped_at_both_ends(device: str) -> None:
    uniforms = torch.empty(2, device=device)
    ends_kernel[(1,)](torch.tensor([0, 0xFFFFFFFF], device=device), uniforms)
    ends = torch.tensor([2.0**-33, 1 - 2.0**-24], dtype=torch.float64)
    assert torch.equal(philox.uniform(torch.tensor([0, 0xFFFFFFFF])).double(), ends)
    expected = -(-ends.log()).log()
    torch.testing.assert_close(uniforms.double().cpu(), expected, rtol=1e-6, atol=0)


@triton.jit
def rank_kernel(score, ids, rank, token, finite, size, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inside = at < size
    ranks = draw_rank(tl.load(score + at, mask=inside), tl.load(ids + at, mask=inside))
    tl.store(rank + at, ranks, mask=inside)
    tl.store(token + at, rank_token(ranks), mask=inside)
    tl.store(finite + at, rank_is_finite(ranks), mask=inside)


def test_ranks_order_scores_then_ids(device: str) -> None:
    """From the least drawn to the first drawn; equal scores come with falling ids."""
    ordered = [
        (-math.inf, 7),
        (-math.inf, 0),
        (-3e38, 1),
        (-1.0, 3),
        (-1.0, 2),
        (-1e-45, 0),
        (0.0, 9),
        (-0.0, 8),
        (0.0, 4),
        (1e-45, 5),
        (2.5, 262143),
        (2.5, 6),
        (3e38, 2**31 - 1),
        (math.inf, 3),
        (math.nan, 5),
        (math.nan, 1),
    ]
    score = torch.tensor([s for s, _ in ordered], device=device)
    score.view(torch.int32)[-2] = -(2**22)  # a NaN with its sign bit set
    ids = torch.tensor([i for _, i in ordered], dtype=torch.int32, device=device)
    rank, token = (torch.empty(len(ordered), dtype=torch.int64, device=device) for _ in range(2))
    finite = torch.zeros(len(ordered), dtype=torch.bool, device=device)
    rank_kernel[(1,)](score, ids, rank, token, finite, len(ordered), SIZE=16)
    assert (rank.diff() > 0).all() and (rank > philox_triton.NO_RANK.value).all()
    assert torch.equal(token, ids.long()) and torch.equal(finite, score.isfinite())
