"""The engine's public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.runtime.engine.engine import Engine as Engine
    from spd.runtime.engine.grammar import GrammarCompiler as GrammarCompiler
    from spd.runtime.engine.metrics import RequestMetrics as RequestMetrics
    from spd.runtime.engine.metrics import RoundRecord as RoundRecord
    from spd.runtime.engine.request import Completion as Completion
    from spd.runtime.engine.request import Event as Event
    from spd.runtime.engine.request import Request as Request
    from spd.runtime.load.progress import LoadProgress as LoadProgress
    from spd.runtime.load.progress import Progress as Progress
    from spd.runtime.load.quantize import quantization_config as quantization_config
    from spd.runtime.load.quantize import rounded_names as rounded_names
    from spd.runtime.load.quantize import rounded_outputs as rounded_outputs
    from spd.runtime.models import family_layout as family_layout
    from spd.runtime.models.assistant import check_assistant as check_assistant
    from spd.runtime.models.eagle3 import check_eagle3 as check_eagle3
    from spd.runtime.models.mtp_weights import check_source as check_source
    from spd.runtime.models.mtp_weights import module_position_size as module_position_size
    from spd.runtime.models.weights import check_weights as check_weights
    from spd.runtime.plan.config import EngineConfig as EngineConfig
    from spd.runtime.plan.drafter_choice import Drafter as Drafter
    from spd.runtime.plan.drafter_choice import choose_drafter as choose_drafter
    from spd.runtime.plan.machine import foreseen_machine as foreseen_machine
    from spd.runtime.plan.plan import EnginePlan as EnginePlan
    from spd.runtime.plan.plan import drafts_up_to as drafts_up_to
    from spd.runtime.plan.plan import make_plan as make_plan
    from spd.runtime.plan.plan import outline as outline
    from spd.runtime.ranks.crew import start_rank as start_rank
    from spd.runtime.round.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "engine.engine": ("Engine",),
    "engine.grammar": ("GrammarCompiler",),
    "engine.metrics": ("RequestMetrics", "RoundRecord"),
    "engine.request": ("Completion", "Event", "Request"),
    "load.progress": ("LoadProgress", "Progress"),
    "load.quantize": ("quantization_config", "rounded_names", "rounded_outputs"),
    "models": ("family_layout",),
    "models.assistant": ("check_assistant",),
    "models.eagle3": ("check_eagle3",),
    "models.mtp_weights": ("check_source", "module_position_size"),
    "models.weights": ("check_weights",),
    "plan.config": ("EngineConfig",),
    "plan.drafter_choice": ("Drafter", "choose_drafter"),
    "plan.machine": ("foreseen_machine",),
    "plan.plan": ("EnginePlan", "drafts_up_to", "make_plan", "outline"),
    "ranks.crew": ("start_rank",),
    "round.sampling_params": ("SamplingParams",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
