"""The same requests run by two engines and compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import Difference, Pass, compare_texts, run_pass
from spd.runtime.lab.prompt_set import EncodedPrompt
from spd.runtime.plan.config import EngineConfig

NOTED_REQUESTS = 1000
"""Latest requests that are searched for a note about drafts: an engine forgets the first of many."""


@dataclass
class Replay:
    """The texts of two engines for the same requests, compared."""

    plans: tuple[dict[str, Any], dict[str, Any]]
    tokens: int
    speculated: int  # accepted drafts of the candidate; with none the comparison shows nothing
    differences: list[Difference]
    draft_note: str | None
    """Why the candidate's drafts helped little, as of the first request that says so."""


def make_requests(
    prompts: Sequence[EncodedPrompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    min_tokens: int,
    ignore_eos: bool = False,
) -> list[tuple[str, Request]]:
    """Return prompt names and requests: every prompt at every temperature.

    Repeats with new seeds until the replies could hold `min_tokens`; greedy ones are requested
    once.
    """
    requests: list[tuple[str, Request]] = []
    for number in count():
        for prompt, temperature in product(prompts, temperatures):
            if temperature or not number:
                request = prompt.request(
                    str(len(requests)),
                    number,
                    temperature=temperature,
                    max_tokens=max_tokens,
                    ignore_eos=ignore_eos,
                )
                requests.append((prompt.prompt.name, request))
        if len(requests) * max_tokens >= min_tokens or not any(temperatures):
            break
    return requests


def replay_requests(
    reference: EngineConfig,
    candidate: EngineConfig,
    requests: Sequence[tuple[str, Request]],
    watch: Callable[[str, int], None] = lambda engine_name, ended: None,
) -> Replay:
    """Run the requests with both configurations, one after the other; compare every token.

    watch: called with the engine's name and the number of its requests that have ended; may raise
    to end the run.
    """
    names = [name for name, _ in requests]
    bare_requests = [request for _, request in requests]

    def run(config: EngineConfig, engine_name: str) -> tuple[dict[str, Any], Pass, str | None]:
        """Return the plan of an engine, its pass over the requests, and the note of its drafts."""
        engine = Engine(config)
        engine_pass = run_pass(
            engine, bare_requests, concurrency=config.slots, watch=partial(watch, engine_name)
        )
        engine.close()
        latest = [engine.metrics(request.id) for request in bare_requests[-NOTED_REQUESTS:]]
        notes = (metrics.draft_note(engine.plan.spec) for metrics in latest)
        return engine.plan.as_dict(), engine_pass, next(filter(None, notes), None)

    plain, expected, _ = run(reference, "reference")
    plan, candidate_pass, draft_note = run(candidate, "candidate")
    tokens, differences = compare_texts(names, expected, candidate_pass)
    return Replay(
        (plain, plan),
        tokens,
        sum(record.accepted for record in candidate_pass.records),
        differences,
        draft_note,
    )
