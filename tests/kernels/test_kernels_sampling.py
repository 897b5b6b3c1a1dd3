"""Both sampling kernels, Triton's and C's, draw the reference's tokens and laws, and look at no other row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.native.library import NativeLibrary
from spd.kernels.sampling import sampling, sampling_triton, truncation_triton
from spd.kernels.sampling.draft_verify import STREAM_DRAFT, row_stream
from spd.kernels.sampling.sampling import truncate
from tests.kernels.forms import COMPILED, needs_compiled
from tests.kernels.sampling_cases import (
    EVERY_STEP,
    EXTREMES,
    INFINITY,
    NAN,
    PLAIN,
    Case,
    Steps,
    assert_drawn_alike,
    number,
    random_case,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf

VOCABULARIES = [1, 2, 3, 17, 1000, 5003]


GREEDY = Steps(*[False] * 5)
TRUNCATED = replace(PLAIN, truncation=True)


@dataclass(frozen=True)
class Form:
    """One of the kernels: its draw, and how many slots it is asked for where the interpreter takes few."""

    draw: Callable[..., tuple[Tensor, Tensor]]
    library: NativeLibrary | None
    device: str

    def number(self, few: int) -> int:
        return number(self.device, few) if self.library is None else 10 * few

    def assert_same_tokens(self, case: Case, steps: Steps) -> Tensor:
        return assert_drawn_alike(self.draw, case, steps)


@pytest.fixture(params=["triton", *COMPILED])
def form(request: pytest.FixtureRequest, device: str) -> Form:
    if request.param == "triton":
        return Form(sampling_triton.sample_rows, None, device)
    if device != "cpu":
        pytest.skip("C kernels run on a CPU")
    library = request.getfixturevalue("native_with")(request.param)
    return Form(library.sample_rows, library, device)


# -- the whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "ties"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_step_draws_the_references_tokens(form: Form, vocab: int, coarse: bool, device: str) -> None:
    form.assert_same_tokens(random_case(form.number(8), 1, vocab, vocab, device, coarse), EVERY_STEP)
    for steps in (EVERY_STEP, TRUNCATED, PLAIN, GREEDY) if form.library else ():
        for k in (0, 3):
            form.assert_same_tokens(random_case(60, k, vocab, vocab + k, device, coarse), steps)


@pytest.mark.parametrize("k", range(6))
def test_windows_see_their_drafts(form: Form, k: int, device: str) -> None:
    """Penalties count every earlier draft, also when one is repeated; so does the minimum length."""
    case = random_case(form.number(12 // (k + 1)), k, 131, k, device)
    form.assert_same_tokens(case, replace(EVERY_STEP, truncation=False))
    strong = replace(
        case.tensors,
        temperature=torch.zeros_like(case.tensors.temperature),
        frequency_penalty=torch.full_like(case.tensors.temperature, -3.0),
        generated=torch.zeros_like(case.tensors.generated),  # type: ignore[arg-type]
    )
    flat = replace(case, logits=torch.zeros_like(case.logits), tensors=strong, usable_vocab=131)
    steps = Steps(noise=False, truncation=False, bias=False, min_length=False)
    form.assert_same_tokens(flat, steps)


@pytest.mark.parametrize("name", ["noise", "penalties", "bias", "min_length", "grammar"])
@pytest.mark.parametrize("present", [False, True], ids=["without", "alone"])
def test_steps_are_taken_one_by_one(form: Form, name: str, present: bool, device: str) -> None:
    steps = GREEDY if present else replace(EVERY_STEP, truncation=False)
    case = random_case(form.number(4), 2, 300, 5, device)
    form.assert_same_tokens(case, replace(steps, **{name: present}))


def test_absent_histories_are_not_read(form: Form, device: str) -> None:
    case = random_case(form.number(2), 1, 100, 6, device)
    bare = replace(case.tensors, bias=None, in_prompt=None, generated=None)
    form.assert_same_tokens(replace(case, tensors=bare), replace(EVERY_STEP, truncation=False))


def test_blocks_of_a_vocabulary_are_put_together(device: str, small_blocks: None) -> None:
    case = random_case(number(device, 3), 1, 300, 11, device)
    assert_drawn_alike(sampling_triton.sample_rows, case, replace(EVERY_STEP, truncation=False))
    assert_drawn_alike(sampling_triton.sample_rows, case.only([0, 1]), EVERY_STEP)


def test_ties_go_to_the_lowest_id(device: str, small_blocks: None) -> None:
    """Within a block, across blocks, and between zeros of both signs."""
    case = random_case(3, 0, 300, 12, device)
    logits = case.logits.clamp(max=1)
    logits[0, 0, [63, 64, 299]] = 8.0
    logits[1, 0, [77, 75, 200]] = 8.0
    logits[2, 0] = -1.0
    logits[2, 0, [140, 260]] = torch.tensor([-0.0, 0.0], device=device)
    steps = GREEDY
    sampled, finite = sampling_triton.sample_rows(
        *replace(case, logits=logits, usable_vocab=300).arguments(steps)
    )
    assert sampled.flatten().tolist() == [63, 75, 140]
    assert finite.all()


@pytest.mark.parametrize("steps", [GREEDY, PLAIN, TRUNCATED])
def test_rows_that_are_not_finite_say_so(form: Form, steps: Steps, device: str) -> None:
    """NaN anywhere, +inf, nothing but -inf, what a temperature makes infinite; unusable ids do not matter."""
    case = random_case(7, 0, 100, 13, device)
    logits = torch.where(case.logits.isinf(), 0.0, case.logits)
    logits[0, 0, 57] = NAN
    logits[1, 0, [3, 80]] = INFINITY
    logits[2] = -INFINITY
    logits[3, 0, 95:] = NAN
    logits[4, 0, [20, 70]] = -torch.tensor([NAN, NAN], device=device)
    logits[5, 0, 44:46] = torch.tensor([3e38, 3.1e38], device=device)
    tensors = replace(
        case.tensors,
        temperature=torch.tensor([0.8, 0.8, 0.8, 0.8, 0.8, 0.5, 0.8], device=device),
        min_p=torch.full_like(case.tensors.min_p, 0.1),
        top_k=torch.tensor([9, 0, 9, 9, 0, 0, 9], device=device),
        top_p=torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.9], device=device),
    )
    broken = replace(case, logits=logits, tensors=tensors, usable_vocab=90)
    sampled = form.assert_same_tokens(broken, steps)
    finite = form.draw(*broken.arguments(steps))[1]
    assert finite.flatten().tolist() == [False, False, False, True, False, not steps.noise, True]
    assert sampled.flatten()[[0, 1, 2, 4, 5]].tolist() == [57, 3, 0, 20, 44 if steps.noise else 45]


@pytest.mark.parametrize("truncation", [False, True])
def test_a_row_is_the_same_alone_and_among_others(form: Form, truncation: bool, device: str) -> None:
    case = random_case(5, 0, 1000, 17, device)
    steps = replace(EVERY_STEP, truncation=truncation)
    sampled, finite = form.draw(*case.arguments(steps))
    order = [3, 1, 4, 0, 2]
    slots = range(2 if truncation and form.library is None and device == "cpu" else 5)
    usual = form.library.threads if form.library else 0
    for threads in (1, 2, 3) if form.library else (0,):
        if form.library:
            form.library.threads = threads
        assert torch.equal(form.draw(*case.only(order).arguments(steps))[0], sampled[order])
        for slot in slots:
            alone, alone_finite = form.draw(*case.only([slot]).arguments(steps))
            assert torch.equal(alone, sampled[slot : slot + 1])
            assert torch.equal(alone_finite, finite[slot : slot + 1])
    if form.library:
        form.library.threads = usual


@needs_compiled
@pytest.mark.parametrize("name", EXTREMES)
def test_truncation_at_its_edges(native: NativeLibrary, name: str) -> None:
    """Many draws of the C kernel, in which a token too many, or too few, would be seen."""
    logits, top_k, top_p = EXTREMES[name]
    case = random_case(1, 0, len(logits), 5, "cpu")
    rows = torch.tensor(logits).expand(1, 400, -1).contiguous()
    cuts = {"top_k": torch.tensor([top_k]), "top_p": torch.tensor([top_p]), "min_p": torch.zeros(1)}
    tensors = replace(case.tensors, temperature=torch.ones(1), **cuts)
    many = Case(rows, case.draft, torch.arange(400)[None], tensors, len(logits))
    assert_drawn_alike(native.sample_rows, many, TRUNCATED)


# -- the program -------------------------------------------------------------------------------------


def test_nothing_that_varies_chooses_the_program() -> None:
    """Rows and strides: Triton would compile 1 and multiples of 16 apart."""
    varying = {*sampling_triton.VARYING}
    for name, kernel in vars(sampling_triton).items():
        if not name.endswith("_kernel"):
            continue
        if hasattr(kernel, "params"):
            free = {p.name for p in kernel.params if p.do_not_specialize}
        else:  # in the interpreter
            free = set(kernel.kwargs["do_not_specialize"] or ())
        assert free == varying & set(kernel.arg_names), name


def kept_by_kernels(processed: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which of processed [rows, V] the thresholds keep, one slot a row."""
    keys = order_keys(processed)
    ones = torch.ones_like(top_p)
    tensors = random_case(len(processed), 0, 3, 0, str(processed.device)).tensors
    tensors = replace(tensors, temperature=ones, top_k=top_k, top_p=top_p)
    highest = torch.stack((keys.amax(dim=-1), keys[:, 0]), dim=-1).int()
    found = truncation_triton.find_thresholds(processed, highest, 1, tensors).long()
    assert torch.equal(found[:, 2], keys.amax(dim=-1))
    ids = torch.arange(processed.shape[1], device=processed.device)
    return (keys > found[:, :1]) | ((keys == found[:, :1]) & (ids <= found[:, 1:2]))


