"""Drafts held against what the draft model says by itself: a cache that leaks costs acceptance silently."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.engine.request import Request
from spd.runtime.lab.replay import Outcome
from spd.runtime.plan.config import EngineConfig, split_spec
from spd.runtime.round.sampling_params import SamplingParams


@dataclass(frozen=True)
class DraftReplay:
    """Rounds whose drafts were drawn again from an empty cache, and how many came out otherwise."""

    rounds: int
    differing: int
    first: str | None


def draft_replay(
    plan: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    rounds: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> DraftReplay | None:
    """Draw the drafts of up to `rounds` rounds again, each with the draft model alone and no cache.

    plan: that of the engine which drafted. None where it has no draft model, or samples drafts with noise
    of their own; drafts that prompt lookup made are left out. The drafter's cache must hold the committed
    tokens' own keys and values, so its drafts are the continuation that the model gives by itself, with
    the same noise.
    """
    if split_spec(plan["spec"])[0] != "draft" or plan["verify"] != "coupled":
        return None
    drafted = [
        (outcome, record)
        for outcome in outcomes
        for record in outcome.rounds
        if record.draft and record.round and not record.match
    ]
    chosen = random.Random(seed).sample(drafted, min(rounds, len(drafted)))
    engine = Engine(
        EngineConfig(
            model=Path(plan["draft_model"]),
            spec="off",
            device=plan["device"],
            dtype=plan["dtype"],
            quantize=plan["quantize"],
            kernels=plan["kernels"],
            threads=plan["threads"],
            load=plan["load"],
            ctx=plan["draft_ctx"],
            prefix_sharing=False,
        )
    )
    differing, first = 0, None
    for outcome, record in chosen:
        check()
        if _drafts_again(engine, outcome, record) != record.draft:
            differing += 1
            first = first or f"request {outcome.request.id}, round {record.round}"
    engine.close()
    return DraftReplay(len(chosen), differing, first)


def _drafts_again(engine: Engine, outcome: Outcome, record: RoundRecord) -> list[int]:
    request = outcome.request
    generated = outcome.token_ids[: record.position - len(request.prompt_ids)]
    prompt = (*request.prompt_ids, *generated)
    params = SamplingParams(
        temperature=request.params.temperature,
        seed=request.params.seed,
        max_tokens=len(record.draft),
        ignore_eos=True,
    )
    spans = (("prompt", len(request.prompt_ids)), ("generated", len(generated)))
    again = Request("again", prompt, params, tuple(span for span in spans if span[1]))
    return [token for event in engine.stream([again]) for token in event.token_ids]
