"""The proposers by name: the only place that knows the list."""

from __future__ import annotations

from spd.kernels.dispatch import Kernels
from spd.runtime.model_runner import ModelRunner
from spd.runtime.plan import EnginePlan
from spd.runtime.proposers.base import Proposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.ngram import NgramProposer
from spd.runtime.sampler import Sampler
from spd.runtime.state import RoundState


def build_proposer(
    plan: EnginePlan,
    kernels: Kernels,
    state: RoundState,
    sampler: Sampler,
    draft_runner: ModelRunner | None,
) -> Proposer | None:
    """The proposer that the plan names; None when nothing is speculated."""
    if plan.spec == "ngram":
        return NgramProposer(state, kernels, plan.ngram_min, plan.ngram_max)
    if plan.spec == "draft":
        assert draft_runner is not None
        return DraftModelProposer(state, kernels, draft_runner, sampler, plan.draft_ctx)
    return None
