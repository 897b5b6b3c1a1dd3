"""Both sampling kernels, Triton's and C's, draw the reference's tokens and laws, and look at no
other row."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.sampling import sampling, sampling_triton
from spd.kernels.sampling.draft_verify import STREAM_DRAFT, row_stream
from tests.kernels.forms import COMPILED, Form, parametrize_forms
from tests.kernels.sampling_cases import (
    EVERY_STEP,
    EXTREMES,
    PLAIN,
    Steps,
    assert_same_draws,
    random_case,
    slot_count,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf

GREEDY = Steps(noise=False, truncation=False, penalties=False, bias=False, min_length=False)
TRUNCATED = replace(PLAIN, truncation=True)


# -- the whole ---------------------------------------------------------------------------------------


DRAWN = [(vocab, coarse) for vocab in (1, 2, 3, 17, 1000, 5003) for coarse in (False, True)]
"""The size of the vocabulary, and whether logits are so coarse that many tie."""


@pytest.mark.covers(count=56)
@pytest.mark.parametrize(
    ("form", "vocab", "coarse"), parametrize_forms(DRAWN, (0, 3, 6, 9)), indirect=["form"]
)
def test_every_step_draws_the_references_tokens(form: Form, vocab: int, coarse: bool) -> None:
    assert_same_draws(
        form,
        random_case(
            slots=slot_count(form, 8),
            k=1,
            vocab=vocab,
            seed=vocab,
            device=form.device,
            coarse=coarse,
        ),
        EVERY_STEP,
    )
    for steps in (EVERY_STEP, TRUNCATED, PLAIN, GREEDY) if form.native else ():
        for k in (0, 3):
            assert_same_draws(
                form,
                random_case(
                    slots=60, k=k, vocab=vocab, seed=vocab + k, device=form.device, coarse=coarse
                ),
                steps,
            )


@pytest.mark.parametrize("k", range(6))
def test_windows_see_their_drafts(form: Form, k: int) -> None:
    """Penalties count every earlier draft, also when one is repeated; so does the minimum
    length."""
    case = random_case(
        slots=slot_count(form, 12 // (k + 1)), k=k, vocab=131, seed=k, device=form.device
    )
    assert_same_draws(form, case, replace(EVERY_STEP, truncation=False))
    zeros = torch.zeros_like(case.tensors.temperature)
    generated = case.tensors.generated
    strong = replace(
        case.tensors, temperature=zeros, frequency_penalty=zeros - 3, generated=0 * generated
    )
    flat = replace(case, logits=torch.zeros_like(case.logits), tensors=strong, usable_vocab=131)
    assert_same_draws(form, flat, replace(GREEDY, penalties=True))


@pytest.mark.parametrize("name", ["noise", "penalties", "bias", "min_length", "grammar"])
@pytest.mark.parametrize("present", [False, True], ids=["without", "alone"])
def test_steps_are_taken_one_by_one(form: Form, name: str, present: bool) -> None:
    steps = GREEDY if present else replace(EVERY_STEP, truncation=False)
    case = random_case(slots=slot_count(form, 4), k=2, vocab=300, seed=5, device=form.device)
    assert_same_draws(form, case, replace(steps, **{name: present}))


@pytest.mark.parametrize("steps", [GREEDY, PLAIN, TRUNCATED])
def test_rows_that_are_not_finite_say_so(form: Form, steps: Steps) -> None:
    """NaN anywhere, +inf, nothing but -inf, what a temperature makes infinite; unusable ids do not
    matter.

    The law of such a row is NaN.
    """
    case = random_case(slots=7, k=0, vocab=100, seed=13, device=form.device)
    logits = torch.where(case.logits.isinf(), 0.0, case.logits)
    logits[0, 0, 57] = nan
    logits[1, 0, [3, 80]] = inf
    logits[2] = -inf
    logits[3, 0, 95:] = nan
    logits[4, 0, [20, 70]] = -torch.tensor([nan, nan], device=form.device)
    logits[5, 0, 44:46] = torch.tensor([3e38, 3.1e38], device=form.device)
    tensors = replace(
        case.tensors,
        temperature=torch.tensor([0.8, 0.8, 0.8, 0.8, 0.8, 0.5, 0.8], device=form.device),
        min_p=torch.full_like(case.tensors.min_p, 0.1),
        top_k=torch.tensor([9, 0, 9, 9, 0, 0, 9], device=form.device),
        top_p=torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.9], device=form.device),
    )
    broken = replace(case, logits=logits, tensors=tensors, usable_vocab=90)
    sampled = assert_same_draws(form, broken, steps).flatten()
    assert sampled[[0, 1, 2, 4, 5]].tolist() == [57, 3, 0, 20, 44 if steps.noise else 45]
    right = [False, False, False, True, False, not steps.noise, True]
    assert broken.sample(form.ops, steps)[1].flatten().tolist() == right
    for heat in (
        (tensors.temperature, torch.zeros_like(tensors.temperature)) if not form.native else ()
    ):
        law = assert_same_laws(
            form, replace(broken, tensors=replace(tensors, temperature=heat)), steps
        )
        right[5] = not (steps.noise and heat.any())
        assert (
            law.isfinite().all(-1).flatten().tolist()
            == law.isfinite().any(-1).flatten().tolist()
            == right
        )


@pytest.mark.parametrize("truncation", [False, True])
def test_a_row_is_the_same_alone_and_among_others(
    form: Form, truncation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draw and its law, by any number of threads."""
    case = random_case(slots=5, k=0, vocab=1000, seed=17, device=form.device)
    order = [3, 1, 4, 0, 2]
    steps = replace(EVERY_STEP, truncation=truncation)
    interpreted = form.name == "triton" and form.device == "cpu"

    def run(case: Any) -> list[Tensor]:
        law = (
            []
            if form.native
            else [form.ops.row_distributions(case.logits, case.draft, case.with_steps(steps))]
        )
        return [*case.sample(form.ops, steps), *law]

    expected = run(case)
    for threads in (1, 2, 3) if form.native else (1,):
        if form.native:
            monkeypatch.setattr(form.ops, "threads", threads)
        for some in (order, *([slot] for slot in range(2 if truncation and interpreted else 5))):
            for result, right in zip(run(case.only(some)), expected, strict=True):
                assert torch.equal(result, right[some])


