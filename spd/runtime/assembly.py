"""Puts one engine's parts together from its plan: models, caches, state, sampler, proposer, round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spd.formats.model_config import ModelConfig
from spd.runtime.kv_cache import KvCache
from spd.runtime.loader import load_model
from spd.runtime.model_runner import ModelRunner
from spd.runtime.plan import EnginePlan
from spd.runtime.proposers import build_proposer
from spd.runtime.proposers.base import Proposer
from spd.runtime.round import Round
from spd.runtime.sampler import Sampler
from spd.runtime.state import RoundState


@dataclass(frozen=True)
class Assembly:
    """The device side of one engine."""

    state: RoundState
    runner: ModelRunner
    sampler: Sampler
    proposer: Proposer | None
    round: Round


def _runner(plan: EnginePlan, folder: str, positions: int) -> ModelRunner:
    model = load_model(
        Path(folder), dtype=plan.dtype, device=plan.device, positions=positions, load=plan.load
    )
    cache = KvCache(model, plan.num_pages, plan.page_size, getattr(torch, plan.dtype), plan.device)
    return ModelRunner(model, cache, plan.chunk, plan.device)


def _clock(device: str) -> Callable[[], None]:
    """What to wait for before a time is read: nothing on CPU, where every call returns when it is done."""
    return lambda: None


def assemble(plan: EnginePlan, config: ModelConfig, usable_vocab: int) -> Assembly:
    """Load and allocate everything that the plan names."""
    runner = _runner(plan, plan.model, plan.ctx)
    draft_runner = (
        _runner(plan, plan.draft_model, plan.draft_ctx) if plan.spec == "draft" and plan.draft_model else None
    )
    pages = -(-(plan.ctx + plan.page_size) // 512) * (512 // plan.page_size)
    state = RoundState(plan.slots, plan.ctx, plan.draft_max, pages, plan.device)
    sampler = Sampler(state, config.vocab_size, usable_vocab)
    proposer = build_proposer(plan, state, sampler, draft_runner)
    return Assembly(
        state, runner, sampler, proposer, Round(state, runner, sampler, proposer, _clock(plan.device))
    )
