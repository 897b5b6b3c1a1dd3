"""The sampling kernels draw the reference's tokens and look at no other row."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from spd.kernels.sampling.sampling import SamplingTensors
from tests.kernels.sampling_cases import (
    EVERY_STEP,
    INFINITY,
    NAN,
    PLAIN,
    Steps,
    assert_drawn_alike,
    number,
    random_case,
)

pytest.importorskip("triton")

from spd.kernels.sampling import sampling_triton, truncation_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf

VOCABULARIES = [1, 2, 3, 17, 1000, 5003]


assert_same_tokens = partial(assert_drawn_alike, sampling_triton.sample_rows)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and chunks so small that a few hundred ids fill several."""
    monkeypatch.setattr(sampling_triton, "BLOCK", 64)
    monkeypatch.setattr(truncation_triton, "BLOCK", 64)
    monkeypatch.setattr(truncation_triton, "CHUNK", 16)


# -- the whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "ties"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_step_draws_the_references_tokens(vocab: int, coarse: bool, device: str) -> None:
    assert_same_tokens(random_case(number(device, 8), 1, vocab, vocab, device, coarse), EVERY_STEP)


@pytest.mark.parametrize("k", range(6))
def test_windows_see_their_drafts(k: int, device: str) -> None:
    """Penalties count every earlier draft, also when one is repeated; so does the minimum length."""
    case = random_case(number(device, 12 // (k + 1)), k, 131, k, device)
    assert_same_tokens(case, replace(EVERY_STEP, truncation=False))
    strong = replace(
        case.tensors,
        temperature=torch.zeros_like(case.tensors.temperature),
        frequency_penalty=torch.full_like(case.tensors.temperature, -3.0),
        generated=torch.zeros_like(case.tensors.generated),  # type: ignore[arg-type]
    )
    flat = replace(case, logits=torch.zeros_like(case.logits), tensors=strong, usable_vocab=131)
    steps = Steps(noise=False, truncation=False, bias=False, min_length=False)
    assert_same_tokens(flat, steps)


@pytest.mark.parametrize("name", ["noise", "penalties", "bias", "min_length", "grammar"])
@pytest.mark.parametrize("present", [False, True], ids=["without", "alone"])
def test_steps_are_taken_one_by_one(name: str, present: bool, device: str) -> None:
    steps = Steps(*[False] * 5) if present else replace(EVERY_STEP, truncation=False)
    case = random_case(number(device, 4), 2, 300, 5, device)
    assert_same_tokens(case, replace(steps, **{name: present}))


def test_absent_histories_are_not_read(device: str) -> None:
    case = random_case(number(device, 2), 1, 100, 6, device)
    bare = replace(case.tensors, bias=None, in_prompt=None, generated=None)
    assert_same_tokens(replace(case, tensors=bare), replace(EVERY_STEP, truncation=False))


def test_blocks_of_a_vocabulary_are_put_together(device: str, small_blocks: None) -> None:
    case = random_case(number(device, 3), 1, 300, 11, device)
    assert_same_tokens(case, replace(EVERY_STEP, truncation=False))
    assert_same_tokens(case.only([0, 1]), EVERY_STEP)


def test_ties_go_to_the_lowest_id(device: str, small_blocks: None) -> None:
    """Within a block, across blocks, and between zeros of both signs."""
    case = random_case(3, 0, 300, 12, device)
    logits = case.logits.clamp(max=1)
    logits[0, 0, [63, 64, 299]] = 8.0
    logits[1, 0, [77, 75, 200]] = 8.0
    logits[2, 0] = -1.0
    logits[2, 0, [140, 260]] = torch.tensor([-0.0, 0.0], device=device)
    steps = Steps(*[False] * 5)
    sampled, finite = sampling_triton.sample_rows(
        *replace(case, logits=logits, usable_vocab=300).arguments(steps)
    )
    assert sampled.flatten().tolist() == [63, 75, 140]
    assert finite.all()


@pytest.mark.parametrize("steps", [Steps(*[False] * 5), PLAIN, replace(PLAIN, truncation=True)])
def test_rows_that_are_not_finite_say_so(steps: Steps, device: str) -> None:
    """NaN anywhere, +inf, nothing but -inf; NaN beyond the usable ids does not matter."""
    case = random_case(6, 0, 100, 13, device)
    logits = torch.where(case.logits.isinf(), 0.0, case.logits)
    logits[0, 0, 57] = NAN
    logits[1, 0, [3, 80]] = INFINITY
    logits[2] = -INFINITY
    logits[3, 0, 95:] = NAN
    logits[4, 0, [20, 70]] = -torch.tensor([NAN, NAN], device=device)
    tensors = replace(
        case.tensors,
        temperature=torch.full_like(case.tensors.temperature, 0.8),
        min_p=torch.full_like(case.tensors.min_p, 0.1),
        top_k=torch.tensor([9, 0, 9, 9, 0, 9], device=device),
        top_p=torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, 0.9], device=device),
    )
    broken = replace(case, logits=logits, tensors=tensors, usable_vocab=90)
    sampled = assert_same_tokens(broken, steps)
    finite = sampling_triton.sample_rows(*broken.arguments(steps))[1]
    assert finite.flatten().tolist() == [False, False, False, True, False, True]
    assert sampled.flatten()[[0, 1, 2, 4]].tolist() == [57, 3, 0, 20]


