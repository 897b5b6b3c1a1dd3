"""The proposers by name: the only place that imports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers.assistant import AssistantProposer
from spd.runtime.proposers.base import Beside, ModelProposer, Proposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import NgramProposer
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.sampler import Sampler

Builder = Callable[[EnginePlan, Sampler, Sequence[ModelRunner]], Proposer]


def _lookup(plan: EnginePlan, sampler: Sampler, _: Sequence[ModelRunner] = ()) -> NgramProposer:
    return NgramProposer(sampler.state, sampler.kernels, plan.ngram_min, plan.wishes.ngram_max)


def _by_models(kind: type[ModelProposer]) -> Builder:
    """Build a proposer that drafts by models, with prompt lookup beside them where the plan says so."""

    def build(plan: EnginePlan, sampler: Sampler, runners: Sequence[ModelRunner]) -> Proposer:
        (_, arbitrated), shape = split_spec(plan.spec), plan.shape
        lookup = _lookup(plan, sampler)
        beside = Beside(lookup, shape.model_drafts, plan.copying > 0) if arbitrated else None
        return kind(sampler, runners, shape.draft_ctx, beside)

    return build


BUILDERS: dict[str, Builder] = {
    "ngram": _lookup,
    "draft": _by_models(DraftModelProposer),
    "mtp": _by_models(HeadProposer),
    "eagle3": _by_models(HeadProposer),
    "assistant": _by_models(AssistantProposer),
}
"""Every method of `METHODS` that drafts."""


def build_proposer(plan: EnginePlan, sampler: Sampler, runners: Sequence[ModelRunner]) -> Proposer | None:
    """The proposer that the plan names, with the models that draft; None when nothing is speculated."""
    method, _ = split_spec(plan.spec)
    return None if method == "off" else BUILDERS[method](plan, sampler, runners)
