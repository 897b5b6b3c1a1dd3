# mypy: disable-error-code="no-untyped-call"
"""Structured output under the rules that test a draft's probability: the law of the masked target, exactly.

Rounds run over tables as in `rule_law`; the masks and the number of drafts to test come from the program's
own walk along the drafts. Then texts of real engines, which no lag and no neighbour may change.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.runtime.engine.engine import arm
from spd.runtime.engine.grammar import Grammar
from spd.runtime.round.round_queue import RoundQueue
from spd.runtime.round.sampling_params import SamplerClass, SamplingParams
from tests.helpers import make_engine, run_requests
from tests.runtime.round_law import LIMIT_OF_ERROR, difference
from tests.runtime.rule_law import RULES, RuleCase, RuleEnumeration
from tests.runtime.target_law import VOCAB, number_of
from tests.runtime.test_runtime_grammar import fits, requests

MIXED = SamplingParams(temperature=0.75, logit_bias=((0, 0.5),), presence_penalty=0.25)


class Matcher:
    """As much of llguidance's matcher as `Grammar` uses, over a table of what is allowed where."""

    def __init__(self, allowed: Tensor, text: tuple[int, ...]) -> None:
        self.allowed, self.text = allowed, list(text)

    def is_stopped(self) -> bool:
        return False

    is_accepting = is_error = is_stopped

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        bits = sum(1 << v for v in range(VOCAB) if self.allowed[number_of(self.text), v])
        ctypes.c_int32.from_address(pointer).value = bits
        assert size == 4

    def try_consume_tokens(self, tokens: list[int]) -> int:
        (token,) = tokens
        if not self.allowed[number_of(self.text), token]:
            return 0
        self.text.append(token)
        return 1

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]


class GrammarEnumeration(RuleEnumeration):
    """All cases, each slot armed by the program before each round."""

    def __init__(self, case: RuleCase, table: Tensor, allowed: Tensor) -> None:
        self.allowed = allowed
        super().__init__(case, table)

    def prepare(self, needs: SamplerClass, k: int) -> SamplerClass:
        nothing: Any = None
        queue = RoundQueue(self.round, None, nothing, nothing, 0, alone=True)
        for slot in self.state.active.nonzero()[:, 0].tolist():
            text = tuple(self.state.tokens[slot, : int(self.state.length[slot])].tolist())
            grammar = Grammar(Matcher(self.allowed, text), (), (), None)
            sequence: Any = SimpleNamespace(grammar=grammar, slot=slot, waits=False)
            arm(queue, sequence, self.state.draft[slot, :k].tolist(), self.rule_case.rule)
        return dataclasses.replace(needs, grammar=True)


def law_error(case: RuleCase) -> float:
    """How far the rounds' law, continued by the masked target, is from the masked target's own."""
    table, allowed = case.table(), case.table(1, masked=True).isfinite()
    masked = table.masked_fill(~allowed, float("-inf"))
    with torch.inference_mode():
        return difference(case, masked, GrammarEnumeration(case, table, allowed).all_masses())


@pytest.mark.covers(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("ks", [(1,), (2,), (1, 1), pytest.param((3,), marks=pytest.mark.slow)])
def test_rounds_have_the_law_of_the_masked_target(ks: tuple[int, ...], drawn: bool, rule: str) -> None:
    assert law_error(RuleCase(ks, MIXED, seed=4, rule=rule, drawn=drawn)) < LIMIT_OF_ERROR


@pytest.mark.parametrize("rule", RULES)
def test_drafts_cut_away_unseen_are_a_bias(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coupled rule does with a draft that a mask forbids is wrong here, and is seen."""
    monkeypatch.setitem(globals(), "arm", lambda *given, honest=arm: honest(*given[:3], "coupled"))
    assert law_error(RuleCase((2,), seed=4, rule=rule)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_texts_match_whatever_the_lag_and_the_neighbours(tiny: Callable[..., Path], rule: str) -> None:
    """A slot that waits for masks keeps what its drafts were drawn from, while others draft."""
    target, drafter = tiny("qwen3", layers=2, seed=3), tiny("qwen3", layers=1, seed=4)
    wishes: dict[str, Any] = {"spec": "draft", "draft_model": drafter, "draft_max": 3, "verify": rule}
    asked = requests(1.0, 40)
    alone = run_requests(make_engine(target, **wishes), asked)
    for run, request in zip(alone[:3], asked, strict=False):
        assert run.finish_reason == "length" or fits(request.id, run.text)
    assert sum(run.metrics.draft_n_accepted for run in alone[:3]) > 0
    together = run_requests(make_engine(target, slots=4, lag=2, **wishes), asked)
    assert [run.output for run in together] == [run.output for run in alone]
