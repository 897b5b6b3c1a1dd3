"""The same requests run by two engines and compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import Pass, compare_texts, run_pass
from spd.runtime.lab.prompt_set import EncodedPrompt
from spd.runtime.plan.config import EngineConfig


@dataclass
class Replay:
    """What two engines gave for the same requests."""

    plans: tuple[dict[str, Any], dict[str, Any]]
    tokens: int
    speculated: int  # accepted drafts of the candidate: with none, nothing was tried
    differences: list[dict[str, Any]]


def make_requests(
    questions: Sequence[EncodedPrompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    least: int,
    ignore_eos: bool = False,
) -> list[tuple[str, Request]]:
    """Prompt names and requests: every question at every temperature, with new seeds until the replies
    could hold `least` tokens. Greedy ones are asked once."""
    made: list[tuple[str, Request]] = []
    for number in count():
        for question, temperature in product(questions, temperatures):
            if temperature or not number:
                params = {
                    "temperature": temperature,
                    "max_tokens": max_tokens,
                    "ignore_eos": ignore_eos,
                }
                made.append(
                    (question.prompt.name, question.request(str(len(made)), number, **params))
                )
        if len(made) * max_tokens >= least or not any(temperatures):
            break
    return made


def replay_requests(
    reference: EngineConfig,
    candidate: EngineConfig,
    requests: Sequence[tuple[str, Request]],
    watch: Callable[[str, int], None] = lambda what, ended: None,
) -> Replay:
    """Run the requests with both settings, one engine after the other, and compare every token.

    `watch` is told what runs and how many of its requests have ended; it may raise to end it.
    """
    names = [name for name, _ in requests]
    bare = [request for _, request in requests]

    def run(config: EngineConfig, what: str) -> tuple[dict[str, Any], Pass]:
        engine = Engine(config)
        ran = run_pass(engine, bare, concurrency=config.slots, watch=partial(watch, what))
        engine.close()
        return engine.plan.as_dict(), ran

    plain, expected = run(reference, "reference")
    plan, found = run(candidate, "candidate")
    tokens, differences = compare_texts(names, expected, found)
    return Replay(
        (plain, plan), tokens, sum(record.accepted for record in found.records), differences
    )
