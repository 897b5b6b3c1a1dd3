"""Which form of every operation runs: the torch reference, its Triton twin, or on CPU one compiled from C.

A new kernel is one pair of files and one line here. The native form takes from C what stands in
`NATIVE`, and torch's references for the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

if TYPE_CHECKING:
    from spd.kernels.native.library import NativeLibrary

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Kernels:
    """Every operation in one form, with the stem of its files; contracts stand with the torch references."""

    name: str
    embed: Annotated[Operation, "skinny_linear"]
    norm_linear: Annotated[Operation, "skinny_linear"]
    norm_gate_up: Annotated[Operation, "skinny_linear"]
    linear: Annotated[Operation, "skinny_linear"]
    linear_residual: Annotated[Operation, "skinny_linear"]
    rms_norm_rows: Annotated[Operation, "skinny_linear"]
    norm_residual: Annotated[Operation, "norm_residual"]
    head_logits: Annotated[Operation, "skinny_linear"]
    head_sample: Annotated[Operation, "skinny_linear"]
    rotary_store: Annotated[Operation, "rotary_store"]
    plan_attention: Annotated[Operation, "paged_attention"]
    paged_attention: Annotated[Operation, "paged_attention"]
    prefill_attention: Annotated[Operation, "prefill_attention"]
    latent_store: Annotated[Operation, "mla_attention"]
    head_linear: Annotated[Operation, "mla_attention"]
    mla_attention: Annotated[Operation, "mla_attention"]
    mla_prefill: Annotated[Operation, "mla_attention"]
    router_logits: Annotated[Operation, "moe"]
    route: Annotated[Operation, "moe"]
    experts: Annotated[Operation, "moe"]
    experts_onto: Annotated[Operation, "moe"]
    sample_rows: Annotated[Operation, "sampling"]
    row_laws: Annotated[Operation, "row_laws"]
    rejection_verify: Annotated[Operation, "draft_verify"]
    block_verify: Annotated[Operation, "draft_verify"]
    round_window: Annotated[Operation, "round_window"]
    round_commit: Annotated[Operation, "round_commit"]
    mark_time: Annotated[Operation, "round_finish"]
    ngram_lookup: Annotated[Operation, "ngram_lookup"]
    committed_window: Annotated[Operation, "draft_window"]
    draft_step: Annotated[Operation, "draft_window"]
    head_input: Annotated[Operation, "head_input"]
    keep_states: Annotated[Operation, "head_input"]
    native: NativeLibrary | None = None
    """Of the native form: its products, which take weights that it packed."""


NATIVE = (
    "rms_norm_rows",
    "rotary_store",
    "plan_attention",
    "paged_attention",
    "prefill_attention",
    "latent_store",
    "head_linear",
    "mla_attention",
    "mla_prefill",
    "router_logits",
    "route",
    "sample_rows",
    "ngram_lookup",
)
"""The operations that the native form has of its own."""


def operation_stems() -> dict[str, str]:
    """Each operation's STEM: `spd.kernels.STEM` holds its torch form, `spd.kernels.STEM_triton` its twin."""
    hints = get_type_hints(Kernels, globalns={**globals(), "NativeLibrary": Any}, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def load_kernels(name: str, cache: Callable[[], Path] | None = None) -> Kernels:
    """The operations in the form `name`: "torch", "triton", or "native", in the folder that `cache` names.

    Imports triton for its own only. Raises NativeUnavailable.
    """
    if name == "native":
        from spd.kernels.native.library import open_library

        assert cache is not None
        library = open_library(cache)
        own = {operation: getattr(library, operation) for operation in NATIVE}
        return replace(load_kernels("torch"), name=name, native=library, **own)
    if name == "triton":
        from triton import knobs

        knobs.language.default_fp_fusion = True  # also where Triton's own default is another, or is warned of
    suffix = {"torch": "", "triton": "_triton"}[name]
    found = {
        operation: getattr(importlib.import_module(f"spd.kernels.{stem}{suffix}"), operation)
        for operation, stem in operation_stems().items()
    }
    return Kernels(name, **found)
