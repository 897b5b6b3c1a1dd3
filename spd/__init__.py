"""spd: lossless speculative decoding for one person with one machine.

Owns the version and the public names, loaded when they are first touched: `import spd` costs nothing.
"""
# ruff: noqa: F403, F405

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.errors import SpdError
    from spd.formats.demo import demo_folder
    from spd.runtime import *

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EnginePlan",
    "Event",
    "Request",
    "RequestMetrics",
]
__all__ += ["RoundRecord", "SamplingParams", "SpdError", "__version__", "demo_folder", "make_plan"]
__dir__ = __all__.copy


def lazily(package: str, homes: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports the module that is the home of a name."""

    def find(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{home}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


_HOMES = {"errors": ["SpdError"], "formats.demo": ["demo_folder"], "runtime": __all__}
__getattr__ = lazily(__name__, _HOMES)
