# mypy: disable-error-code="no-untyped-call"
"""Exact enumeration of the texts that rounds commit, for `test_runtime_mutants`.

There are three tokens. Every draft string and every string of sampled rows is a case, and the real
round runs once with a slot for each case, over a model that stores the tokens fed to it. The weight
of a case is its probability under target and drafter.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.round.commit import FAILED, FULL, GOING_ON, STOPPED, Emission, read_emission
from spd.kernels.round.window import Rows
from spd.kernels.sampling import sampling
from spd.runtime.layers.base import ModelOutput
from spd.runtime.round.round import Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import RoundState
from tests.helpers import replace_operations
from tests.runtime import target_distribution
from tests.runtime.target_distribution import (
    DRAFT_DISTRIBUTIONS,
    PROMPT,
    VOCAB,
    Text,
    TextDistribution,
    context_numbers,
    random_drafts,
)

PAGE_SIZE = 2
LIMIT_OF_ERROR = 1e-12


class Script:
    """Returns a case's samples in place of every draw, and records the arguments of the draw."""

    samples: Tensor
    processed: Tensor
    positions: Tensor

    def draw(self, processed: Tensor, positions: Tensor) -> Tensor:
        """Return the scripted samples in place of noise and argmax."""
        self.processed = processed
        self.positions = positions
        return self.samples

    def sample_rows(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the real processing around the scripted draw."""
        with mock.patch.object(sampling, "draw_rows", lambda p, at, *_: self.draw(p, at)):
            return sampling.sample_rows(*arguments)


class RememberingRunner:
    """A model that reads its context from the pages alone.

    With `head` it samples itself, by temperature alone.
    """

    def __init__(self, state: RoundState, table: Tensor, script: Script, head: bool) -> None:
        pages = state.page_table.shape[1]
        self.cache = SimpleNamespace(page_size=PAGE_SIZE, has_recurrent_layers=False)
        self.trash_slot = 0
        self.model = SimpleNamespace(vocab_size=VOCAB)
        self.pool = torch.full(((1 + state.slots * pages) * PAGE_SIZE,), -1, dtype=torch.long)
        for position, token in enumerate(PROMPT[:-1]):
            page = state.page_table[:, position // PAGE_SIZE]
            self.pool[page * PAGE_SIZE + position % PAGE_SIZE] = token
        self.table = table
        self.script = script
        self.head = head

    def forward(
        self, rows: Rows, page_table: Tensor, views: object, *, prefix_committed: bool = True
    ) -> ModelOutput:
        assert ((rows.token_ids >= 0) & (rows.token_ids < VOCAB)).all(), (
            "an id beyond the vocabulary was fed"
        )
        assert (rows.kv_slots[~rows.valid] == self.trash_slot).all(), (
            "a row that does not count was kept"
        )
        self.pool[rows.kv_slots] = rows.token_ids
        self.pool[:PAGE_SIZE] = -1
        memory = self.pool.view(-1, PAGE_SIZE)[page_table].flatten(1)
        numbers = context_numbers(memory).gather(1, rows.positions)
        self.contexts = torch.where(rows.valid, numbers, -1)
        return ModelOutput.from_hidden(self.contexts)

    def logits(self, hidden: Tensor, views: object = ()) -> Tensor:
        return self.table[hidden]

    def sample_in_head(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor] | None:
        if not self.head:
            return None
        positions = draw.first.unsqueeze(-1) + draw.step + torch.arange(hidden.shape[1])
        drawn = self.script.draw(self.table[hidden] / draw.temperature.view(-1, 1, 1), positions)
        return drawn, torch.ones_like(drawn, dtype=torch.bool)


PLAIN = SamplingParams(temperature=1.0)
PENALTIES = replace(PLAIN, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
MIN_TOKENS = SamplingParams(temperature=1.0, stop_token_ids=(0,), min_tokens=2)
TRUNCATION = SamplingParams(temperature=1.25, top_k=2, top_p=0.75, min_p=0.125)
EVERYTHING = replace(PENALTIES, temperature=0.5, top_p=0.875, min_p=0.0625, presence_penalty=-0.5)
EVERYTHING = replace(
    EVERYTHING, logit_bias=((0, 1.5), (1, -0.5)), stop_token_ids=(1,), min_tokens=1
)
EVERYTHING = replace(EVERYTHING, max_tokens=4)
STOPS_AND_LIMIT = SamplingParams(temperature=1.0, stop_token_ids=(1,), max_tokens=3)


@dataclass(frozen=True)
class Case:
    """One distribution check: the k of each round, sampling parameters, and the target's seed."""

    ks: tuple[int, ...]
    params: SamplingParams = PLAIN
    seed: int = 0
    masked: bool = False
    odd_drafts: bool = False
    """Ids outside the vocabulary instead of the drafts that equal token 2."""
    head: bool = False
    """True if the model has a head that samples by itself."""

    @property
    def depth(self) -> int:
        """Largest length of a text, its prompt included."""
        return len(PROMPT) + sum(k + 1 for k in self.ks)

    @property
    def horizon(self) -> int:
        reach = self.depth - len(PROMPT)
        return min(reach, self.params.max_tokens or reach)

    def table(self, seed: int = 0, masked: bool | None = None) -> Tensor:
        masked = self.masked if masked is None else masked
        return target_distribution.target_table(self.depth + 1, self.seed + seed, masked)


class Enumeration:
    """All cases of all rounds in one batch, with a slot for each."""

    def __init__(
        self, case: Case, table: Tensor, script: Script | None = None, slots: int = 0
    ) -> None:
        """slots: the number of slots without drafts that replace the cases.

        0: a slot for each case.
        """
        parts = (
            [torch.zeros(slots, 1, dtype=torch.long)]
            if slots
            else [self.cases_of(k) for k in case.ks]
        )
        grid = torch.cartesian_prod(*(torch.arange(len(part)) for part in parts)).view(
            -1, len(parts)
        )
        self.plans = [part[grid[:, i]] for i, part in enumerate(parts)]
        self.case = case
        slots = len(grid)
        params = case.params
        pages = case.depth // PAGE_SIZE + 1
        depth = case.depth
        state = self.state = RoundState(
            slots=slots, max_len=depth + 1, max_draft=max(case.ks), pages=pages, device="cpu"
        )
        state.tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
        state.length.fill_(len(PROMPT))
        state.length_limit.fill_(len(PROMPT) + (params.max_tokens or depth))
        state.min_length.fill_(len(PROMPT) + params.min_tokens)
        if params.stop_token_ids:
            state.stop_ids[:, : len(params.stop_token_ids)] = torch.tensor(params.stop_token_ids)
        state.active.fill_(True)
        shuffled = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(8))
        state.page_table.copy_(1 + shuffled.view(slots, pages))
        self.script = script or Script()
        self.runner = RememberingRunner(state, table, self.script, case.head)
        kernels = replace_operations(load_kernels("torch"), sample_rows=self.script.sample_rows)
        self.sampler = Sampler(state, VOCAB, VOCAB, kernels)
        self.sampler.admit(0, params, torch.tensor(PROMPT))
        for tensor in (*self.sampler.numbers.values(), self.sampler.top_k, self.sampler.bias):
            tensor.copy_(tensor[:1].clone().expand_as(tensor))
        self.sampler.in_prompt[:, list(PROMPT)] = True
        self.round = Round(
            state=state,
            runner=self.runner,  # type: ignore[arg-type]
            sampler=self.sampler,
            proposer=None,
            kernels=kernels,
        )
        self.views = [SlotView(1, ())] * slots
        self.needs = SamplingSteps.from_params(params)
        self.weights = torch.ones(slots, dtype=torch.float64)

    def cases_of(self, k: int) -> Tensor:
        """Return every (num_drafts, drafts, samples) of a round with k drafts: [cases, 1 + k + k + 1]."""
        strings = itertools.product(range(k + 1), *[range(VOCAB)] * (2 * k + 1))
        return torch.tensor(list(strings), dtype=torch.long)

    def propose(self, number: int) -> Tensor:
        """Write the drafts of a round's plan as the drafter would; return them as planned."""
        k = self.case.ks[number]
        plan = self.plans[number]
        self.state.num_drafts.copy_(plan[:, 0])
        draft = plan[:, 1 : k + 1]
        odd = torch.where(draft[:, :1] == 0, -1, 7)
        self.state.draft[:, :k] = torch.where((draft == 2) & self.case.odd_drafts, odd, draft)
        return draft

    def launch(self, k: int, needs: SamplingSteps, next_k: int = 0) -> tuple[Tensor, Tensor]:
        """Run one round; return which slots were active before, and their lengths."""
        state = self.state
        before = (state.active.clone(), state.length.clone())
        place = int(state.counter)
        self.round.run(k, self.views, needs, None, next_k)
        assert int(state.counter) == place + 1, "the ring's row"
        self.emitted = state.ring[place % len(state.ring)]
        return before

    def run(self, number: int, draft_distribution: Tensor) -> None:
        """Run one round over every case, and multiply its weight by its probability."""
        k = self.case.ks[number]
        draft = self.propose(number)
        self.script.samples = script = self.plans[number][:, k + 1 :]
        was_active, started = self.launch(k, self.needs)
        assert torch.equal(self.script.positions, started[:, None] + torch.arange(k + 1)), (
            "noise positions"
        )
        probabilities = self.script.processed.softmax(-1)
        self.weights *= probabilities.gather(-1, script[..., None]).squeeze(-1).prod(-1)
        self.weights /= k + 1  # num_drafts: uniform
        for i in range(k):
            self.weights *= draft_distribution[
                self.runner.contexts[:, i], script[:, i], draft[:, i]
            ]
        self._check_bookkeeping(k, was_active, started)

    def _check_bookkeeping(self, k: int, was_active: Tensor, started: Tensor) -> None:
        """Assert the lengths, activity and finish reason of every possible case, and its emission."""
        state = self.state
        possible = self.weights > 0
        columns: list[Any] = list(self.emitted.unbind(1))
        assert (columns[5] == k).all(), "another k is told"
        emission: Any = read_emission([*columns[:5], k, *columns[6:]])
        committed = emission.committed
        reason = emission.reason
        rows = torch.arange(k + 1)
        assert torch.equal(emission.length, started), "lengths before"
        assert torch.equal(state.length, started + committed), "lengths"
        assert (committed[~was_active] == 0).all(), "a silent slot committed tokens"
        assert (committed[was_active & possible] >= 1).all(), "a round without a token"
        appended = state.tokens.gather(1, started[:, None] + rows)
        same = appended == torch.stack(emission.sampled, dim=1)
        assert (same | (rows >= committed[:, None])).all(), "other tokens are told"
        last = state.tokens.gather(1, state.length[:, None] - 1)
        stops = torch.tensor(self.case.params.stop_token_ids or (-9,))
        expected = torch.where(state.length >= state.length_limit, FULL, GOING_ON)
        expected = torch.where(torch.isin(last[:, 0], stops), STOPPED, expected)
        checked = was_active & possible
        assert torch.equal(reason[checked], expected[checked]), "reasons"
        assert torch.equal(state.active[checked], expected[checked] == GOING_ON), "active"

    def masses(self) -> dict[Text, float]:
        """Return the probability of each committed text."""
        masses: dict[Text, float] = {}
        possible = self.weights > 0
        for length in self.state.length[possible].unique().tolist():
            of_length = possible & (self.state.length == length)
            texts, text_index = self.state.tokens[of_length, len(PROMPT) : length].unique(
                dim=0, return_inverse=True
            )
            sums = torch.zeros(len(texts), dtype=torch.float64).index_add_(
                0, text_index, self.weights[of_length]
            )
            masses |= {
                tuple(text): mass for text, mass in zip(texts.tolist(), sums.tolist(), strict=True)
            }
        return masses


