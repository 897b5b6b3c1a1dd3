"""The sampler: window rows equal single rows bit for bit, truncation by definition, fair draws."""

import functools
import math
from collections.abc import Sequence
from operator import or_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.sampling.sampling import draw_rows, process_rows, truncate
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import RoundState

VOCAB = 37
FALSE_ALARM = (
    1e-6  # Chance that a chi-square test below fails on a right sampler, for a random seed.
)
Slots = Sequence[tuple[Sequence[int], SamplingParams]]
token = st.integers(0, VOCAB - 1)
CHOICES: dict[str, list[float]] = {
    "temperature": [0.0, 0.3, 0.9, 1.0, 1.7],
    "top_k": [0, 1, 3, 20, 100],
    "min_p": [0.0, 0.02, 0.3],
    "top_p": [0.05, 0.5, 0.9, 1.0],
    "repetition_penalty": [1.0, 0.7, 1.3],
    "presence_penalty": [0.0, 0.6, -1.1],
    "frequency_penalty": [0.0, 0.35, -0.2],
}
parameters = st.builds(
    SamplingParams,
    **{name: st.sampled_from(values) for name, values in CHOICES.items()},
    logit_bias=st.lists(st.tuples(token, st.sampled_from([-5.0, 2.5])), max_size=3).map(tuple),
    stop_token_ids=st.lists(token, max_size=3).map(tuple),
    min_tokens=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
)
slot = st.tuples(st.lists(token, min_size=1, max_size=6), parameters)
FOUR = [5.0] * 4
TIED = [2.0, 2.0, 1.0, -1.0]
LAST = [1.0, 3.0, 3.0]
TRUNCATIONS: list[tuple[list[float], dict[str, Any], list[int]]] = [
    # Exactly k, and ties go to the lowest ids.
    ([0.0, 1.0, 1.0, 1.0, 1.0, 2.0], {"top_k": 3}, [1, 2, 5]),
    ([3.0] * 9, {"top_k": 4}, [0, 1, 2, 3]),
    (LAST, {"top_k": 1}, [1]),
    (LAST, {"top_k": 50}, [0, 1, 2]),
    (LAST, {"top_k": 0}, [0, 1, 2]),
    (FOUR, {"top_p": 0.25}, [0]),
    (FOUR, {"top_p": 0.26}, [0, 1]),
    (FOUR, {"top_p": 0.5}, [0, 1]),
    (FOUR, {"top_p": 0.75001}, [0, 1, 2, 3]),
    (FOUR, {"top_p": 1e-6}, [0]),
    ([40.0, 0.0, -60.0, 10.0], {"top_p": 1.0}, [0, 1, 2, 3]),
    # Relative to the likeliest.
    (TIED, {"min_p": 1.0}, [0, 1]),
    (TIED, {"min_p": 0.36}, [0, 1, 2]),
    (TIED, {"min_p": 0.37}, [0, 1]),
    ([-90.0, -95.0], {"min_p": 0.0}, [0, 1]),
    # What is hidden already stays so.
    *(
        ([-math.inf, 0.0, -math.inf, 1.0], cut, [1, 3])
        for cut in ({}, {"top_k": 3}, {"top_p": 0.99})
    ),
]


def sampler_of(
    slots: Slots, vocab: int = VOCAB, usable: int = 0, kernels: str = "torch"
) -> Sampler:
    """Return a sampler with slots for these (prompt, parameters)."""
    state = RoundState(slots=len(slots), max_len=64, max_draft=8, pages=1, device="cpu")
    sampler = Sampler(state, vocab, usable or vocab, load_kernels(kernels))
    for slot, (prompt, params) in enumerate(slots):
        ids = torch.tensor(prompt)
        state.admit(slot, ids, 60, len(prompt) + params.min_tokens, list(params.stop_token_ids), 60)
        state.set_active(slot, True)
        sampler.admit(slot, params, ids)
    return sampler


def needs_of(slots: Slots) -> SamplingSteps:
    return functools.reduce(
        or_, (SamplingSteps.from_params(params) for _, params in slots), SamplingSteps()
    )


def process(sampler: Sampler, logits: Tensor, draft: Tensor, needs: SamplingSteps) -> Tensor:
    return process_rows(logits, draft, sampler.sampling_tensors(needs))


