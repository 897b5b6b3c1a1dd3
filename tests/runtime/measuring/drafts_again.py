"""What costs acceptance and never reaches a text: drafts held against lag 0, and against an empty cache."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spd.runtime import Engine, EngineConfig, Request, RoundRecord, SamplingParams
from spd.runtime.lab.load import Pass, Timeline
from spd.runtime.lab.replay import run_requests
from spd.runtime.plan.config import split_spec


@dataclass(frozen=True)
class Parity:
    """Rounds whose drafts or acceptances are not those of a run that reads every round at once."""

    rounds: int
    differing: int
    first: str | None


def lag_parity(candidate: EngineConfig, ran: Pass) -> Parity:
    """Compare drafts and acceptances, round by round, with the same engine at lag 0.

    A race between host and device never reaches the text, since every token is the target's own draw; it
    costs acceptance, and is found here. Holds where k is fixed.
    """
    _, still = run_requests(replace(candidate, lag=0), [line.request for line in ran.timelines])
    rounds = differing = 0
    first = None
    for line in ran.timelines:
        name = line.request.id
        pairs = [[(r.draft, r.accepted) for r in each.records if r.request == name] for each in (ran, still)]
        longest = max(map(len, pairs))
        rounds += longest
        wrong = [i for i in range(longest) if pairs[0][i : i + 1] != pairs[1][i : i + 1]]
        differing += len(wrong)
        if wrong and first is None:
            first = f"request {name}, round {wrong[0]}"
    return Parity(rounds, differing, first)


@dataclass(frozen=True)
class DraftReplay:
    """Rounds whose drafts were drawn again from an empty cache, and how many came out otherwise."""

    rounds: int
    differing: int
    first: str | None


def draft_replay(
    plan: Mapping[str, Any],
    ran: Pass,
    rounds: int,
    seed: int,
) -> DraftReplay | None:
    """Draw the drafts of up to `rounds` rounds again, each with the draft model alone and no cache.

    plan: that of the engine which drafted. None where it has no draft model, or samples drafts with noise
    of their own; drafts that prompt lookup made are left out. The drafter's cache must hold the committed
    tokens' own keys and values, so its drafts are the continuation that the model gives by itself, with
    the same noise.
    """
    if split_spec(plan["spec"])[0] != "draft" or plan["verify"] != "coupled":
        return None
    lines = {line.request.id: line for line in ran.timelines}
    drafted = [
        (lines[record.request], record)
        for record in ran.records
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
    for line, record in chosen:
        if _drafts_again(engine, line, record) != record.draft:
            differing += 1
            first = first or f"request {record.request}, round {record.round}"
    engine.close()
    return DraftReplay(len(chosen), differing, first)


def _drafts_again(engine: Engine, line: Timeline, record: RoundRecord) -> list[int]:
    request = line.request
    generated = line.token_ids[: record.position - len(request.prompt_ids)]
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
