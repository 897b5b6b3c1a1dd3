"""The trace of an engine: one record for each round and request. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spd.kernels.round.commit import Emission
    from spd.runtime.engine.sequence import Sequence
    from spd.runtime.plan.plan import EnginePlan
    from spd.runtime.round.round_queue import RoundResult


@dataclass(frozen=True)
class RoundRecord:
    """One request's share of one round; the fields are the keys of a trace file."""

    request: str
    """The id of the request."""
    round: int
    """The number of the request's round, from 0."""
    position: int
    """Position of the first drafted token."""
    method: str
    draft: list[int]
    """Token ids of the drafts that were verified."""
    sampled: list[int]
    """The target's token ids after the window's rows."""
    accepted: int
    """How many leading drafts were accepted."""
    committed: list[int]
    """Token ids that were appended to the text."""
    ms: dict[str, float]
    """Milliseconds of draft, verify, rest, and host, the gap between the round before and this one,
    by the device's clock.
    """
    draft_forwards: int
    k: int
    """Drafts a slot that the round had room for; `draft` may hold fewer."""
    match: int = 0
    """Tokens of the match that prompt lookup took `draft` from.

    0 where a model drafted, or nothing did.
    """


def round_record(
    plan: EnginePlan,
    sequence: Sequence,
    emission: Emission,
    result: RoundResult,
    committed: tuple[int, ...],
) -> RoundRecord:
    """Return the trace's record of one round of a sequence, to which `committed` tokens were appended."""
    draft_seconds, verify_seconds, other_seconds = result.seconds
    draft_ids = emission.draft[: emission.num_drafts]
    # The rules other than "coupled" draw one token a round, and none in the rows after it.
    rows = len(draft_ids) if plan.config.verify == "coupled" else emission.accepted
    return RoundRecord(
        request=sequence.request.id,
        round=sequence.metrics.rounds - 1,
        position=emission.length,
        method=plan.spec,
        draft=draft_ids,
        sampled=emission.sampled[: rows + 1],
        accepted=emission.accepted,
        committed=list(committed),
        ms={
            "draft": round(1000 * draft_seconds, 3),
            "verify": round(1000 * verify_seconds, 3),
            "rest": round(1000 * other_seconds, 3),
            "host": round(1000 * result.gap, 3),
        },
        draft_forwards=result.draft_forwards,
        k=result.k,
        match=emission.match if draft_ids else 0,
    )
