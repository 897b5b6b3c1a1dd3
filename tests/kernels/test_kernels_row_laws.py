"""The laws that rows are drawn from: probabilities of the processed logits, alike in both forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import sampling
from spd.kernels.sampling.draft_verify import STREAM_DRAFT, row_stream
from tests.kernels.sampling_cases import EVERY_STEP, INFINITY, NAN, PLAIN, Case, Steps, number, random_case

pytest.importorskip("triton")

from spd.kernels.sampling import sampling_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf


def laws_of(case: Case, steps: Steps, module: object = sampling_triton) -> Tensor:
    law: Tensor = module.row_laws(case.logits, case.draft, case.with_steps(steps))  # type: ignore[attr-defined]
    return law


def assert_same_laws(case: Case, steps: Steps) -> Tensor:
    """Zeros and NaN in the same places, else equal to float32's accuracy."""
    logits = case.logits.clone()
    found, expected = laws_of(case, steps), laws_of(case, steps, sampling)
    assert torch.equal(case.logits.nan_to_num(7), logits.nan_to_num(7)), "the logits were changed"
    assert found.dtype == torch.float32 and found.shape == case.logits.shape
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-9, equal_nan=True)
    return found


@pytest.mark.parametrize(("vocab", "coarse"), [(1, False), (2, True), (3, False), (17, True), (1000, False)])
def test_every_step_has_the_samplings_law(vocab: int, coarse: bool, device: str) -> None:
    law = assert_same_laws(random_case(number(device, 3), 1, vocab, vocab, device, coarse), EVERY_STEP)
    sums = law.sum(-1).nan_to_num(1)  # few tokens may all be hidden
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("noise", [False, True])
def test_certain_rows_are_certain_of_what_is_drawn(noise: bool, device: str, small_blocks: None) -> None:
    """Temperature 0, alone and beside others; ties go to the lowest id, also across blocks."""
    case = random_case(4, 1, 300, 5, device)
    logits = case.logits.clamp(max=1)
    logits[0, 0, [63, 64, 299]] = 8.0
    logits[1, 1, [140, 260]] = 9.0
    tensors = replace(case.tensors, temperature=torch.tensor([0.0, 0.0, 0.7 * noise, 0.0], device=device))
    case = replace(case, logits=logits, tensors=tensors, usable_vocab=300)
    steps = replace(PLAIN, noise=noise)
    law = assert_same_laws(case, steps)
    drawn, _ = sampling.sample_rows(*case.arguments(steps))
    certain = torch.zeros_like(law).scatter_(-1, drawn[..., None], 1.0)
    greedy = [0, 1, 3]
    assert torch.equal(law[greedy], certain[greedy])
    assert (law[2].amax() < 1) == noise


@pytest.mark.parametrize("steps", [Steps(*[False] * 5), PLAIN, replace(PLAIN, truncation=True)])
def test_rows_that_are_not_finite_say_so(steps: Steps, device: str) -> None:
    case = random_case(5, 0, 100, 13, device)
    logits = torch.where(case.logits.isinf(), 0.0, case.logits)
    logits[0, 0, 57] = NAN
    logits[1, 0, [3, 80]] = INFINITY
    logits[2] = -INFINITY
    logits[3, 0, 95:] = NAN
    for temperature in (0.0, 0.8):
        tensors = replace(case.tensors, temperature=torch.full_like(case.tensors.temperature, temperature))
        law = assert_same_laws(replace(case, logits=logits, tensors=tensors, usable_vocab=90), steps)
        assert law.isnan().all(-1).flatten().tolist() == [True, True, True, False, False]
        assert not law[3:].isnan().any()


@pytest.mark.parametrize("truncation", [False, True])
def test_a_row_is_the_same_alone_and_among_others(truncation: bool, device: str) -> None:
    case = random_case(3, 0, 200, 17, device)
    steps = replace(EVERY_STEP, truncation=truncation)
    law = laws_of(case, steps)
    assert torch.equal(laws_of(case.only([2, 0, 1]), steps), law[[2, 0, 1]])
    assert torch.equal(laws_of(case.only([1]), steps), law[1:2])


def test_draws_of_a_drafters_own_stream(device: str) -> None:
    """Both forms draw with the noise of the stream that is asked for, and another stream draws others."""
    case = random_case(4, 0, 60, 23, device)
    hot = replace(case.tensors, temperature=torch.full_like(case.tensors.temperature, 3.0))
    case, seen = replace(case, tensors=hot), []
    for stream in (0, row_stream(STREAM_DRAFT, 0), row_stream(STREAM_DRAFT, 1)):
        for steps in (PLAIN, replace(PLAIN, truncation=True)):
            found, _ = sampling_triton.sample_rows(*case.arguments(steps), stream)
            assert torch.equal(found, sampling.sample_rows(*case.arguments(steps), stream)[0])
        seen.append(tuple(found.flatten().tolist()))
    assert len(set(seen)) == 3
