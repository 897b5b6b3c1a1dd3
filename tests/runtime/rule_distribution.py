# mypy: disable-error-code="no-untyped-call"
"""The distribution of rounds that test a draft's probability: enumerated exactly, and with real
noise.

As in `round_distribution` the real round runs over tables, with a slot for each case. The random
parts are scripted: the drafts, which of them pass their test, and the last token. The weight of a
case is the product of their probabilities. The drafter is the real one, so the stored draft
distributions are the program's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.sampling import draft_verify, philox, sampling
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.round import Round
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import RoundState
from tests.runtime.round_distribution import (
    LIMIT_OF_ERROR,
    Case,
    Enumeration,
    RememberingRunner,
    Script,
    difference,
)
from tests.runtime.target_distribution import PROMPT, VOCAB, Text, TextDistribution, random_drafts

RULES = ("rejection", "block")
NO_WINDOW: Any = None
"""For proposers that read the tokens alone."""


def first_window(state: RoundState) -> Any:
    """Return the window of a round that verified one row of each active slot."""
    return SimpleNamespace(valid=state.active.unsqueeze(-1))


@dataclass(frozen=True)
class RuleCase(Case):
    """A check of one rule. With `drawn` the draft model drafts.

    Else drafts are scripted and certain.
    """

    rule: str = "block"
    drawn: bool = True
    drafter: str = "stranger"
    """Or "target": a drafter with the target's distribution."""


class Passing:
    """Replaces the uniforms: a comparison returns a scripted pattern and records the chances."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern = pattern
        self.chances = pattern.double()

    def __lt__(self, chances: Tensor) -> Tensor:
        self.chances = chances.clamp(0, 1)
        return self.pattern


class DraftScript(Script):
    """Scripted drafts, step by step, with their probability under the drafter."""

    drafts: Tensor

    def begin(self, drafts: Tensor) -> None:
        self.drafts = drafts
        self.step = 0
        self.weight = torch.ones(len(drafts), dtype=torch.float64)

    def draw(self, processed: Tensor, positions: Tensor) -> Tensor:
        token = self.drafts[:, self.step, None]
        self.step += 1
        self.weight = self.weight * processed.softmax(-1).gather(-1, token[..., None])[:, 0, 0]
        return token


class RuleEnumeration(Enumeration):
    """All cases of all rounds in one batch, under one of the rules."""

    def __init__(self, case: RuleCase, table: Tensor) -> None:
        self.rule_case = case
        self.draft_script = DraftScript()
        super().__init__(case, table, self.draft_script)
        self.draft_distribution = random_drafts(len(table))[:, 0]
        proposer = None
        if case.drawn:
            proposer = drafter(self, case.table(50) if case.drafter == "stranger" else table)
            self.sampler.draft_distributions = self.sampler.draft_distributions.double()
        self.round = under_rule(self, proposer, case.rule)
        if proposer is not None and case.ks[0]:
            self.draft_script.begin(self.plans[0][:, 1 : case.ks[0] + 1])
            proposer.draft(case.ks[0], first_window(self.state), self.views, self.needs)
            self.weights *= self.draft_script.weight

    def cases_of(self, k: int) -> Tensor:
        """Return every (num_drafts, drafts, tests passed, last token): [cases, 1 + k + k + 1]."""
        strings = itertools.product(
            range(k + 1), *[range(VOCAB)] * k, *[range(2)] * k, range(VOCAB)
        )
        return torch.tensor(list(strings), dtype=torch.long)

    def run(self, number: int, draft_distribution: Tensor | None = None) -> None:
        """Run one round over every case, and multiply its weight by its probability.

        That is the probability of its tests, its last token and its new drafts.
        """
        case = self.rule_case
        plan = self.plans[number]
        k = case.ks[number]
        later = case.ks[number + 1 :]
        if not case.drawn:
            self.propose(number)
        self.state.num_drafts.copy_(plan[:, 0])
        draft = plan[:, 1 : k + 1]
        pattern = plan[:, k + 1 : 2 * k + 1].bool()
        last = plan[:, -1]
        passing = Passing(pattern)
        drawn = {}

        def draw_last(weights: Tensor, *_: Tensor) -> Tensor:
            drawn["distribution"] = weights / weights.sum(dim=-1, keepdim=True)
            return last

        next_k = later[0] if later and case.drawn else 0
        if later and case.drawn:
            self.draft_script.begin(self.plans[number + 1][:, 1 : next_k + 1])
        with (
            mock.patch.object(draft_verify, "acceptance_uniforms", lambda *_: passing),
            mock.patch.object(draft_verify, "draw_last", draw_last),
        ):
            was_active, old_length = self.launch(k, self.prepare(self.needs, k), next_k)
        tested = torch.arange(k) < self.emitted[:, 1, None]
        chances = (
            torch.where(pattern, passing.chances, 1 - passing.chances) if k else pattern.double()
        )
        self.weights *= torch.where(tested, chances, 0.5).prod(-1)
        self.weights *= drawn["distribution"].gather(1, last[:, None])[:, 0] / (
            k + 1
        )  # num_drafts: uniform
        if next_k:
            self.weights *= self.draft_script.weight
        if not case.drawn:
            for i in range(k):
                self.weights *= self.draft_distribution[self.runner.contexts[:, i], draft[:, i]]
        self._check_bookkeeping(k, was_active, old_length)

    def prepare(self, needs: SamplingSteps, k: int) -> SamplingSteps:
        """Return the sampling steps of the next round; called before each."""
        return needs

    def all_masses(self) -> dict[Text, float]:
        """Run all rounds, and return the probability of each text."""
        for number in range(len(self.case.ks)):
            self.run(number)
        return self.masses()


def drafter(setting: Enumeration, table: Tensor) -> DraftModelProposer:
    """Return a draft model with this table, which stores its distributions."""
    runner = cast(ModelRunner, RememberingRunner(setting.state, table, setting.script, head=False))
    setting.state.draft_limit.fill_(setting.state.max_len)
    setting.sampler.allocate_draft_distributions()
    return DraftModelProposer(setting.sampler, [runner], setting.state.max_len)


def under_rule(setting: Enumeration, proposer: Any, rule: str) -> Round:
    """Return the setting's round under another rule."""
    untyped_setting: Any = setting
    return Round(
        state=untyped_setting.state,
        runner=untyped_setting.runner,
        sampler=untyped_setting.sampler,
        proposer=proposer,
        kernels=setting.round.kernels,
        imposed_acceptance=None,
        verify_rule=rule,
    )


