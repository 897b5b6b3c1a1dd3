# mypy: disable-error-code="no-untyped-call"
"""The law of rounds that test a draft's probability: enumerated exactly, and drawn with the real noise.

As in `round_law` the real round runs over tables, a slot for each case. Scripted are what is random: the
drafts, which of them pass their test, and the last token; each case weighs their probabilities. The
drafter is the real one, so what is kept of its draws is what the program keeps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.sampling import draft_verify, philox, sampling
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.round import Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplerClass, SamplingParams
from spd.runtime.round.state import RoundState
from tests.runtime.round_law import LIMIT_OF_ERROR, Case, Enumeration, RememberingRunner, Script, difference
from tests.runtime.target_law import PROMPT, VOCAB, Law, Text, random_drafts, target_table

RULES = ("rejection", "block")
NO_WINDOW: Any = None
"""For who looks at the tokens alone."""


def first_window(state: RoundState) -> Any:
    """What a round would have verified of all who take part: a row each."""
    return SimpleNamespace(valid=state.active.unsqueeze(-1))


"""What a draft model, which reads no states of the target, is given."""


@dataclass(frozen=True)
class RuleCase(Case):
    """A law check of one rule. With `drawn` the draft model drafts, else drafts are told and certain."""

    rule: str = "block"
    drawn: bool = True
    drafter: str = "stranger"
    """Or "target": a drafter of the target's own law."""


def enumerate_drafts(k: int) -> Tensor:
    """Every (num_drafts, drafts, tests passed, last token) of a round: [cases, 1 + k + k + 1]."""
    strings = itertools.product(range(k + 1), *[range(VOCAB)] * k, *[range(2)] * k, range(VOCAB))
    return torch.tensor(list(strings), dtype=torch.long)


