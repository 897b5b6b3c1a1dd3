# mypy: disable-error-code="untyped-decorator"
"""The sampling kernels draw the reference's tokens, keep exactly what it keeps, and look at no other row."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels import sampling
from spd.kernels.philox import STREAM_TARGET, gumbel
from spd.kernels.sampling import SamplingTensors, process_rows, token_mass, truncate

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from spd.kernels import sampling_triton, truncation_triton  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf

VOCABULARIES = [3, 17, 1000, 5003]
INFINITY, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Steps:
    noise: bool = True
    truncation: bool = True
    penalties: bool = True
    bias: bool = True
    min_length: bool = True


EVERY_STEP = Steps()
PLAIN = Steps(truncation=False, penalties=False, bias=False, min_length=False)


@dataclass(frozen=True)
class Case:
    logits: Tensor
    draft: Tensor
    positions: Tensor
    tensors: SamplingTensors
    usable_vocab: int

    def arguments(self, steps: Steps) -> tuple[Any, ...]:
        return self.logits, self.draft, self.positions, self.tensors, steps, self.usable_vocab

    def only(self, slots: list[int], rows: slice = slice(None)) -> Case:
        """Some slots, and of k = 0 windows some rows, in an order of their own."""
        tensors = {f.name: getattr(self.tensors, f.name)[slots] for f in fields(SamplingTensors)}
        return Case(
            self.logits[slots][:, rows].contiguous(),
            self.draft[slots],
            self.positions[slots][:, rows],
            SamplingTensors(**tensors),
            self.usable_vocab,
        )


def random_case(slots: int, k: int, vocab: int, seed: int, device: str, coarse: bool = False) -> Case:
    """Random logits, some of them -inf, on a grid with many ties if coarse; parameters of every kind."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (slots,), generator=g)]

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < share

    logits = 4 * torch.randn(slots, k + 1, vocab, generator=g)
    if coarse:
        logits = (2 * logits).round() / 2
    logits[chance(0.05, slots, k + 1, vocab)] = -INFINITY
    tensors = SamplingTensors(
        temperature=pick(0.0, 0.3, 0.9, 1.0, 1.7, 6.0),
        top_p=pick(1.0, 1.0, 0.02, 0.5, 0.9, 0.99),
        min_p=pick(0.0, 0.0, 0.02, 0.3),
        repetition_penalty=pick(1.0, 0.7, 1.3),
        presence_penalty=pick(0.0, 0.6, -1.1),
        frequency_penalty=pick(0.0, 0.35, -0.2),
        top_k=pick(0, 0, 1, 3, 20, vocab // 2, vocab - 1, vocab, vocab + 7).long(),
        seed=torch.randint(0, 2**63 - 1, (slots,), generator=g),
        bias=torch.where(chance(0.1, slots, vocab), 3 * torch.randn(slots, vocab, generator=g), 0.0),
        in_prompt=chance(0.2, slots, vocab),
        generated=torch.randint(0, 4, (slots, vocab), generator=g, dtype=torch.int32)
        * chance(0.2, slots, vocab),
        stop_ids=torch.randint(-1, vocab, (slots, 5), generator=g),
        length=torch.randint(1, 20, (slots,), generator=g),
        min_length=torch.randint(1, 24, (slots,), generator=g),
    )
    # Few different ids, so that windows repeat a draft.
    draft = torch.randint(min(vocab, 3), (slots, k), generator=g)
    positions = torch.randint(2**20, (slots, 1), generator=g) + torch.arange(k + 1)
    moved = {f.name: getattr(tensors, f.name).to(device) for f in fields(SamplingTensors)}
    tensors = SamplingTensors(**moved)
    return Case(
        logits.to(device), draft.to(device), positions.to(device), tensors, max(1, vocab - vocab // 9)
    )


def assert_same_tokens(case: Case, steps: Steps) -> Tensor:
    """The kernels' tokens and flags are the reference's, but where noise decides by a last bit."""
    sampled, finite = sampling_triton.sample_rows(*case.arguments(steps))
    expected, expected_finite = sampling.sample_rows(*case.arguments(steps))
    assert sampled.dtype == torch.int64
    assert finite.dtype == torch.bool
    assert torch.equal(finite, expected_finite)
    if not torch.equal(sampled, expected):
        scores = process_rows(case.logits, case.draft, case.tensors, steps, case.usable_vocab)
        seed = case.tensors.seed.unsqueeze(-1).expand_as(case.positions)
        noisy = scores + gumbel(seed, case.positions, STREAM_TARGET, scores.shape[-1])
        scores = torch.where((case.tensors.temperature > 0).view(-1, 1, 1) & steps.noise, noisy, scores)
        margin = scores.gather(-1, expected[..., None]) - scores.gather(-1, sampled[..., None])
        assert (margin.squeeze(-1)[sampled != expected] < 1e-5).all()
        assert (sampled != expected).float().mean() < 0.01
    return sampled


def number(device: str, few: int) -> int:
    """How many slots: few where the interpreter takes its time."""
    return few if device == "cpu" else 100 * few


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
    assert_same_tokens(random_case(number(device, 4), 1, vocab, vocab, device, coarse), EVERY_STEP)


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


@pytest.mark.parametrize("name", ["noise", "penalties", "bias", "min_length"])
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


# -- truncation --------------------------------------------------------------------------------------


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
    """All tokens are in one of two groups; the reference's -inf says which, but for rows not finite."""
    marked = processed.nan_to_num(0.0, 1e38, -1e38)  # so that a kept -inf can be told from a hidden one
    assert ((marked == processed) | ~processed.isfinite()).all()
    expected = truncate(marked[:, None], top_k, top_p, torch.zeros_like(top_p))[:, 0] > -INFINITY
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


EXTREMES: dict[str, tuple[list[float], int, float]] = {
    "all equal": ([2.5] * 17, 5, 1.0),
    "all equal, by mass": ([2.5] * 17, 0, 0.5),
    "all equal, both": ([2.5] * 17, 9, 0.4),
    "one token": ([1.0], 0, 0.5),
    "two zeros": ([-0.0, 0.0, -0.0, 0.0], 2, 1.0),
    "both sides of zero": ([-1e-40, 1e-40, 0.0, -0.0, 2.0, -2.0], 3, 1.0),
    "far apart": ([3e38, -3e38, 1.0, 3e38, -1.0], 3, 0.9),
    "below all bounds": ([50.0, 0.0, -50.0, -1e30, -1e30, -1e30], 5, 1.0),
    "a mass of nothing": ([90.0, 0.0, -5.0, 1.0], 0, 0.999999),
    "hidden tokens": ([-INFINITY, 1.0, -INFINITY, 0.5], 3, 1.0),
    "hidden tokens, by mass": ([-INFINITY, 1.0, -INFINITY, 0.5], 0, 0.7),
    "the smallest share": ([1.0, 3.0, 3.0, 2.0], 0, 1e-9),
    "the largest share": ([1.0, 3.0, 3.0, 2.0], 0, 1.0 - 2.0**-24),
    "on a quarter": ([5.0] * 4, 0, 0.25),
    "past a quarter": ([5.0] * 4, 0, 0.25 + 2.0**-25),
    "neighbouring floats": ([1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0], 2, 1.0),
    "k is one": ([4.0, 7.0, 7.0, 1.0], 1, 0.5),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_truncation_at_its_edges(name: str, device: str, small_blocks: None) -> None:
    logits, top_k, top_p = EXTREMES[name]
    assert_same_kept(
        torch.tensor([logits], device=device),
        torch.tensor([top_k], device=device),
        torch.tensor([top_p], device=device),
    )


def test_masses_are_the_same_integers_everywhere(device: str) -> None:
    """All of a kernel's masses, through the list that it makes of a flat row's tokens."""
    generator = torch.Generator().manual_seed(4)
    differences = -30 * torch.rand(4000, generator=generator)
    edges = torch.tensor([0.0, -0.0, -1e-9, -27.7, -27.8, -1e3, -INFINITY, NAN])
    differences = torch.cat((differences, edges)).to(device)
    found = torch.empty(len(differences), dtype=torch.int64, device=device)
    mass_kernel[(1,)](differences, found, len(differences), SIZE=4096, enable_fp_fusion=False)
    assert torch.equal(found, token_mass(differences, torch.zeros(1, device=device)))


@triton.jit
def mass_kernel(x, out, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(out + at, truncation_triton.token_mass(value, 0.0), mask=at < size)


def test_masses_are_right_and_fall_with_the_logit() -> None:
    differences = torch.linspace(-30, 0, 200_001)
    mass = token_mass(differences, torch.zeros(1))
    exact = differences.double().exp() * 2.0**32
    assert (mass.double() - exact).abs().le(exact * 2e-6 + 1).all()
    near = differences > -1
    assert (mass.double() - exact)[near].abs().le(exact[near] * 2e-7).all()
    assert (mass.diff() >= 0).all()
    assert int(token_mass(torch.tensor(7.5), torch.tensor(7.5))) == 2**32
    assert token_mass(torch.tensor([NAN, -INFINITY, INFINITY]), torch.tensor(INFINITY)).tolist() == [0, 0, 0]
    assert int(token_mass(torch.tensor(-27.9), torch.tensor(0.0))) == 0


# -- the program -------------------------------------------------------------------------------------


def test_nothing_that_varies_chooses_the_program() -> None:
    """Rows and strides: Triton would compile 1 and multiples of 16 apart."""
    varying = {*sampling_triton.VARYING}
    for name, signature in sampling_triton.signatures().items():
        kernel = signature.kernel
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
