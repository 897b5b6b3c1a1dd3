# mypy: disable-error-code="no-untyped-call"
"""The law of rounds that test a draft's probability: enumerated exactly, and drawn with the real noise.

As in `round_law` the real round runs over tables, a slot for each case. Scripted are what is random: the
drafts, which of them pass their test, and the last token; each case weighs their probabilities. The
drafter is the real one, so what is kept of its draws is what the program keeps.
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
from tests.runtime.round_law import (
    LIMIT_OF_ERROR,
    Case,
    Enumeration,
    RememberingRunner,
    Script,
    difference,
)
from tests.runtime.target_law import PROMPT, VOCAB, Law, Text, random_drafts

RULES = ("rejection", "block")
NO_WINDOW: Any = None
"""For who looks at the tokens alone."""


def first_window(state: RoundState) -> Any:
    """What a round would have verified of all who take part: a row each."""
    return SimpleNamespace(valid=state.active.unsqueeze(-1))


@dataclass(frozen=True)
class RuleCase(Case):
    """A law check of one rule. With `drawn` the draft model drafts, else drafts are told and certain."""

    rule: str = "block"
    drawn: bool = True
    drafter: str = "stranger"
    """Or "target": a drafter of the target's own law."""


class Passing:
    """Stands for the uniforms: comparing them gives a scripted pattern and records the chances."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern = pattern
        self.chances = pattern.double()

    def __lt__(self, chances: Tensor) -> Tensor:
        self.chances = chances.clamp(0, 1)
        return self.pattern


class DraftScript(Script):
    """Scripted drafts, one step after another, and how probable they were."""

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
    """All cases of all rounds side by side, under one of the rules."""

    def __init__(self, case: RuleCase, table: Tensor) -> None:
        self.rule_case = case
        self.draft_script = DraftScript()
        super().__init__(case, table, self.draft_script)
        self.draft_law = random_drafts(len(table))[:, 0]
        proposer = None
        if case.drawn:
            proposer = drafter(self, case.table(50) if case.drafter == "stranger" else table)
            self.sampler.draft_distributions = self.sampler.draft_distributions.double()
        self.round = ruled(self, proposer, case.rule)
        if proposer is not None and case.ks[0]:
            self.draft_script.begin(self.plans[0][:, 1 : case.ks[0] + 1])
            proposer.draft(case.ks[0], first_window(self.state), self.views, self.needs)
            self.weights *= self.draft_script.weight

    def cases_of(self, k: int) -> Tensor:
        """Every (num_drafts, drafts, tests passed, last token) of a round: [cases, 1 + k + k + 1]."""
        strings = itertools.product(
            range(k + 1), *[range(VOCAB)] * k, *[range(2)] * k, range(VOCAB)
        )
        return torch.tensor(list(strings), dtype=torch.long)

    def run(self, number: int, draft_law: Tensor | None = None) -> None:
        """Run one round over every case, and multiply what its tests, last token and new drafts weigh."""
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
            drawn["law"] = weights / weights.sum(dim=-1, keepdim=True)
            return last

        next_k = later[0] if later and case.drawn else 0
        if later and case.drawn:
            self.draft_script.begin(self.plans[number + 1][:, 1 : next_k + 1])
        with (
            mock.patch.object(draft_verify, "acceptance_uniforms", lambda *_: passing),
            mock.patch.object(draft_verify, "draw_last", draw_last),
        ):
            before = self.launch(k, self.prepare(self.needs, k), next_k)
        tested = torch.arange(k) < self.emitted[:, 1, None]
        chances = (
            torch.where(pattern, passing.chances, 1 - passing.chances) if k else pattern.double()
        )
        self.weights *= torch.where(tested, chances, 0.5).prod(-1)
        self.weights *= drawn["law"].gather(1, last[:, None])[:, 0] / (k + 1)  # num_drafts: uniform
        if next_k:
            self.weights *= self.draft_script.weight
        if not case.drawn:
            for i in range(k):
                self.weights *= self.draft_law[self.runner.contexts[:, i], draft[:, i]]
        self._check_bookkeeping(k, *before)

    def prepare(self, needs: SamplingSteps, k: int) -> SamplingSteps:
        """Called before each round: what its draws need."""
        return needs

    def all_masses(self) -> dict[Text, float]:
        """Of the texts after all rounds."""
        for number in range(len(self.case.ks)):
            self.run(number)
        return self.masses()


def drafter(setting: Enumeration, table: Tensor) -> DraftModelProposer:
    """A draft model of this law, which keeps what it draws from."""
    runner = cast(ModelRunner, RememberingRunner(setting.state, table, setting.script, head=False))
    setting.state.draft_limit.fill_(setting.state.max_len)
    setting.sampler.allocate_draft_distributions()
    return DraftModelProposer(setting.sampler, [runner], setting.state.max_len)


def ruled(setting: Enumeration, proposer: Any, rule: str) -> Round:
    """Its rounds under another rule."""
    whole: Any = setting
    return Round(
        whole.state, whole.runner, whole.sampler, proposer, setting.round.kernels, None, rule
    )


def check_rule(case: RuleCase) -> None:
    """Assert that the rounds' law, continued by the target, is the target's own."""
    table = case.table()
    with torch.inference_mode():
        error = difference(case, table, RuleEnumeration(case, table).all_masses())
    assert error < LIMIT_OF_ERROR, f"the law differs by {error:.3g}"


def gumbel_at_once(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """`philox.gumbel` but for last bits: not row by row, which takes long for so many rows."""
    return -torch.log(
        -torch.log(philox.uniform(philox.random_bits(seed, position, stream, vocab_size)))
    )


def drawn_texts(rule: str, drawn: bool, slots: int, k: int = 3) -> tuple[Tensor, Tensor, float]:
    """How often each text of k + 1 tokens came out of real rounds, what the target gives it, and acceptance.

    Counts and probabilities [3 ** (k + 1)]; every slot has a seed of its own, and nothing is scripted. The
    drafter's law is far from the target's, and the last number is the share of its drafts accepted.
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
        """In place of a drafter, always the same token, of which nothing was drawn."""
        state.draft.fill_(0)
        state.num_drafts.fill_(k)

    certain = SimpleNamespace(tracks_matches=False, capture=lambda *_: None, draft=zeros)
    proposer: Any = (
        drafter(setting, 6 * replace(case, seed=77).table().float()) if drawn else certain
    )
    setting.round = ruled(setting, proposer, rule)
    tested = accepted = 0
    with (
        torch.inference_mode(),
        mock.patch.object(sampling, "gumbel", gumbel_at_once),
        mock.patch.object(draft_verify, "gumbel", gumbel_at_once),
    ):
        proposer.draft(k, first_window(state), setting.views, setting.needs)
        while state.active.any():
            live, _ = setting.launch(k, setting.needs, k)
            told = setting.emitted[live]
            tested = tested + int(told[:, 1].sum())
            accepted = accepted + int(told[:, 2].sum())
    texts = state.tokens[:, len(PROMPT) : len(PROMPT) + k + 1]
    number = (texts * VOCAB ** torch.arange(k + 1)).sum(-1)
    wanted: defaultdict[Text, float] = defaultdict(float)
    Law(table, params, k + 1).extend(wanted, (), 1.0)
    expected = torch.zeros(VOCAB ** (k + 1), dtype=torch.float64)
    for text, mass in wanted.items():
        expected[sum(token * VOCAB**i for i, token in enumerate(text))] = mass
    return torch.bincount(number, minlength=len(expected)), expected, accepted / tested
