"""From a row of the ring to what a request received: stops, text, counters, log-probabilities."""

from __future__ import annotations

from functools import cache

from spd.kernels.round.commit import EMISSION_HEAD, FAILED, STOPPED, read_emission
from spd.runtime.engine.grammar import GrammarError
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.engine.request import Event, TokenLogprob
from spd.runtime.engine.sequence import Sequence
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.round_queue import HostLogprobs, RoundResult

NO_NUMBER = "the model gave no finite number"
DEAD_END = "grammar dead end: no token is allowed, or none has a finite number"
NEVER_BEGAN = "the model stopped before its thinking ended, so the grammar never began"
INCOMPLETE = "the text ended before the {} was complete"

REASONS = (None, "stop", "length", "error")
"""Why a request ends, by the reason that a round gives: GOING_ON, STOPPED, FULL, FAILED."""


def event_of(sequence: Sequence, row: list[int], result: RoundResult, now: float) -> Event:
    """What a round brought a request, whose row of the ring and time of reading in seconds are given.

    The committed tokens are walked in order; the first stop cuts the rest away. At each token stop ids
    come first, then stop strings, then the length limit, so a stop on the last allowed token is a stop.
    """
    _, drafts, matched, committed, why, *_ = row[:EMISSION_HEAD]
    tokens = row[result.first_sample : result.first_sample + committed]
    reason, error, detokenizer = REASONS[why], None, sequence.detokenizer
    spoken = tokens[:-1] if why == STOPPED else tokens  # a stop id has no text
    if sequence.plain:
        text = detokenizer.pass_on(spoken, final=reason is not None)
    else:
        kept, found, error = _walk(sequence, spoken)
        if found is not None:
            tokens, reason = tokens[:kept], found
        shape = sequence.request.grammar
        if shape and sequence.grammar and reason in ("stop", "length") and not sequence.grammar.complete:
            error = INCOMPLETE.format("grammar" if shape.kind == "lark" else shape.kind)
            if reason == "stop" and shape.after not in (None, *sequence.generated, *tokens):
                reason, error = "error", NEVER_BEGAN
        text = detokenizer.take(final=reason is not None)
    if why == FAILED and error is None and reason == "error":
        error = NO_NUMBER if sequence.grammar is None else DEAD_END
    count = len(tokens)
    accepted = matched if matched < count else count
    sequence.commit(tokens, drafts, accepted, now)
    sequence.metrics.draft_n_accepted_raw += matched
    logprobs = () if result.logprobs is None else _logprobs(sequence, result.logprobs, tokens)
    marks = _marks(accepted, count)
    return Event(sequence.request.id, tuple(tokens), text, reason, marks, logprobs, error)


def _walk(sequence: Sequence, tokens: list[int]) -> tuple[int, str | None, str | None]:
    """Follow tokens to a stop string, a grammar's end or its fault: how many count, finish reason, error."""
    grammar = sequence.grammar
    for i, token in enumerate(tokens, 1):
        if sequence.detokenizer.push(token):
            return i, "stop", None
        if grammar is not None:
            try:
                grammar.accept(token)
                if grammar.finished:
                    return i, "stop", None
            except GrammarError as failure:
                return i, "error", str(failure)
    return len(tokens), None, None


@cache
def _marks(accepted: int, count: int) -> tuple[bool, ...]:
    """For each of `count` tokens whether it is one of the accepted drafts, which come first."""
    return (True,) * accepted + (False,) * (count - accepted)


def _logprobs(sequence: Sequence, scores: HostLogprobs, tokens: list[int]) -> tuple[TokenLogprob, ...]:
    """Of a request's tokens, with as many of the likeliest as it wants; none where it wants none."""
    wanted, slot = sequence.request.params.logprobs, sequence.slot
    if wanted is None:
        return ()
    own, values, ids = scores.own[slot], scores.values[slot], scores.ids[slot]
    return tuple(
        TokenLogprob(token, own[i], tuple(zip(ids[i][:wanted], values[i][:wanted], strict=True)))
        for i, token in enumerate(tokens)
    )


def record_of(
    sequence: Sequence,
    row: list[int],
    result: RoundResult,
    tokens: tuple[int, ...],
    plan: EnginePlan,
    other_load: float,
) -> RoundRecord:
    """One line of a trace: what a round did for one request, of which it keeps `tokens`."""
    emission = read_emission(row)
    draft, verify, rest = (round(1000 * s, 3) for s in result.seconds)
    # The other rules draw one token a round, and none in the rows behind it.
    draft_ids = emission.draft[: emission.num_drafts]
    rows = len(draft_ids) if plan.wishes.verify == "coupled" else emission.accepted
    return RoundRecord(
        request=sequence.request.id,
        round=sequence.metrics.rounds - 1,
        position=emission.length,
        method=plan.spec,
        draft=draft_ids,
        sampled=emission.sampled[: rows + 1],
        accepted=emission.accepted,
        committed=list(tokens),
        ms={"draft": draft, "verify": verify, "rest": rest, "host": round(1000 * result.gap, 3)},
        draft_forwards=result.draft_forwards,
        k=result.k,
        match=emission.match if draft_ids else 0,
        other_load=round(other_load, 2),
    )