def check_rule(case: RuleCase) -> None:
    """Assert that the rounds, continued by the target, have the target's distribution."""
    table = case.table()
    with torch.inference_mode():
        error = difference(case, table, RuleEnumeration(case, table).all_masses())
    assert error < LIMIT_OF_ERROR, f"the distribution differs by {error:.3g}"


def gumbel_at_once(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return `philox.gumbel` except for the last bits, not row by row, which would take long."""
    return -torch.log(
        -torch.log(philox.uniform(philox.random_bits(seed, position, stream, vocab_size)))
    )


def drawn_texts(rule: str, drawn: bool, slots: int, k: int = 3) -> tuple[Tensor, Tensor, float]:
    """Return how often real rounds generated each text of k + 1 tokens, its probability, and
    acceptance.

    Counts and probabilities [3 ** (k + 1)] are by the text's number. Every slot has a seed of its
    own, and nothing is scripted. The drafter's distribution is far from the target's; acceptance is
    the share of its drafts that were accepted.
    """
    params = SamplingParams(
        temperature=4.0, max_tokens=k + 1
    )  # so flat that every text is expected often
    case = RuleCase((k,), params, seed=21)
    table = case.table()
    setting = Enumeration(case, table.float(), slots=slots)
    state = setting.state
    sampler = setting.sampler
    setting.round.kernels = sampler.kernels = load_kernels("torch")
    sampler.seed.copy_(7919 * torch.arange(slots) + 5)

    def zeros(k: int, *_: object) -> None:
        """Draft token 0 always, without sampling, in place of a drafter."""
        state.draft.fill_(0)
        state.num_drafts.fill_(k)

    certain = SimpleNamespace(store_target_states=lambda *_: None, draft=zeros)
    proposer: Any = (
        drafter(setting, 6 * replace(case, seed=77).table().float()) if drawn else certain
    )
    setting.round = under_rule(setting, proposer, rule)
    tested = accepted = 0
    with (
        torch.inference_mode(),
        mock.patch.object(sampling, "gumbel", gumbel_at_once),
        mock.patch.object(draft_verify, "gumbel", gumbel_at_once),
    ):
        proposer.draft(k, first_window(state), setting.views, setting.needs)
        while state.active.any():
            was_active, _ = setting.launch(k, setting.needs, k)
            emissions = setting.emitted[was_active]
            tested = tested + int(emissions[:, 1].sum())
            accepted = accepted + int(emissions[:, 2].sum())
    texts = state.tokens[:, len(PROMPT) : len(PROMPT) + k + 1]
    text_numbers = (texts * VOCAB ** torch.arange(k + 1)).sum(-1)
    text_masses: defaultdict[Text, float] = defaultdict(float)
    TextDistribution(table, params, k + 1).extend(text_masses, (), 1.0)
    expected = torch.zeros(VOCAB ** (k + 1), dtype=torch.float64)
    for text, mass in text_masses.items():
        expected[sum(token * VOCAB**i for i, token in enumerate(text))] = mass
    return torch.bincount(text_numbers, minlength=len(expected)), expected, accepted / tested
