"""The proposers by name: the only place that imports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    limit, arbitrated = p.plan.shape.draft_ctx, split_spec(p.plan.spec)[1]
    return DraftModelProposer(p.state, p.kernels, p.runners[0], p.sampler, limit, alone=not arbitrated)


def _head(p: Parts) -> Proposer:
    shape = p.plan.shape
    depth = state_depth(shape.chunk, shape.draft_max, len(p.runners))
    return HeadProposer(p.state, p.kernels, p.runners, p.sampler, shape.draft_ctx, depth)


BUILDERS: dict[str, Callable[[Parts], Proposer]] = {
    "ngram": _ngram,
    "draft": _draft_model,
    "mtp": _head,
    "eagle3": _head,
}
"""Every method of `METHODS` that drafts."""


def build_proposer(parts: Parts) -> Proposer | None:
    """The proposer that the plan names; None when nothing is speculated."""
    plan, (method, arbitrated) = parts.plan, split_spec(parts.plan.spec)
    built = None if method == "off" else BUILDERS[method](parts)
    if built is None or not arbitrated:
        return built
    watches, most = plan.copying > 0, plan.shape.model_drafts
    return ArbitratedProposer(built, _ngram(parts), parts.sampler, most, watches=watches)