def draw(sampler: Sampler, processed: Tensor, positions: Tensor, needs: SamplingSteps) -> Tensor:
    return draw_rows(processed, positions, sampler.sampling_tensors(needs))


def count(sampler: Sampler, tokens: Tensor) -> None:
    assert sampler.generated is not None
    sampler.generated.scatter_add_(
        1, tokens[:, None], torch.ones(len(tokens), 1, dtype=torch.int32)
    )


def normal(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(slot, min_size=1, max_size=3),
    drafts=st.lists(st.lists(token, min_size=3, max_size=3), max_size=5),
    seed=st.integers(0, 2**32),
)
def test_a_window_equals_its_rows_one_by_one(
    slots: Slots, drafts: list[list[int]], seed: int
) -> None:
    """Every row of a verification window equals, bitwise, a single row after committing the drafts."""
    draft = torch.tensor(drafts, dtype=torch.long).view(-1, 3).T[: len(slots)]
    logits = normal(len(slots), draft.shape[1] + 1, VOCAB, seed=seed)
    needs = needs_of(slots)
    positions = torch.tensor([[len(prompt)] for prompt, _ in slots]) + torch.arange(
        draft.shape[1] + 1
    )
    window = sampler_of(slots)
    processed = process(window, logits, draft, needs)
    drawn = draw(window, processed, positions, needs)
    together = sampler_of(slots)
    alone = [sampler_of([request]) for request in slots]
    nothing = torch.zeros(len(slots), 0, dtype=torch.long)
    for row in range(logits.shape[1]):
        single_row = process(together, logits[:, row : row + 1], nothing, needs)
        assert torch.equal(single_row[:, 0], processed[:, row])
        for s, sampler in enumerate(alone):
            own_needs = needs_of(slots[s : s + 1])
            single = process(sampler, logits[s : s + 1, row : row + 1], nothing[:1], own_needs)
            token_alone = draw(sampler, single, positions[s : s + 1, row : row + 1], own_needs)
            assert token_alone[0, 0] == drawn[s, row]  # other slots' needs change no token
        if row < draft.shape[1]:
            for sampler, tokens in [
                (together, draft),
                *((a, draft[s : s + 1]) for s, a in enumerate(alone)),
            ]:
                if sampler.generated is not None:
                    count(sampler, tokens[:, row])
                sampler.state.length += 1