def order_keys(values: Tensor) -> Tensor:
    bits = values.view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    return torch.where(values == 0, 0, torch.where(values.isnan(), 2**31 - 1, keys))


def assert_same_kept(processed: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """The reference's -inf says what is not kept; -1e38 stands in for a -inf of the row's own."""
    marked = torch.where(processed == -INFINITY, -1e38, processed)
    expected = truncate(marked[:, None], top_k, top_p, torch.zeros_like(top_p))[:, 0] != -INFINITY
    assert torch.equal(kept_by_kernels(processed, top_k, top_p), expected)


def test_truncation_keeps_what_the_reference_keeps(device: str, small_blocks: None) -> None:
    """Both cuts, each alone, and neither, over several blocks and chunks, with and without ties."""
    rows = number(device, 12)
    g = torch.Generator().manual_seed(3)
    processed = 3 * torch.randn(rows, 200, generator=g)
    processed[1::2] = (2 * processed[1::2]).round() / 2
    top_k = torch.tensor([0, 7, 60, 7, 199, 200]).repeat(rows)[:rows]
    top_p = torch.tensor([0.9, 1.0, 0.6, 0.3, 0.995, 0.05, 0.8]).repeat(rows)[:rows]
    assert_same_kept(processed.to(device), top_k.to(device), top_p.to(device))


@pytest.mark.parametrize("name", EXTREMES)
def test_thresholds_at_their_edges(name: str, device: str, small_blocks: None) -> None:
    logits, top_k, top_p = EXTREMES[name]
    assert_same_kept(
        torch.tensor([logits], device=device),
        torch.tensor([top_k], device=device),
        torch.tensor([top_p], device=device),
    )


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
def test_laws_of_rows_that_are_not_finite_say_so(steps: Steps, device: str) -> None:
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
def test_a_law_is_the_same_alone_and_among_others(truncation: bool, device: str) -> None:
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