@pytest.mark.parametrize("truncation", [False, True])
def test_a_row_is_the_same_alone_and_among_others(truncation: bool, device: str) -> None:
    case = random_case(5, 0, 1000, 17, device)
    steps = replace(EVERY_STEP, truncation=truncation)
    sampled, finite = sampling_triton.sample_rows(*case.arguments(steps))
    order = [3, 1, 4, 0, 2]
    moved, _ = sampling_triton.sample_rows(*case.only(order).arguments(steps))
    assert torch.equal(moved, sampled[order])
    for slot in range(2 if truncation and device == "cpu" else 5):
        alone, alone_finite = sampling_triton.sample_rows(*case.only([slot]).arguments(steps))
        assert torch.equal(alone, sampled[slot : slot + 1])
        assert torch.equal(alone_finite, finite[slot : slot + 1])


def test_a_window_is_the_same_as_its_first_rows(device: str) -> None:
    case = random_case(2, 4, 300, 19, device)
    steps = replace(EVERY_STEP, truncation=False)
    sampled, _ = sampling_triton.sample_rows(*case.arguments(steps))
    shorter = replace(
        case,
        logits=case.logits[:, :3].contiguous(),
        draft=case.draft[:, :2],
        positions=case.positions[:, :3],
    )
    assert torch.equal(sampling_triton.sample_rows(*shorter.arguments(steps))[0], sampled[:, :3])


def test_greedy_slots_get_no_noise_beside_others(device: str) -> None:
    case = random_case(4, 0, 300, 29, device)
    greedy = torch.tensor([True, False, True, True], device=device)
    case = replace(
        case,
        logits=case.logits.clamp(min=-10) * 0.01,
        tensors=replace(
            case.tensors,
            temperature=torch.where(greedy, -case.tensors.min_p, 1.0),
            min_p=torch.where(greedy, case.tensors.min_p, 0.0),
            top_p=torch.where(greedy, case.tensors.top_p, 1.0),
            top_k=torch.where(greedy, 5, 0),
        ),
        usable_vocab=300,
    )
    for truncation in (False, True):
        sampled, _ = sampling_triton.sample_rows(*case.arguments(replace(PLAIN, truncation=truncation)))
        assert torch.equal((sampled == case.logits.argmax(dim=-1))[:, 0], greedy)


def test_minimum_length_ends_within_a_window(device: str) -> None:
    """The only tempting token is a stop id; one slot may end from its third row on, one from the first."""
    case = random_case(2, 4, 100, 30, device)
    logits = torch.zeros_like(case.logits)
    logits[..., 7] = 5.0
    tensors = replace(
        case.tensors,
        stop_ids=torch.tensor([[-1, 7, 0], [0, 7, -1]], device=device),
        length=torch.tensor([10, 10], device=device),
        min_length=torch.tensor([12, 10], device=device),
    )
    steps = Steps(noise=False, truncation=False, penalties=False, bias=False)
    case = replace(case, logits=logits, tensors=tensors)
    sampled, _ = sampling_triton.sample_rows(*case.arguments(steps))
    assert sampled.tolist() == [[1, 1, 7, 7, 7], [7] * 5]
    assert_same_tokens(case, steps)


@pytest.mark.parametrize(("min_p", "all_kept"), [(0.36, True), (0.37, False)])
def test_min_p_is_relative_to_the_likeliest(min_p: float, all_kept: bool, device: str) -> None:
    """One token stands a factor e above all others, which together are drawn nearly always."""
    case = random_case(5, 0, 400, 31, device)
    logits = torch.full_like(case.logits, 2.0)
    logits[..., 370] = 3.0
    ones = torch.ones_like(case.tensors.temperature)
    tensors = replace(
        case.tensors,
        temperature=ones,
        top_p=ones,
        min_p=min_p * ones,
        top_k=torch.tensor([0, 399, 0, 399, 0], device=device),
    )
    case = replace(case, logits=logits, tensors=tensors, usable_vocab=400)
    sampled = assert_same_tokens(case, replace(PLAIN, truncation=True))
    assert (sampled != 370).all() if all_kept else (sampled == 370).all()


def test_slots_that_truncate_nothing_draw_as_without_truncation(device: str) -> None:
    case = random_case(4, 0, 300, 23, device)
    neutral = torch.tensor([True, False, True, True], device=device)
    tensors = replace(
        case.tensors,
        temperature=torch.tensor([1.0, 1.0, 0.0, 2.0], device=device),
        top_k=torch.where(neutral, 0, 2),
        top_p=torch.where(neutral, 1.0, 0.5),
        min_p=torch.where(neutral, 0.0, 0.2),
    )
    case = replace(case, tensors=tensors)
    with_it, _ = sampling_triton.sample_rows(*case.arguments(EVERY_STEP))
    without, _ = sampling_triton.sample_rows(*case.arguments(replace(EVERY_STEP, truncation=False)))
    assert torch.equal(with_it[neutral], without[neutral])
    assert_same_tokens(case, EVERY_STEP)


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


@pytest.mark.gpu
@pytest.mark.parametrize("truncation", [False, True])
def test_a_captured_graph_follows_its_inputs(truncation: bool) -> None:
    steps = replace(EVERY_STEP, truncation=truncation)
    case, other = (random_case(6, 3, 5003, seed, "cuda") for seed in (31, 32))
    sampling_triton.sample_rows(*case.arguments(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled, finite = sampling_triton.sample_rows(*case.arguments(steps))
    for source in (case, other):
        expected, expected_finite = sampling_triton.sample_rows(*source.arguments(steps))
        for name in ("logits", "draft", "positions"):
            getattr(case, name).copy_(getattr(source, name))
        for field in fields(SamplingTensors):
            getattr(case.tensors, field.name).copy_(getattr(source.tensors, field.name))
        graph.replay()
        assert torch.equal(sampled, expected)
        assert torch.equal(finite, expected_finite)
