"""From a round's tensors to what each request received: stops, counters, log-probabilities."""

from __future__ import annotations

import time
from typing import NamedTuple

from spd.kernels.round_commit import FAILED, FULL, STOPPED
from spd.runtime.grammar import Grammar, GrammarError
from spd.runtime.metrics import RoundRecord
from spd.runtime.plan import EnginePlan
from spd.runtime.request import TokenLogprob
from spd.runtime.round_queue import RoundResult
from spd.runtime.sequence import Sequence

NO_NUMBER = "the model gave no finite number"
DEAD_END = "grammar dead end: no token is allowed, or none has a finite number"
NEVER_BEGAN = "the model stopped before its thinking ended, so the grammar never began"


class Outcome(NamedTuple):
    """One slot's share of a round, in host values."""

    length: int
    draft: list[int]
    sampled: list[int]
    accepted: int
    committed: int
    reason: int
    logprobs: tuple[TokenLogprob, ...]


class Settled(NamedTuple):
    """What the request keeps of a round."""

    tokens: list[int]
    drafted: tuple[bool, ...]
    finish_reason: str | None
    error: str | None
    logprobs: tuple[TokenLogprob, ...]


def read_outcomes(result: RoundResult) -> list[Outcome]:
    """What a round did to each slot."""
    outcomes = []
    for s, emission in enumerate(result.emissions):
        logprobs: tuple[TokenLogprob, ...] = ()
        if result.logprobs is not None:
            scores = result.logprobs
            own, values, ids = scores.own[s], scores.values[s], scores.ids[s]
            logprobs = tuple(
                TokenLogprob(emission.sampled[i], own[i], tuple(zip(ids[i], values[i], strict=True)))
                for i in range(emission.committed)
            )
        outcomes.append(
            Outcome(
                emission.length,
                emission.draft[: emission.num_drafts],
                emission.sampled,
                emission.accepted,
                emission.committed,
                emission.reason,
                logprobs,
            )
        )
    return outcomes


def settle(sequence: Sequence, outcome: Outcome) -> Settled:
    """Walk the committed tokens in order; the first stop cuts the rest away.

    At each token stop ids come first, then stop strings, then the length limit, so a stop on the
    last allowed token is a stop.
    """
    tokens, reason, error = _walk(sequence, outcome)
    if reason is None and outcome.reason == FULL:
        reason = "length"
    if reason is None and outcome.reason == FAILED:
        reason, error = "error", NO_NUMBER if sequence.grammar is None else DEAD_END
    if reason == "stop" and sequence.grammar is not None and not sequence.grammar.began:
        reason, error = "error", NEVER_BEGAN
    accepted = min(outcome.accepted, len(tokens))
    _count(sequence, outcome, tokens, accepted)
    wanted = sequence.request.params.logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if wanted is not None:
        logprobs = tuple(TokenLogprob(lp.token_id, lp.logprob, lp.top[:wanted]) for lp in outcome.logprobs)
    drafted = (True,) * accepted + (False,) * (len(tokens) - accepted)
    return Settled(tokens, drafted, reason, error, logprobs[: len(tokens)])


def _walk(sequence: Sequence, outcome: Outcome) -> tuple[list[int], str | None, str | None]:
    """The committed tokens up to a stop or a grammar's fault, and the finish reason and error of that."""
    tokens, detokenizer = outcome.sampled[: outcome.committed], sequence.detokenizer
    stopped = outcome.reason == STOPPED
    spoken = tokens[:-1] if stopped else tokens  # a stop id has no text
    if sequence.grammar is None and not detokenizer.has_stops:
        detokenizer.extend(spoken)
        return tokens, "stop" if stopped else None, None
    for i, token in enumerate(spoken):
        try:
            if detokenizer.push(token) or _completes(sequence.grammar, token):
                return tokens[: i + 1], "stop", None
        except GrammarError as failure:
            return tokens[: i + 1], "error", str(failure)
    return tokens, "stop" if stopped else None, None


def _completes(grammar: Grammar | None, token: int) -> bool:
    """Go on in a grammar by a token; whether nothing may follow it."""
    if grammar is None:
        return False
    grammar.accept(token)
    return grammar.finished


def _count(sequence: Sequence, outcome: Outcome, tokens: list[int], accepted: int) -> None:
    sequence.rounds_read += 1
    sequence.generated += tokens
    now, metrics = time.perf_counter(), sequence.metrics
    if not tokens:
        metrics.count_round(len(outcome.draft), outcome.accepted, accepted)
        return
    metrics.completion_tokens += len(tokens)
    metrics.count_round(len(outcome.draft), outcome.accepted, accepted)
    if sequence.first_token_at is None:
        sequence.first_token_at = now
        metrics.first_token_ms = 1000 * (now - sequence.arrived_at)
    else:
        metrics.tokens_after_first += len(tokens)
        metrics.gaps += 1
        metrics.gap_ms += 1000 * (now - sequence.last_token_at)
        metrics.predicted_ms = 1000 * (now - sequence.first_token_at)
    sequence.last_token_at = now


def record_of(
    sequence: Sequence, outcome: Outcome, result: RoundResult, tokens: list[int], plan: EnginePlan
) -> RoundRecord:
    """One line of a trace: what a round did for one request, of which it keeps `tokens`."""
    draft, verify, rest = (round(1000 * s, 3) for s in result.seconds)
    # The other rules draw one token a round, and none in the rows behind it.
    rows = len(outcome.draft) if plan.verify == "coupled" else outcome.accepted
    return RoundRecord(
        request=sequence.request.id,
        round=sequence.rounds_read - 1,
        position=outcome.length,
        method=plan.spec,
        draft=outcome.draft,
        sampled=outcome.sampled[: rows + 1],
        accepted=outcome.accepted,
        committed=tokens,
        ms={"draft": draft, "verify": verify, "rest": rest, "host": round(1000 * result.gap, 3)},
        draft_forwards=result.draft_forwards,
        k=result.k,
    )
