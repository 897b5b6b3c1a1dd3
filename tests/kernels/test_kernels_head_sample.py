"""Draws in the head's own epilogue: those of the stored logits, and of the full sampler."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import noise_triton
from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear import skinny_linear_triton as twin
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.sampling import sampling_triton
from spd.kernels.sampling.sampling import SamplingTensors
from spd.runtime.round.sampling_params import SamplerClass
from tests.kernels.skinny_cases import SMALL, sample_operands


@pytest.mark.covers(count=6)
@pytest.mark.parametrize(
    ("vocab", "k", "usable", "every"),
    [
        *[(77, 64, 77, 0), (77, 64, 61, 0), (77, 64, 1, 0), (1, 1, 1, 0), (2, 33, 2, 0), (3, 5, 3, 0)],
        *[(17, 3, 17, 0), (77, 64, 500, 500), (77, 64, 300, 500), (17, 64, 40, 500), (1, 64, 500, 500)],
        (3, 64, 9, 500),
    ],
)
def test_sample_is_the_draw_from_the_stored_logits(
    vocab: int, k: int, usable: int, every: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Rows of temperature 0 among others, in one tile of tokens and in two.

    A head that knows some of `every` ids draws as if the logits of the others were minus infinity.
    """
    for dtype in dtypes:
        for slots, window in ((1, 1), (5, 1), (5, 4)):
            o, keys = sample_operands(slots, window, device, dtype, vocab, k)
            logits, known = twin.head_logits(o.x, o.weight, config=SMALL), ()
            draw = Draw(*keys, usable)
            if every:
                generator = torch.Generator().manual_seed(vocab)
                ids = torch.randperm(every, generator=generator)[:vocab].sort().values
                ids[0] = min(int(ids[0]), usable - 1)
                known = (ids.to(device),)
                logits = torch.full((slots * window, every), float("-inf"), device=device)
                logits[:, known[0]] = twin.head_logits(o.x, o.weight, config=SMALL)
            token, finite = twin.head_sample(o.x, o.weight, draw, *known, config=SMALL)
            logits = logits[:, :usable].view(slots, window, usable)
            seed, first, step, heat = keys
            positions = first[:, None] + step + torch.arange(window, device=device)
            noise = noise_triton.gumbel(seed[:, None].expand(slots, window), positions, 0, usable)
            heat = heat.view(-1, 1, 1)
            assert slots == 1 or bool((heat > 0).any())
            score = torch.where(heat > 0, logits / heat + noise, logits)
            assert token.dtype == torch.int64 and torch.equal(token, score.argmax(-1).flatten())
            assert finite.dtype == torch.bool and finite.all()
            plain, plain_finite = reference.head_sample(o.x, o.weight, draw, *known)
            assert torch.equal(plain_finite, finite)
            if dtype == torch.float32:
                assert torch.equal(plain, token)


def test_sample_is_the_full_samplers_draw(device: str) -> None:
    o, keys = sample_operands(5, 2, device, torch.float16)
    seed, first, step, heat = keys
    one, none = torch.ones(5, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    history = (None, None, None, none[:, None], none, none)
    numbers = (heat, one, 0 * one, one, 0 * one, 0 * one, none, seed)
    tensors = SamplingTensors(*numbers, *history, SamplerClass(noise=True), 70)
    logits = twin.head_logits(o.x, o.weight).view(5, 2, -1)
    positions = first[:, None] + step + torch.arange(2, device=device)
    drawn = sampling_triton.sample_rows(logits, none[:, None], positions, tensors)
    for full, fused in zip(drawn, twin.head_sample(o.x, o.weight, Draw(*keys, 70)), strict=True):
        assert torch.equal(full.flatten(), fused)


def test_ties_go_to_the_lowest_id_across_tiles(device: str) -> None:
    o, (seed, first, step, heat) = sample_operands(4, 1, device, torch.float32)
    o.weight[:] = o.weight[5]
    x = o.x * (o.x @ o.weight[5]).sign().unsqueeze(1)
    o.weight[:3] = -o.weight[:3]
    token, finite = twin.head_sample(x, o.weight, Draw(seed, first, step, 0 * heat, 77), config=SMALL)
    assert token.tolist() == [3] * 4 and finite.all()


def test_rows_without_finite_logits_are_told(device: str) -> None:
    """NaN anywhere below `usable_vocab`, infinities that win or that are everywhere; never beyond it."""
    o, (seed, first, step, heat) = sample_operands(6, 1, device, torch.float32)
    weight, x = torch.zeros_like(o.weight), torch.zeros_like(o.x)
    weight[:, 0] = 1.0
    weight[40] = 0.0
    weight[40, 1] = 1.0
    weight[70, 2] = float("nan")
    x[0, 0], x[1, 1], x[2, 1] = 1.0, float("nan"), float("inf")
    x[3, 0], x[4, 0], x[4, 1] = float("-inf"), 1.0, -1e30
    x[5, 0] = 1.0
    for temperature in (0.0, 0.7):
        keys = (seed, first, step, torch.full_like(heat, temperature))
        token, finite = twin.head_sample(x, weight, Draw(*keys, 61), config=SMALL)
        assert finite.tolist() == [True, False, False, False, True, True]
        assert torch.equal(finite, reference.head_sample(x, weight, Draw(*keys, 61))[1])
        assert token.min() >= 0 and token.max() < 61
        assert not twin.head_sample(x, weight, Draw(*keys, 77), config=SMALL)[1].any()
