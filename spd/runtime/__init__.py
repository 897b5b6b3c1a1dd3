"""The engine's public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "Completion": "engine.request",
    "Engine": "engine.engine",
    "EngineConfig": "plan.config",
    "EnginePlan": "plan.plan",
    "make_plan": "plan.plan",
    "Event": "engine.request",
    "Request": "engine.request",
    "SamplingParams": "engine.request",
    "TokenLogprob": "engine.request",
    "RequestMetrics": "engine.metrics",
    "RoundRecord": "engine.metrics",
    "GrammarCompiler": "engine.grammar",
    "cast_pieces": "load.fp8_blocks",
    "LoadProgress": "load.progress",
    "Progress": "load.progress",
    "family_layout": "models",
    "check_eagle3": "models.eagle3",
    "shares_head": "models.eagle3",
    "check_source": "models.mtp_weights",
    "module_position_size": "models.mtp_weights",
    "check_weights": "models.weights",
    "Drafter": "plan.drafter_choice",
    "check_target": "plan.drafter_choice",
    "choose_drafter": "plan.drafter_choice",
    "AS_STORED": "plan.kernel_choice",
    "foreseen_machine": "plan.machine",
    "drafts_up_to": "plan.plan",
    "outline": "plan.plan",
    "start_rank": "ranks.crew",
    "LEADERLESS": "ranks.watch",
    "SILENCE": "ranks.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
