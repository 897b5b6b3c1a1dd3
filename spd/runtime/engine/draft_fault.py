"""The judgement of a request's drafts at its end: why they did not help, if they did not.

No torch here.
"""

from __future__ import annotations

from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.engine.sequence import Sequence
from spd.runtime.plan.config import METHODS, split_spec
from spd.runtime.plan.plan import EnginePlan

MIN_JUDGED_ROUNDS = 24
"""Rounds from which drafts are judged. With fewer a drafter that works may look like one that does
not: of 24 drafts that are accepted with probability 0.3, one or none is in 2 of 1,000 cases."""
CHANCE_SHARE = 1 / 16
"""The share of accepted first drafts up to which they are about as good as chance."""


def observe_drafts(
    draft_length: DraftLength, sequence: Sequence, k: int, drafts: int, accepted: int, match: int
) -> None:
    """Record how many of a sequence's drafts a round accepted; see `DraftLength.observe`.

    k: the drafts a slot that were drafted. Those that a grammar forced behind them do not count.
    """
    metrics = sequence.metrics
    is_first_round = metrics.completion_tokens <= metrics.first_tokens  # cannot have had drafts
    if is_first_round or not sequence.draft_cap:
        return
    drafts = max(drafts - sequence.forced_drafts, 0)
    draft_length.observe(k, drafts, min(accepted, drafts), sequence.acceptance, match)


def judge_drafts(sequence: Sequence, plan: EnginePlan, length: DraftLength) -> None:
    """Set `draft_fault` and `break_even` of an ended request's metrics, in place, where a model
    drafts.

    They stay as they are after fewer than `MIN_JUDGED_ROUNDS` rounds.
    """
    metrics = sequence.metrics
    request = sequence.request
    if (
        metrics.rounds < MIN_JUDGED_ROUNDS
        or not sequence.draft_cap
        or plan.config.synthetic_acceptance is not None
        or not METHODS[split_spec(plan.spec)[0]].has_weights
    ):
        return
    drafts = max((drafts for drafts, _ in metrics.outcomes), default=0)
    if request.grammar is not None:  # which makes a few rounds longer than those of the drafter
        drafts = round(metrics.draft_n / max(metrics.num_draft_rounds, 1))
    metrics.break_even = length.break_even(drafts or length.maximum)
    first_accepted = sum(metrics.accepted_per_position[:1])
    drafts_little = 2 * metrics.num_draft_rounds < metrics.rounds
    if (
        metrics.num_draft_rounds >= MIN_JUDGED_ROUNDS
        and first_accepted <= CHANCE_SHARE * metrics.num_draft_rounds
    ):
        metrics.draft_fault = "chance"
    elif drafts_little and sequence.length > plan.shape.draft_ctx:
        metrics.draft_fault = "context"
    elif plan.adaptive and request.grammar is None:
        metrics.draft_fault = "cost" if drafts_little else ""
    elif metrics.tokens_per_round < metrics.break_even:
        metrics.draft_fault = "cost"
