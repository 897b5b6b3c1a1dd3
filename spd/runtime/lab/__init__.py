"""Measuring, explaining and examining: what the command line asks for, imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Finding": "diagnostics",
    "OK": "diagnostics",
    "Step": "diagnostics",
    "WARNING": "diagnostics",
    "steps": "diagnostics",
    "Explanation": "explain",
    "Trace": "explain",
    "TraceHeader": "explain",
    "explain_traces": "explain:explain",
    "paragraph": "explain",
    "read_trace": "explain",
    "describe_machine": "machine",
    "OWN": "prompt_set",
    "Prompt": "prompt_set",
    "choose": "prompt_set",
    "encode_questions": "prompt_set",
    "read_prompts": "prompt_set",
    "Watch": "replay",
    "make_requests": "replay",
    "promised_equal": "replay",
    "replay_requests": "replay:replay",
    "compare_results": "rows:compare",
    "make_rows": "rows",
    "verdict": "rows",
    "Load": "load",
    "Settings": "sweep",
    "Sweep": "sweep",
    "SweepProgress": "sweep:Progress",
}
"""Names by their module here; behind a colon: their name there."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute or name)
