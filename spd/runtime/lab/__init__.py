"""Measuring, explaining and examining: what the command line asks for, imported when first used."""

from __future__ import annotations

from spd.lazy_names import lazily

_NAMES = {
    "diagnostics": ("Finding", "OK", "Step", "WARNING", "describe_machine", "steps"),
    "explain": (
        "Explanation",
        "Prospect",
        "Trace",
        "TraceHeader",
        "explain_traces",
        "paragraph",
        "read_trace",
    ),
    "load": ("Load",),
    "prompt_set": ("OWN", "Prompt", "choose", "encode_questions", "read_prompts"),
    "replay": ("make_requests", "replay_requests"),
    "rows": ("DRAFTING", "MACHINE", "compare_results", "make_rows", "models_of", "verdict"),
    "sweep": ("Settings", "Sweep"),
}
__getattr__ = lazily(__name__, _NAMES)
