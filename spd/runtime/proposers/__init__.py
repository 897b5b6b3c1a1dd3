"""The proposers by method; no other file imports them."""

from __future__ import annotations

from collections.abc import Sequence

from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers.assistant import AssistantProposer
from spd.runtime.proposers.base import ArbitratedLookup, Lookup, ModelProposer
from spd.runtime.proposers.block import BlockProposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import NgramProposer
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Proposer
from spd.runtime.round.sampler import Sampler

MODEL_PROPOSERS: dict[str, type[ModelProposer]] = {
    "draft": DraftModelProposer,
    "mtp": HeadProposer,
    "eagle3": HeadProposer,
    "assistant": AssistantProposer,
    "block": BlockProposer,
}
"""The proposers of the methods in `METHODS` that draft by models."""


def build_proposer(
    plan: EnginePlan, sampler: Sampler, runners: Sequence[ModelRunner]
) -> Proposer | None:
    """Return the plan's proposer, with the models that draft; None without speculation."""
    method, arbitrated = split_spec(plan.spec)
    shape = plan.shape
    if method == "off":
        return None
    lookup = Lookup(sampler.kernels, plan.ngram_min, plan.config.ngram_max)
    if method == "ngram":
        return NgramProposer(sampler.state, lookup)
    arbitrated_lookup = None
    if arbitrated:
        arbitrated_lookup = ArbitratedLookup(
            lookup, shape.model_drafts, tracks_matches=plan.copy_draft_max > 0
        )
    return MODEL_PROPOSERS[method](sampler, runners, shape.draft_ctx, arbitrated_lookup)
