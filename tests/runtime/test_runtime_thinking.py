"""A budget of thinking ends it at the same token however the text is made, and leaves everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Request, SamplingParams
from spd.runtime.engine.grammar import Grammar
from spd.runtime.engine.request import GrammarText, ThinkingBudget
from tests.helpers import quick_engine, random_prompts, run_requests

BEGIN, END = 300, 301
PROMPT = random_prompts(1, 12, 256)[0]


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=2, seed=3)


def asked(temperature: float) -> list[Request]:
    """A prompt inside thinking with three budgets, one outside, one with a grammar behind, one without."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    found = [
        Request(f"{n}", PROMPT, params, thinking=ThinkingBudget(n, END, BEGIN, inside=True))
        for n in (0, 1, 7)
    ]
    found.append(Request("outside", PROMPT, params, thinking=ThinkingBudget(0, END)))
    grammar = GrammarText("regex", "[ab]{6}", after=END)
    found.append(
        Request("then", PROMPT, params, grammar=grammar, thinking=ThinkingBudget(3, END, inside=True))
    )
    return [*found, Request("free", PROMPT, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_however_it_is_made(target: Path, temperature: float) -> None:
    runs = run_requests(quick_engine(target), asked(temperature))
    plain = {request.id: run for request, run in zip(asked(temperature), runs, strict=True)}
    free = plain["free"].tokens
    assert END not in free, "else another seed"
    for budget in (0, 1, 7):
        tokens = plain[str(budget)].tokens
        assert tokens[:budget] == free[:budget] and tokens[budget] == END and tokens.count(END) == 1
    assert plain["outside"].tokens == free
    assert plain["then"].tokens[3] == END and plain["then"].finish_reason == "stop"
    assert set(plain["then"].text[-6:]) <= {"a", "b"}
    methods: tuple[dict[str, Any], ...] = (
        {"spec": "ngram", "ngram_min": 1, "draft_max": 3, "lag": int(temperature)},
        {"spec": "draft", "draft_model": target, "draft_max": 4, "lag": 2},
    )
    for wishes in methods:
        runs = run_requests(quick_engine(target, slots=6, **wishes), asked(temperature))
        assert [run.output for run in runs] == [run.output for run in plain.values()], wishes


def test_thinking_ends_where_its_budget_does() -> None:
    """A row that is masked allows the end of thinking alone; a draft that goes on is not legal there."""

    def legal(tokens: list[int], drafts: list[int], budget: int = 2) -> tuple[int, list[int]]:
        state = Grammar(None, budget=ThinkingBudget(budget, END, BEGIN))
        for token in tokens:
            state.accept(token)
        rows = torch.empty(len(drafts) + 1, 10, dtype=torch.int32)
        found = state.masks(drafts, rows)
        only = torch.zeros(10, dtype=torch.int32)
        only[END // 32] = 1 << END % 32
        return found, [i for i in range(found + 1) if torch.equal(rows[i], only)]

    assert legal([], [BEGIN, 1, 2, END]) == (4, [3])
    assert legal([], [BEGIN, 1, 2, 3]) == (3, [3])
    assert legal([5, BEGIN, 1], [2, 3]) == (1, [1])
    assert legal([5, 6], [2, 3]) == (2, [])
    assert legal([BEGIN, END, 1], [2, 3, 4]) == (3, [])
    assert legal([BEGIN], [], budget=0) == (0, [0])
