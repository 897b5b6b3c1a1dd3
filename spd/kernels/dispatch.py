"""Which form of every operation runs: the torch reference or its Triton twin.

A new kernel is one pair of files and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

STEMS = {
    "embed": "skinny_linear",
    "norm_linear": "skinny_linear",
    "norm_gate_up": "skinny_linear",
    "linear": "skinny_linear",
    "linear_residual": "skinny_linear",
    "rms_norm_rows": "skinny_linear",
    "head_logits": "skinny_linear",
    "head_sample": "skinny_linear",
    "rotary_store": "rotary_store",
    "plan_attention": "paged_attention",
    "paged_attention": "paged_attention",
    "prefill_attention": "prefill_attention",
    "sample_rows": "sampling",
    "round_window": "round_window",
    "round_commit": "round_commit",
    "mark_time": "round_finish",
    "ngram_lookup": "ngram_lookup",
    "committed_window": "draft_window",
    "draft_step": "draft_window",
}
"""The module `spd.kernels.STEM`, and `spd.kernels.STEM_triton`, that holds each operation."""


@dataclass(frozen=True)
class Kernels:
    """Every operation in one form; contracts stand with the torch references."""

    name: str
    embed: Callable[..., Any]
    norm_linear: Callable[..., Any]
    norm_gate_up: Callable[..., Any]
    linear: Callable[..., Any]
    linear_residual: Callable[..., Any]
    rms_norm_rows: Callable[..., Any]
    head_logits: Callable[..., Any]
    head_sample: Callable[..., Any]
    rotary_store: Callable[..., Any]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    sample_rows: Callable[..., Any]
    round_window: Callable[..., Any]
    round_commit: Callable[..., Any]
    mark_time: Callable[..., Any]
    ngram_lookup: Callable[..., Any]
    committed_window: Callable[..., Any]
    draft_step: Callable[..., Any]


def load_kernels(name: str) -> Kernels:
    """The operations in the form `name`: "torch" or "triton". Imports triton for the latter only."""
    suffix = {"torch": "", "triton": "_triton"}[name]
    operations = [field.name for field in fields(Kernels) if field.name != "name"]
    return Kernels(
        name,
        **{
            operation: getattr(importlib.import_module(f"spd.kernels.{STEMS[operation]}{suffix}"), operation)
            for operation in operations
        },
    )
