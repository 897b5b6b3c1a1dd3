"""Noise: the published Philox vectors, the counter layout, the uniform's clamp, the draw's law."""

from __future__ import annotations

import torch

from spd.kernels.sampling.philox import STREAM_TARGET, gumbel, philox, random_bits, uniform

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


def words_of(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))))  # type: ignore[arg-type]


def test_published_vectors() -> None:
    assert all(words_of(counter, key) == words for counter, key, words in PUBLISHED)


def test_counter_is_group_position_stream_and_lane() -> None:
    seed, position = (0x12345678 << 32) | 0x9ABCDEF0, 77
    bits = random_bits(torch.tensor(seed), torch.tensor(position), 3, 10)
    for token in range(10):
        words = words_of((token >> 2, position, 3, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert int(bits[token]) == words[token & 3]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    seeds, positions = torch.tensor([[5, 5, 9]]), torch.tensor([[1, 2, 1]])
    together = gumbel(seeds, positions, STREAM_TARGET, 1001)
    for i in range(3):
        alone = gumbel(seeds[:, i : i + 1], positions[:, i : i + 1], STREAM_TARGET, 1001)
        assert torch.equal(together[:, i : i + 1], alone)
        assert i == 0 or not torch.equal(together[0, 0], together[0, i])
    assert not torch.equal(together, gumbel(seeds, positions, STREAM_TARGET + 1, 1001))


def test_uniform_is_clamped_at_both_ends() -> None:
    ends = uniform(torch.tensor([0, 0xFFFFFFFF]))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-24]
    assert torch.isfinite(-torch.log(-torch.log(ends))).all()