class Passing:
    """Stands for the uniforms: comparing them gives a scripted pattern and records the chances."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern, self.chances = pattern, pattern.double()

    def __lt__(self, chances: Tensor) -> Tensor:
        self.chances = chances.clamp(0, 1)
        return self.pattern


class DraftScript(Script):
    """Scripted drafts, one step after another, and how probable they were."""

    drafts: Tensor

    def begin(self, drafts: Tensor) -> None:
        self.drafts, self.step, self.weight = drafts, 0, torch.ones(len(drafts), dtype=torch.float64)

    def draw(self, processed: Tensor, positions: Tensor) -> Tensor:
        token = self.drafts[:, self.step, None]
        self.step += 1
        self.weight = self.weight * processed.softmax(-1).gather(-1, token[..., None])[:, 0, 0]
        return token


class RuleEnumeration(Enumeration):
    """All cases of all rounds side by side, under one of the rules."""

    def __init__(self, case: RuleCase, table: Tensor) -> None:
        self.rule_case, self.draft_script = case, DraftScript()
        super().__init__(case, table, enumerate_drafts, self.draft_script)
        state, sampler = self.state, self.sampler
        self.draft_law = random_drafts(len(table))[:, 0]
        proposer = None
        if case.drawn:
            own = target_table(len(PROMPT) + sum(k + 1 for k in case.ks) + 1, case.seed + 50, case.masked)
            own = own if case.drafter == "stranger" else table
            runner = RememberingRunner(state, own, self.script, head=False)
            proposer = DraftModelProposer(sampler, [runner], state.max_len)  # type: ignore[arg-type]
            state.draft_limit.fill_(state.max_len)
            sampler.keep_draft_laws()
            assert sampler.draft_laws is not None
            sampler.draft_laws = sampler.draft_laws.double()
        kernels = self.round.kernels
        self.round = Round(state, self.runner, sampler, proposer, kernels, None, case.rule)  # type: ignore[arg-type]
        if case.drawn and case.ks[0]:
            self.draft_script.begin(self.plans[0][:, 1 : case.ks[0] + 1])
            assert proposer is not None
            views, needs = [SlotView(1, ())] * state.slots, SamplerClass.of(case.params)
            proposer.draft(case.ks[0], first_window(state), views, needs)
            self.weights *= self.draft_script.weight

    def run(self, number: int, draft_law: Tensor | None = None) -> None:
        """Run one round over every case, and multiply what its tests, last token and new drafts weigh."""
        case, plan, state = self.rule_case, self.plans[number], self.state
        k, later = case.ks[number], case.ks[number + 1 :]
        draft, pattern, last = plan[:, 1 : k + 1], plan[:, k + 1 : 2 * k + 1].bool(), plan[:, -1]
        state.num_drafts.copy_(plan[:, 0])
        if not case.drawn:
            odd = torch.where(draft[:, :1] == 0, -1, 7)
            state.draft[:, :k] = torch.where((draft == 2) & case.odd_drafts, odd, draft)
        passing, drawn = Passing(pattern), {}

        def draw_last(weights: Tensor, *_: Tensor) -> Tensor:
            drawn["law"] = weights / weights.sum(dim=-1, keepdim=True)
            return last

        if later and case.drawn:
            self.draft_script.begin(self.plans[number + 1][:, 1 : later[0] + 1])
        started, was_active = state.length.clone(), state.active.clone()
        place, views = int(state.counter), [SlotView(1, ())] * state.slots
        with (
            mock.patch.object(draft_verify, "acceptance_uniforms", lambda *_: passing),
            mock.patch.object(draft_verify, "draw_last", draw_last),
        ):
            next_k = later[0] if later and case.drawn else 0
            needs = self.prepare(SamplerClass.of(case.params), k)
            self.round.run(k, views, needs, None, next_k)
        self.emitted = state.ring[place % len(state.ring)]
        real = self.emitted[:, 1]
        tested = torch.arange(k) < real[:, None]
        chances = torch.where(pattern, passing.chances, 1 - passing.chances) if k else pattern.double()
        self.weights *= torch.where(tested, chances, 0.5).prod(-1)
        self.weights *= drawn["law"].gather(1, last[:, None])[:, 0] / (k + 1)  # num_drafts: uniform
        if next_k:
            self.weights *= self.draft_script.weight
        if not case.drawn:
            for i in range(k):
                self.weights *= self.draft_law[self.runner.contexts[:, i], draft[:, i]]
        self._check_bookkeeping(k, started, was_active)

    def prepare(self, needs: SamplerClass, k: int) -> SamplerClass:
        """Called before each round: what its draws need."""
        return needs


def check_rule(case: RuleCase) -> None:
    """Assert that the rounds' law, continued by the target, is the target's own."""
    table = target_table(len(PROMPT) + sum(k + 1 for k in case.ks) + 1, case.seed, case.masked)
    with torch.inference_mode():
        enumeration = RuleEnumeration(case, table)
        for number in range(len(case.ks)):
            enumeration.run(number)
    error = difference(case, table, enumeration.masses())
    assert error < LIMIT_OF_ERROR, f"the law differs by {error:.3g}"


# -- the real noise ------------------------------------------------------------------------------------

TEMPERATURE = 4.0
"""Of the draws below: flat enough that every text of four tokens is expected often enough."""


def gumbel_at_once(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """`philox.gumbel` but for last bits: not row by row, which takes long for so many rows."""
    return -torch.log(-torch.log(philox.uniform(philox.random_bits(seed, position, stream, vocab_size))))


class CertainDrafts:
    """A proposer that always says the same token and draws nothing."""

    watches = False

    def __init__(self, state: RoundState) -> None:
        self.state = state

    def capture(self, *_: object) -> None:
        """Nothing is wanted of the target."""

    def draft(self, k: int, *_: object) -> None:
        """Propose k zeros."""
        self.state.draft.fill_(0)
        self.state.num_drafts.fill_(k)


def drawn_texts(rule: str, drawn: bool, slots: int, k: int = 3) -> tuple[Tensor, Tensor, float]:
    """How often each text of k + 1 tokens came out of real rounds, what the target gives it, and acceptance.

    Counts and probabilities [3 ** (k + 1)]; every slot has a seed of its own, and nothing is scripted. The
    drafter's law is far from the target's, and the last number is the share of its drafts accepted.
    """
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=k + 1)
    case = RuleCase((k,), params, seed=21, rule=rule, drawn=drawn)
    table = target_table(len(PROMPT) + k + 3, case.seed, False)
    setting = Enumeration(case, table.float(), lambda _: torch.zeros(slots, 1, dtype=torch.long))
    state, sampler, kernels = setting.state, setting.sampler, load_kernels("torch")
    sampler.kernels = kernels
    sampler.seed.copy_(7919 * torch.arange(slots) + 5)
    proposer: DraftModelProposer | CertainDrafts = CertainDrafts(state)
    if drawn:
        own = 6 * target_table(len(PROMPT) + k + 3, 77, False).float()
        runner = RememberingRunner(state, own, setting.script, head=False)
        proposer = DraftModelProposer(sampler, [runner], state.max_len)  # type: ignore[arg-type]
        state.draft_limit.fill_(state.max_len)
        sampler.keep_draft_laws()
    rounds = Round(state, setting.runner, sampler, proposer, kernels, None, rule)  # type: ignore[arg-type]
    views, needs = [SlotView(1, ())] * slots, SamplerClass.of(params)
    tested = accepted = 0
    with (
        torch.inference_mode(),
        mock.patch.object(sampling, "gumbel", gumbel_at_once),
        mock.patch.object(draft_verify, "gumbel", gumbel_at_once),
    ):
        proposer.draft(k, first_window(state), views, needs)
        while state.active.any():
            place, live = int(state.counter), state.active.clone()
            rounds.run(k, views, needs, None, k)
            told = state.ring[place % len(state.ring)][live]
            tested, accepted = tested + int(told[:, 1].sum()), accepted + int(told[:, 2].sum())
    texts = state.tokens[:, len(PROMPT) : len(PROMPT) + k + 1]
    number = (texts * VOCAB ** torch.arange(k + 1)).sum(-1)
    wanted: defaultdict[Text, float] = defaultdict(float)
    Law(table, params, k + 1).extend(wanted, (), 1.0)
    expected = torch.zeros(VOCAB ** (k + 1), dtype=torch.float64)
    for text, mass in wanted.items():
        expected[sum(token * VOCAB**i for i, token in enumerate(text))] = mass
    return torch.bincount(number, minlength=len(expected)), expected, accepted / tested
