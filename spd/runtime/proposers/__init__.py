"""The proposers by name: the only place that imports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spd.kernels.dispatch import Kernels
from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers.arbitrated import ArbitratedProposer
from spd.runtime.proposers.base import Lookup, Proposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import NgramProposer
from spd.runtime.round.limits import state_depth
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.state import RoundState


class Parts(NamedTuple):
    """What a proposer is built of; runners: of the models that draft."""

    plan: EnginePlan
    kernels: Kernels
    state: RoundState
    sampler: Sampler
    runners: Sequence[ModelRunner]


def _ngram(p: Parts) -> Lookup:
    return NgramProposer(p.state, p.kernels, p.plan.ngram_min, p.plan.wishes.ngram_max)


def _draft_model(p: Parts) -> Proposer:
    alone = not split_spec(p.plan.spec)[1]
    return DraftModelProposer(
        p.state, p.kernels, p.runners[0], p.sampler, p.plan.shape.draft_ctx, alone=alone
    )


def _head(p: Parts) -> Proposer:
    shape = p.plan.shape
    depth = state_depth(shape.chunk, shape.draft_max, len(p.runners))
    return HeadProposer(p.state, p.kernels, p.runners, p.sampler, shape.draft_ctx, depth)


BUILDERS: Mapping[str, Callable[[Parts], Proposer]] = {
    "ngram": _ngram,
    "draft": _draft_model,
    "mtp": _head,
    "eagle3": _head,
}
"""Every method of `METHODS` that drafts."""


def build_proposer(parts: Parts) -> Proposer | None:
    """The proposer that the plan names; None when nothing is speculated."""
    plan = parts.plan
    if plan.spec == "off":
        return None
    method, arbitrated = split_spec(plan.spec)
    built = BUILDERS[method](parts)
    if not arbitrated:
        return built
    watches, most = plan.copying > 0, plan.shape.model_drafts
    return ArbitratedProposer(built, _ngram(parts), parts.sampler, most, watches=watches)
