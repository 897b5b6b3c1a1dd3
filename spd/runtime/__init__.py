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
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
