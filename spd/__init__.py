"""spd: lossless speculative decoding for one person with one machine.

The public names are imported when they are first used: `import spd` costs nothing.
"""
# ruff: noqa: F403, F405

from __future__ import annotations

from typing import TYPE_CHECKING

from spd.lazy_names import make_lazy_getattr
from spd.version import __version__

if TYPE_CHECKING:
    from spd.conversation.chat import chat, stream_chat
    from spd.errors import SpdError
    from spd.formats.demo import demo_folder
    from spd.runtime import *

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
    "chat",
    "demo_folder",
    "make_plan",
    "stream_chat",
]
__dir__ = __all__.copy


_MODULES = {
    "conversation.chat": ["chat", "stream_chat"],
    "errors": ["SpdError"],
    "formats.demo": ["demo_folder"],
    "runtime": __all__,
}
__getattr__ = make_lazy_getattr(__name__, _MODULES)
