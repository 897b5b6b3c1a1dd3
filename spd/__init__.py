"""spd: lossless speculative decoding for one person with one machine.

Owns the version and the public names, which are loaded when they are first touched, so that
`import spd` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.errors import SpdError
    from spd.formats.demo import demo_folder
    from spd.runtime import (
        Completion,
        Engine,
        EngineConfig,
        EnginePlan,
        Event,
        Request,
        RequestMetrics,
        RoundRecord,
        SamplingParams,
        make_plan,
    )

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EnginePlan",
    "Event",
    "Request",
    "RequestMetrics",
    "RoundRecord",
    "SamplingParams",
    "SpdError",
    "__version__",
    "demo_folder",
    "make_plan",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'spd' has no attribute {name!r}")
    room = {"SpdError": "spd.errors", "demo_folder": "spd.formats.demo"}.get(name, "spd.runtime")
    return getattr(importlib.import_module(room), name)