# -- the program -------------------------------------------------------------------------------------


def test_nothing_that_varies_chooses_the_program() -> None:
    """Rows and strides: Triton would compile 1 and multiples of 16 apart."""
    varying = {*sampling_triton.NOT_SPECIALIZED}
    for name, kernel in vars(sampling_triton).items():
        if not name.endswith("_kernel"):
            continue
        if hasattr(kernel, "params"):
            free = {p.name for p in kernel.params if p.do_not_specialize}
        else:  # in the interpreter
            free = set(kernel.kwargs["do_not_specialize"] or ())
        assert free == varying & set(kernel.arg_names), name


def assert_same_laws(form: Form, case: Any, steps: Steps) -> Tensor:
    """Assert zeros and NaN in the same places, and other values equal to float32's accuracy."""
    logits = case.logits.clone()
    tensors = case.with_steps(steps)
    result = form.ops.row_distributions(case.logits, case.draft, tensors)
    expected = sampling.row_distributions(case.logits, case.draft, tensors)
    assert torch.equal(case.logits.nan_to_num(7), logits.nan_to_num(7)), "the logits were changed"
    assert result.dtype == torch.float32 and result.shape == case.logits.shape
    assert torch.equal(result == 0, expected == 0)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=1e-9, equal_nan=True)
    return result


plain_forms = pytest.mark.parametrize("form", ["torch", "triton"], indirect=True)


