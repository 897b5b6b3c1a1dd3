"""The proposers by name: the only place that imports them."""

from __future__ import annotations

from collections.abc import Sequence

from spd.kernels.dispatch import Kernels
from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers.arbitrated import ArbitratedProposer
from spd.runtime.proposers.base import Proposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import NgramProposer
from spd.runtime.round.limits import state_depth
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.state import RoundState


def build_proposer(
    plan: EnginePlan,
    kernels: Kernels,
    state: RoundState,
    sampler: Sampler,
    runners: Sequence[ModelRunner],
) -> Proposer | None:
    """The proposer that the plan names, over the models it drafts with; None when nothing is speculated."""
    if plan.spec == "off":
        return None
    method, arbitrated = split_spec(plan.spec)
    lookup = NgramProposer(state, kernels, plan.ngram_min, plan.wishes.ngram_max)
    if method == "ngram":
        return lookup
    model: Proposer
    if method == "draft":
        model = DraftModelProposer(
            state, kernels, runners[0], sampler, plan.shape.draft_ctx, alone=not arbitrated
        )
    else:
        depth = state_depth(plan.shape.chunk, plan.shape.draft_max, len(runners))
        model = HeadProposer(method, state, kernels, runners, sampler, plan.shape.draft_ctx, depth)
    if not arbitrated:
        return model
    return ArbitratedProposer(model, lookup, sampler, plan.shape.model_drafts, watches=plan.copying > 0)
