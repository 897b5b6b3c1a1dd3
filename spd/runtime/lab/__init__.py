"""Measuring, explaining and examining: what the command line asks for, imported when first used."""

from __future__ import annotations

from spd.lazy_names import make_lazy_getattr

_NAMES = {
    "api_client": ("ApiClient",),
    "diagnostics": ("Finding", "OK", "Step", "WARNING", "describe_machine", "diagnostic_steps"),
    "explain": (
        "Explanation",
        "Estimate",
        "Trace",
        "TraceHeader",
        "explain_traces",
        "share_interval",
        "summarize",
        "read_trace",
    ),
    "load": ("Load",),
    "prompt_set": ("BUILTIN_PROMPTS", "Prompt", "select_prompts", "encode_prompts", "read_prompts"),
    "replay": ("Replay", "make_requests", "replay_requests"),
    "rows": (
        "DRAFTING_SETTINGS",
        "MACHINE_SETTINGS",
        "compare_results",
        "make_rows",
        "models_of",
        "verdict",
    ),
    "server_check": (
        "LIE_PERIOD",
        "PAIRS",
        "Mode",
        "Question",
        "Replies",
        "ServerCheck",
        "Setting",
        "Target",
        "count_pairs",
        "make_settings",
    ),
    "server_difference": ("TextDifference", "describe_differences"),
    "sweep": ("Settings", "Sweep"),
}
__getattr__ = make_lazy_getattr(__name__, _NAMES)
