"""The C kernel that draws tokens against torch's form: the same tokens, and rows alike in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spd.kernels.native.library import NativeLibrary
from tests.kernels.native_cases import needs_compiled
from tests.kernels.sampling_cases import (
    EVERY_STEP,
    EXTREMES,
    INFINITY,
    NAN,
    PLAIN,
    Case,
    Steps,
    assert_drawn_alike,
    random_case,
)

pytestmark = needs_compiled
TRUNCATED = replace(PLAIN, truncation=True)
GREEDY = Steps(*[False] * 5)


@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "ties"])
@pytest.mark.parametrize("vocab", [3, 17, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("steps", [EVERY_STEP, TRUNCATED, PLAIN, GREEDY], ids=["all", "cut", "noise", "none"])
def test_the_references_tokens_are_drawn(
    native: NativeLibrary, vocab: int, coarse: bool, steps: Steps
) -> None:
    for k in (0, 3):
        assert_drawn_alike(native.sample_rows, random_case(60, k, vocab, vocab + k, "cpu", coarse), steps)


@pytest.mark.parametrize("name", EXTREMES)
def test_truncation_at_its_edges(native: NativeLibrary, name: str) -> None:
    """Many draws: a token too many, or too few, would be seen."""
    logits, top_k, top_p = EXTREMES[name]
    case = random_case(1, 0, len(logits), 5, "cpu")
    rows = torch.tensor(logits).expand(1, 400, -1).contiguous()
    tensors = replace(
        case.tensors,
        temperature=torch.ones(1),
        top_k=torch.tensor([top_k]),
        top_p=torch.tensor([top_p]),
        min_p=torch.zeros(1),
    )
    many = Case(rows, case.draft, torch.arange(400)[None], tensors, len(logits))
    assert_drawn_alike(native.sample_rows, many, TRUNCATED)


@pytest.mark.parametrize("steps", [GREEDY, PLAIN, TRUNCATED], ids=["none", "noise", "cut"])
def test_rows_that_are_not_finite_say_so(native: NativeLibrary, steps: Steps) -> None:
    """NaN anywhere, +inf, nothing but -inf, what a temperature makes infinite; unusable ids do not matter."""
    case = random_case(6, 0, 100, 13, "cpu")
    logits = torch.where(case.logits.isinf(), 0.0, case.logits)
    logits[0, 0, 57] = NAN
    logits[1, 0, [3, 80]] = INFINITY
    logits[2] = -INFINITY
    logits[3, 0, 95:] = NAN
    logits[4, 0, 44:46] = torch.tensor([3e38, 3.1e38])
    tensors = replace(
        case.tensors,
        temperature=torch.tensor([0.8, 0.8, 0.8, 0.8, 0.5, 0.8]),
        min_p=torch.full((6,), 0.1),
        top_k=torch.tensor([9, 0, 9, 9, 0, 9]),
        top_p=torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 0.9]),
    )
    broken = replace(case, logits=logits, tensors=tensors, usable_vocab=90)
    sampled = assert_drawn_alike(native.sample_rows, broken, steps)
    assert sampled.flatten()[[0, 1, 2, 4]].tolist() == [57, 3, 0, 44 if steps.noise else 45]
    finite = native.sample_rows(*broken.arguments(steps))[1]
    assert finite.flatten().tolist() == [False, False, False, True, not steps.noise, True]


@pytest.mark.parametrize("vocab", [70, 5003])
def test_rows_in_any_company(native: NativeLibrary, vocab: int) -> None:
    """Alone, in another order, by any number of threads."""
    case = random_case(9, 0, vocab, 17, "cpu")
    sampled, finite = native.sample_rows(*case.arguments(EVERY_STEP))
    order = [3, 1, 4, 0, 2, 8, 7, 6, 5]
    threads = native.threads
    for native.threads in (1, 2, 3):
        assert torch.equal(native.sample_rows(*case.only(order).arguments(EVERY_STEP))[0], sampled[order])
        for slot in range(9):
            alone = native.sample_rows(*case.only([slot]).arguments(EVERY_STEP))
            assert torch.equal(alone[0][0], sampled[slot]) and torch.equal(alone[1][0], finite[slot])
    native.threads = threads
