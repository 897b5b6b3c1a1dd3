"""The engine's public names, imported when first used."""
# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from typing import TYPE_CHECKING

from spd.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from spd.runtime.engine.client import EngineClient, EngineInfo
    from spd.runtime.engine.engine import Engine
    from spd.runtime.engine.grammar import GrammarCompiler
    from spd.runtime.engine.json_schema import (
        Json,
        JsonObject,
        close_objects,
        references,
        without_descriptions,
    )
    from spd.runtime.engine.metrics import RequestMetrics
    from spd.runtime.engine.request import Completion, Event, Request
    from spd.runtime.engine.schema_text import (
        check_text_size,
        closed_schema,
        full_match_pattern,
        is_satisfiable,
        usable_schema,
    )
    from spd.runtime.engine.trace import RoundRecord
    from spd.runtime.load.progress import LoadProgress, Progress
    from spd.runtime.load.quantize import (
        find_rounded_specs,
        quantization_config,
        rounded_checkpoint_tensors,
    )
    from spd.runtime.models import unused_tensors
    from spd.runtime.models.mtp_weights import check_mtp_source, module_position_elements
    from spd.runtime.models.weight_forms import DTYPE_BYTES
    from spd.runtime.plan.config import EngineConfig
    from spd.runtime.plan.drafter_choice import Drafter, choose_drafter, takes_draft_model
    from spd.runtime.plan.machine import machine_from_driver
    from spd.runtime.plan.memory_fit import fit_to_memory, longest_context, with_context
    from spd.runtime.plan.plan import EnginePlan, draft_context, make_plan, resolve_plan
    from spd.runtime.ranks.leader import start_rank_process
    from spd.runtime.round.sampling_params import SamplingParams

_HOMES = {
    "engine.client": ("EngineClient", "EngineInfo"),
    "engine.engine": ("Engine",),
    "engine.grammar": ("GrammarCompiler",),
    "engine.json_schema": (
        "Json",
        "JsonObject",
        "close_objects",
        "references",
        "without_descriptions",
    ),
    "engine.metrics": ("RequestMetrics",),
    "engine.trace": ("RoundRecord",),
    "engine.request": ("Completion", "Event", "Request"),
    "engine.schema_text": (
        "check_text_size",
        "closed_schema",
        "is_satisfiable",
        "usable_schema",
        "full_match_pattern",
    ),
    "load.progress": ("LoadProgress", "Progress"),
    "load.quantize": (
        "quantization_config",
        "find_rounded_specs",
        "rounded_checkpoint_tensors",
    ),
    "models": ("unused_tensors",),
    "models.mtp_weights": ("check_mtp_source", "module_position_elements"),
    "models.weight_forms": ("DTYPE_BYTES",),
    "plan.config": ("EngineConfig",),
    "plan.drafter_choice": ("Drafter", "choose_drafter", "takes_draft_model"),
    "plan.machine": ("machine_from_driver",),
    "plan.memory_fit": ("with_context", "fit_to_memory", "longest_context"),
    "plan.plan": ("EnginePlan", "draft_context", "make_plan", "resolve_plan"),
    "ranks.leader": ("start_rank_process",),
    "round.sampling_params": ("SamplingParams",),
}
__getattr__ = make_lazy_getattr(__name__, _HOMES)
