"""Draws in the head's own epilogue: those of the stored logits, and of the full sampler."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import noise_triton
from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear import skinny_linear_triton as twin
from spd.kernels.sampling import sampling_triton
from spd.kernels.sampling.sampling import SamplingTensors
from spd.runtime.round.sampling_params import SamplerClass
from tests.kernels.skinny_cases import SMALL, sample_operands


@pytest.mark.parametrize(
    ("vocab", "k", "usable"),
    [(77, 64, 77), (77, 64, 61), (77, 64, 1), (1, 1, 1), (2, 33, 2), (3, 5, 3), (17, 3, 17)],
)
def test_sample_is_the_draw_from_the_stored_logits(
    vocab: int, k: int, usable: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Rows of temperature 0 among others, in one tile of tokens and in two."""
    for dtype in dtypes:
        for slots, window in ((1, 1), (5, 1), (5, 4)):
            o, keys = sample_operands(slots, window, device, dtype, vocab, k)
            token, finite = twin.head_sample(o.x, o.weight, usable, *keys, config=SMALL)
            logits = twin.head_logits(o.x, o.weight, config=SMALL)[:, :usable].view(slots, window, usable)
            seed, first, step, heat = keys
            positions = first[:, None] + step + torch.arange(window, device=device)
            noise = noise_triton.gumbel(seed[:, None].expand(slots, window), positions, 0, usable)
            heat = heat.view(-1, 1, 1)
            score = torch.where(heat > 0, logits / heat + noise, logits)
            assert token.dtype == torch.int64 and torch.equal(token, score.argmax(-1).flatten())
            assert finite.dtype == torch.bool and finite.all()
            plain, plain_finite = reference.head_sample(o.x, o.weight, usable, *keys)
            assert torch.equal(plain_finite, finite)
            if dtype == torch.float32:
                assert torch.equal(plain, token)


@pytest.mark.parametrize(("known", "usable"), [(77, 500), (77, 300), (17, 40), (1, 500), (3, 9)])
def test_a_head_of_some_ids_draws_as_if_it_knew_them_only(
    known: int, usable: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """The draw over all ids, with minus infinity for those that no row stands for: same noise, same token."""
    for dtype in dtypes:
        for slots, window in ((1, 1), (5, 2)):
            o, keys = sample_operands(slots, window, device, dtype, known, 64)
            ids = torch.randperm(500, generator=torch.Generator().manual_seed(known))[:known].sort().values
            if int(ids[0]) >= usable:
                ids[0] = usable - 1
            ids = ids.to(device)
            token, finite = twin.head_sample(o.x, o.weight, usable, *keys, ids, config=SMALL)
            every = torch.full((slots * window, 500), float("-inf"), device=device)
            every[:, ids] = twin.head_logits(o.x, o.weight, config=SMALL)
            logits = every[:, :usable].view(slots, window, usable)
            seed, first, step, heat = keys
            positions = first[:, None] + step + torch.arange(window, device=device)
            noise = noise_triton.gumbel(seed[:, None].expand(slots, window), positions, 0, usable)
            heat = heat.view(-1, 1, 1)
            score = torch.where(heat > 0, logits / heat + noise, logits)
            assert torch.equal(token, score.argmax(-1).flatten()) and finite.all()
            assert slots == 1 or bool((heat > 0).any())
            plain, plain_finite = reference.head_sample(o.x, o.weight, usable, *keys, ids)
            assert torch.equal(plain_finite, finite)
            if dtype == torch.float32:
                assert torch.equal(plain, token)


def test_sample_is_the_full_samplers_draw(device: str) -> None:
    o, keys = sample_operands(5, 2, device, torch.float16)
    seed, first, step, heat = keys
    one, none = torch.ones(5, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    tensors = SamplingTensors(
        heat, one, 0 * one, one, 0 * one, 0 * one, none, seed, None, None, None, none[:, None], none, none
    )
    steps = SamplerClass(noise=True)
    logits = twin.head_logits(o.x, o.weight).view(5, 2, -1)
    positions = first[:, None] + step + torch.arange(2, device=device)
    drawn = sampling_triton.sample_rows(logits, none[:, None], positions, tensors, steps, 70)
    for full, fused in zip(drawn, twin.head_sample(o.x, o.weight, 70, *keys), strict=True):
        assert torch.equal(full.flatten(), fused)


def test_ties_go_to_the_lowest_id_across_tiles(device: str) -> None:
    o, (seed, first, step, heat) = sample_operands(4, 1, device, torch.float32)
    o.weight[:] = o.weight[5]
    x = o.x * (o.x @ o.weight[5]).sign().unsqueeze(1)
    o.weight[:3] = -o.weight[:3]
    token, finite = twin.head_sample(x, o.weight, 77, seed, first, step, 0 * heat, config=SMALL)
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
        token, finite = twin.head_sample(x, weight, 61, *keys, config=SMALL)
        assert finite.tolist() == [True, False, False, False, True, True]
        assert torch.equal(finite, reference.head_sample(x, weight, 61, *keys)[1])
        assert token.min() >= 0 and token.max() < 61
        assert not twin.head_sample(x, weight, 77, *keys, config=SMALL)[1].any()