@pytest.mark.covers(1)
@plain_forms
@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "ties"])
@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 300])
def test_every_step_has_the_samplings_law(
    form: Form, vocab: int, coarse: bool, small_blocks: None
) -> None:
    """Both truncations, each alone, and neither leave the tokens of torch's law."""
    case = random_case(
        slots=slot_count(form, 6), k=1, vocab=vocab, seed=vocab, device=form.device, coarse=coarse
    )
    assert_same_laws(form, case, TRUNCATED)
    sums = (
        assert_same_laws(form, case, EVERY_STEP).sum(-1).nan_to_num(1)
    )  # few tokens may all be hidden
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=1e-5)


@pytest.mark.covers(count=111)
@pytest.mark.parametrize(
    ("form", "name"),
    parametrize_forms([(name,) for name in EXTREMES], range(0, 30, 4), "triton", *COMPILED),
    indirect=["form"],
)
def test_truncation_keeps_the_right_tokens_at_its_edges(
    form: Form, name: str, small_blocks: None
) -> None:
    """Many draws, in which a token too many, or too few, would be seen; of Triton's the law shows
    it."""
    logits, top_k, top_p = EXTREMES[name]
    case = random_case(slots=1, k=0, vocab=len(logits), seed=5, device=form.device)
    count = 400 if form.native else 2
    rows = torch.tensor(logits).expand(1, count, -1).contiguous()
    places = torch.arange(count)[None]
    tensors = replace(
        case.tensors,
        top_k=torch.tensor([top_k], device=form.device),
        top_p=torch.tensor([top_p], device=form.device),
        min_p=torch.tensor([0.0], device=form.device),
        temperature=torch.tensor([1.0], device=form.device),
    )
    edge_case = replace(case, logits=rows.to(form.device), positions=places.to(form.device))
    edge_case = replace(edge_case, tensors=tensors, usable_vocab=len(logits))
    assert_same_draws(form, edge_case, TRUNCATED)
    if not form.native:
        assert_same_laws(form, edge_case, TRUNCATED)


@plain_forms
@pytest.mark.parametrize("noise", [False, True])
def test_ties_go_to_the_lowest_id_and_certain_rows_are_certain(
    form: Form, noise: bool, small_blocks: None
) -> None:
    """Within a block, across blocks, between zeros of both signs; temperature 0 alone and beside
    others."""
    case = random_case(slots=4, k=1, vocab=300, seed=5, device=form.device)
    logits = case.logits.clamp(max=1)
    logits[0, 0, [63, 64, 299]] = 8.0
    logits[1, 1, [77, 75, 200]] = 9.0
    logits[3, 0] = -1.0
    logits[3, 0, [140, 260]] = torch.tensor([-0.0, 0.0], device=form.device)
    heat = torch.tensor([0.0, 0.0, 0.7 * noise, 0.0], device=form.device)
    tensors = replace(case.tensors, temperature=heat)
    steps = replace(PLAIN, noise=noise)
    case = replace(case, logits=logits, tensors=tensors, usable_vocab=300)
    drawn, finite = case.sample(form.ops, steps)
    assert drawn[[0, 1, 3], [0, 1, 0]].tolist() == [63, 75, 140] and finite.all()
    law = assert_same_laws(form, case, steps)
    certain = torch.zeros_like(law).scatter_(-1, drawn[..., None], 1.0)
    greedy = [0, 1, 3]
    assert torch.equal(law[greedy], certain[greedy])
    assert (law[2].amax() < 1) == noise


def test_a_draft_stream_has_its_own_draws(device: str) -> None:
    """Both forms draw with the noise of the stream that is asked for, and another stream draws
    others."""
    case = random_case(slots=4, k=0, vocab=60, seed=23, device=device)
    hot = replace(case.tensors, temperature=torch.full_like(case.tensors.temperature, 3.0))
    case = replace(case, tensors=hot)
    seen = []
    for stream in (0, row_stream(STREAM_DRAFT, 0), row_stream(STREAM_DRAFT, 1)):
        for steps in (PLAIN, TRUNCATED):
            sampled, _ = case.sample(sampling_triton, steps, stream)
            assert torch.equal(sampled, case.sample(sampling, steps, stream)[0])
        seen.append(tuple(sampled.flatten().tolist()))
    assert len(set(seen)) == 3