def difference(case: Case, table: Tensor, masses: dict[Text, float]) -> float:
    """Return the largest difference between the distributions of texts of the rounds and of the
    target.

    masses: the probabilities of the committed texts, which the target continues.
    """
    target = TextDistribution(table, case.params, case.horizon)
    expected = defaultdict[Text, float](float)
    actual = defaultdict[Text, float](float)
    target.extend(expected, (), 1.0)
    for text, mass in masses.items():
        target.extend(actual, text, mass)
    assert abs(sum(actual.values()) - 1) < LIMIT_OF_ERROR, (
        "masses do not add up: a row saw what it must not"
    )
    assert len(expected) > 1
    return max(abs(actual[text] - expected[text]) for text in {*actual, *expected})


def check_distribution(case: Case, *draft_distributions: str) -> None:
    """Assert that rounds have the target's distribution under these drafters, by default all."""
    table = case.table()
    for draft_distribution in draft_distributions or DRAFT_DISTRIBUTIONS:
        enumeration = Enumeration(case, table)
        conditional = DRAFT_DISTRIBUTIONS[draft_distribution](len(table))
        with torch.inference_mode():
            for number in range(len(case.ks)):
                enumeration.run(number, conditional)
        error = difference(case, table, enumeration.masses())
        assert error < LIMIT_OF_ERROR, (
            f"{draft_distribution}: the distribution differs by {error:.3g}"
        )