def defined(logits: list[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Return the retained ids in float64, and the distance of the closest decision from its threshold."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))[: top_k or len(logits)]
    weights = [math.exp(logits[v] - logits[order[0]]) for v in order]
    total = math.fsum(weights)
    retained = {order[0]}
    margin = math.inf
    cumulative = 0.0
    for v, weight in zip(order, weights, strict=True):
        if v != order[0]:
            margin = min(
                margin, abs(cumulative - top_p) if top_p < 1 else math.inf, abs(weight - min_p)
            )
            if (top_p >= 1 or cumulative < top_p) and weight >= min_p:
                retained.add(v)
        cumulative += weight / total
    return retained, margin


def retained_ids(
    logits: Sequence[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Return the ids that `truncate` retains of one row, whose logits must be unchanged."""
    row = torch.tensor(logits, dtype=torch.float32)
    result = truncate(
        row.view(1, 1, -1), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    is_retained = result[0, 0] > float("-inf")
    assert torch.equal(result[0, 0][is_retained], row[is_retained])
    return is_retained.nonzero().flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=24),
    min_p=st.sampled_from([0.0, 0.011, 0.11, 0.61, 0.93]),
    **{"top_k": st.integers(0, 30), "top_p": st.floats(0.01, 1.0)},
)
def test_truncation_follows_its_definition(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    """Values are on a coarse grid, so most rows have ties."""
    retained, margin = defined(logits, top_k, top_p, min_p)
    if margin > 1e-5:  # nearer to a threshold, float32 may differ from float64
        assert retained_ids(logits, top_k, top_p, min_p) == sorted(retained)


@pytest.mark.parametrize(("logits", "cut", "retained"), TRUNCATIONS)
def test_truncation_at_its_edges(
    logits: list[float], cut: dict[str, Any], retained: list[int]
) -> None:
    assert retained_ids(logits, **cut) == retained


def draft_all(sampler: Sampler, logits: Tensor, needs: SamplingSteps) -> Tensor:
    """Return the tokens [S, R] that a drafter with logits [S, R, V] draws in its R steps."""
    drafts = []
    runner = SimpleNamespace(sample_in_head=lambda *_, **__: None)
    runner.model = SimpleNamespace(vocab_size=logits.shape[-1])
    for step in range(logits.shape[1]):
        runner.logits = lambda _hidden, step=step: logits[:, step : step + 1]
        drafts.append(sampler.draw_draft(runner, torch.zeros(len(logits), 1, 1), step, needs))  # type: ignore[arg-type]
    return torch.cat(drafts, dim=1)


@settings(max_examples=60, deadline=None)
@given(ties=st.sets(st.integers(0, 4999), min_size=1, max_size=8), noise=st.booleans())
def test_greedy_ties_go_to_the_lowest_id(ties: set[int], noise: bool) -> None:
    """Also next to a sampled slot, where noise is drawn for the batch."""
    greedy = SamplingParams()
    sampled = SamplingParams(temperature=1.0)
    sampler = sampler_of([([0], greedy), ([0], sampled if noise else greedy)], vocab=5000)
    logits = normal(2, 2, 5000, seed=1, scale=0.1).clamp(max=1)
    logits[0, :, list(ties)] = 1.5
    positions = torch.arange(2).expand(2, -1)
    assert (
        draw(sampler, logits, positions, SamplingSteps(noise=noise))[0].tolist() == [min(ties)] * 2
    )


def assert_fair(counts: Tensor, probabilities: Tensor) -> None:
    expected = probabilities.double() * counts.sum()
    assert expected.min() > 20
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    degrees = torch.tensor(len(counts) - 1, dtype=torch.float64)
    tail = torch.special.gammaincc(degrees / 2, torch.tensor(statistic, dtype=torch.float64) / 2)
    assert tail > FALSE_ALARM, statistic  # the tail of the chi-square


@pytest.mark.covers(1)
@pytest.mark.parametrize("seed", [0, 2**62 + 12345])
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    """12,000 draws at consecutive positions, nine tokens: a chi-square of 8 degrees."""
    params = SamplingParams(temperature=temperature, seed=seed)
    sampler = sampler_of([([0], params)], vocab=9)
    needs = SamplingSteps.from_params(params)
    logits = normal(1, 1, 9, seed=3, scale=0.8)
    processed = process(sampler, logits, torch.zeros(1, 0, dtype=torch.long), needs)
    draws = draw(sampler, processed.expand(1, 12_000, 9), torch.arange(12_000)[None], needs)[0]
    probabilities = (logits[0, 0].double() / temperature).softmax(-1)
    assert_fair(torch.bincount(draws, minlength=9), probabilities)
    # Neighbouring positions are independent: pairs of (is token 0, 1 or another), 9 cells, 8 degrees.
    classes = draws.clamp(max=2)
    marginal = torch.stack([probabilities[0], probabilities[1], probabilities[2:].sum()])
    pairs = torch.bincount(classes[0::2] * 3 + classes[1::2], minlength=9)
    assert_fair(pairs, (marginal[:, None] * marginal).flatten())


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafters_vocab", [VOCAB - 6, VOCAB + 6], ids=["narrower", "wider"])
def test_a_drafter_s_own_ids_have_their_bias(
    drafters_vocab: int, temperature: float, kernels: str
) -> None:
    """Every slot has its bias, with embeddings that are padded differently from the target's."""
    if kernels == "triton":
        pytest.importorskip("triton")
    biases = [{"seed": i, "logit_bias": ((3 + 7 * i, 30.0), (35, 40.0))} for i in range(3)]
    slots = [([0], SamplingParams(temperature=temperature, **bias)) for bias in biases]  # type: ignore[arg-type]
    sampler = sampler_of(slots, usable=VOCAB - 4, kernels=kernels)
    needs = needs_of(slots)
    logits = normal(3, 2, drafters_vocab, seed=2)
    logits[..., VOCAB - 4 :] += 1000
    assert draft_all(sampler, logits, needs).tolist() == [[3, 3], [10, 10], [17, 17]]
