"""The proposers by method; no other file imports them."""

from __future__ import annotations

from collections.abc import Sequence

from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers.assistant import AssistantProposer
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.proposers.block import BlockProposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import LookupPool, NgramLookup
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Lookup, Proposer
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
    """Return the proposer of the plan's drafting models; None where no model drafts."""
    method, has_lookup = split_spec(plan.spec)
    if method not in MODEL_PROPOSERS:
        return None
    limit = plan.shape.draft_ctx
    return MODEL_PROPOSERS[method](sampler, runners, limit, has_lookup=has_lookup)


def build_lookup(plan: EnginePlan, sampler: Sampler) -> Lookup | None:
    """Return the plan's prompt lookup, alone or beside a model; None without."""
    method, beside_model = split_spec(plan.spec)
    if method != "ngram" and not beside_model:
        return None
    size = plan.pool_tokens
    return NgramLookup(
        kernels=sampler.kernels,
        shortest=plan.ngram_min,
        longest=plan.config.ngram_max,
        max_model_drafts=plan.shape.model_drafts if beside_model else 0,
        may_draft_more=plan.copy_draft_max > 0,
        pool=LookupPool(size, plan.ngram_min, plan.device) if size else None,
    )