def emission_by_definition(case: Case, plan: Sequence[int], logits: Tensor) -> Emission:
    """Return the emission of a slot after the one round of `case`, by the definition.

    plan: (num_drafts, drafts, samples). logits: those of the slot's rows.
    """
    (k,) = case.ks
    limit = case.params.max_tokens or math.inf
    draft = list(plan[1 : k + 1])
    sampled = list(plan[k + 1 :])
    is_in_vocab = [not case.odd_drafts or token != 2 for token in draft]
    leading = next((i for i in range(k) if not is_in_vocab[i]), k)
    num_drafts = int(min(plan[0], leading, limit - 1))
    accepted = next((i for i in range(num_drafts) if draft[i] != sampled[i]), num_drafts)
    committed = accepted + 1
    reason = GOING_ON
    for i, token in enumerate(sampled[: accepted + 1]):
        if not logits[i, token].isfinite():
            committed = i
            reason = FAILED
            break
        if token in case.params.stop_token_ids:
            committed = i + 1
            reason = STOPPED
            break
    if reason == GOING_ON and committed >= limit:
        reason = FULL
    fed = [token if is_known else 0 for token, is_known in zip(draft, is_in_vocab, strict=True)]
    return Emission(
        length=len(PROMPT),
        num_drafts=num_drafts,
        accepted=accepted,
        committed=committed,
        reason=reason,
        match=0,
        draft=fed,
        sampled=sampled,
    )


def check_emissions(case: Case) -> None:
    """Assert for every case that its emission is the definition's, and that its text is the emitted one."""
    enumeration = Enumeration(case, case.table())
    enumeration.run(0, random_drafts(len(enumeration.runner.table)))
    logits = enumeration.runner.table[enumeration.runner.contexts]
    plans = enumeration.plans[0].tolist()
    texts = enumeration.state.tokens[:, len(PROMPT) :].tolist()
    for s, row in enumerate(enumeration.emitted.tolist()):
        expected = emission_by_definition(case, plans[s], logits[s])
        assert read_emission(row) == expected, "another round is told"
        committed = expected.sampled[: expected.committed]
        assert texts[s] == committed + [0] * (len(texts[s]) - len(committed)), (
            "other tokens are told"
        )
