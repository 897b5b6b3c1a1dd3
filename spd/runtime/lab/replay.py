"""The same requests run by two engines and compared token by token; what a difference looks like.

Coupled verification and T = 0 promise the same tokens. Where they differ, the margin between the two tokens
tells rounding (a near-tie) from a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from spd.kernels.sampling.philox import STREAM_TARGET, gumbel
from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import Pass, Timeline, parting, run_pass
from spd.runtime.lab.prompt_set import Question
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import MAX_LOGPROBS

NEAR_TIE: Mapping[str, float] = MappingProxyType({"bfloat16": 0.25, "float16": 0.02, "float32": 1e-3})
"""Differences of log-probabilities, times 1 / T, that rounding alone may turn around."""
ARITHMETIC = ("device", "dtype", "quantize", "kernels", "threads", "load")
"""Settings between which equal bits are not promised."""


@dataclass
class Replay:
    """What two engines gave for the same requests."""

    plans: tuple[dict[str, Any], dict[str, Any]]
    texts: int
    tokens: int
    speculated: int  # accepted drafts of the candidate: with none, nothing was tried
    differences: list[dict[str, Any]]


Watch = Callable[[str, int, int], None]
"""Told what runs, how many of its requests have ended, and how many there are; may raise to end it."""


def make_requests(
    questions: Sequence[Question],
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
                params = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
                made.append((question.prompt.name, question.request(str(len(made)), number, **params)))
        if len(made) * max_tokens >= least or not any(temperatures):
            break
    return made


def replay_requests(
    reference: EngineConfig,
    candidate: EngineConfig,
    requests: Sequence[tuple[str, Request]],
    watch: Watch = lambda what, ended, asked: None,
) -> Replay:
    """Run the requests with both settings, one engine after the other, and compare every token."""
    plans: list[dict[str, Any]] = []
    bare = [request for _, request in requests]

    def run(config: EngineConfig, what: str) -> Pass:
        engine = Engine(config)
        plans.append(engine.plan.as_dict())
        ran = run_pass(
            engine, bare, concurrency=config.slots, watch=lambda ended: watch(what, ended, len(bare))
        )
        engine.close()
        return ran

    expected, found = run(reference, "reference"), run(candidate, "candidate")
    names = (name for name, _ in requests)
    lines = list(zip(names, expected.timelines, found.timelines, strict=True))
    whole = attrgetter("token_ids", "finish_reason")
    parted = [(name, a, b) for name, a, b in lines if whole(a) != whole(b)]
    differences = []
    if parted:
        engine = Engine(replace(reference, slots=1))
        tie = max(NEAR_TIE[plan["dtype"]] for plan in plans)  # the coarser one's rounding
        differences = [_explain(engine, name, a, b, tie) for name, a, b in parted]
        engine.close()
    tokens = sum(max(len(a.token_ids), len(b.token_ids)) for _, a, b in lines)
    speculated = sum(record.accepted for record in found.records)
    return Replay((plans[0], plans[1]), len(bare), tokens, speculated, differences)


def promised_equal(plans: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two plans must give the same bits: nothing that chooses arithmetic differs."""
    return all(plans[0][name] == plans[1][name] for name in ARITHMETIC)


def _explain(engine: Engine, name: str, expected: Timeline, found: Timeline, tie: float) -> dict[str, Any]:
    """Where two texts part: both tokens, and how far apart the reference holds them, which is asked again.

    margin: score of the reference's token over the other's, log-probabilities over T and noise; None when
    the other is not even among the likeliest.
    """
    request = expected.request
    ends = len(expected.token_ids), None, None  # the same text, ended for another reason
    at, a, b = parting(expected.token_ids, found.token_ids) or ends
    margin, near = None, False
    if a is not None and b is not None:
        params = replace(request.params, max_tokens=at + 1, logprobs=MAX_LOGPROBS)
        events = engine.stream([Request("margin", request.prompt_ids, params)])
        entries = [entry for event in events for entry in event.logprobs]
        likely, heat = dict(entries[at].top), params.temperature
        if a in likely and b in likely:
            margin = likely[a] - likely[b]
            if heat:
                draw = torch.tensor([params.seed]), torch.tensor([len(request.prompt_ids) + at])
                noise = gumbel(*draw, STREAM_TARGET, engine.usable_vocab)[0]
                margin = margin / heat + float(noise[a] - noise[b])
            near = abs(margin) <= tie / (heat or 1.0)
    asked = {"prompt": name, "temperature": request.params.temperature, "seed": request.params.seed}
    return {**asked, "position": at, "reference": a, "candidate": b, "margin": margin, "near_tie": near}
