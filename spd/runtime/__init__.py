"""The engine's public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AsyncEngine": "async_engine",
    "Completion": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "EnginePlan": "plan",
    "make_plan": "plan",
    "Event": "request",
    "Request": "request",
    "SamplingParams": "request",
    "TokenLogprob": "request",
    "RequestMetrics": "metrics",
    "RoundRecord": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
