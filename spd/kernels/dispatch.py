"""Which form of every operation runs: the torch reference, its Triton twin, or on CPU one compiled from C.

A new kernel is one pair of files and one line here. The native form takes from C what stands in
`NATIVE`, and torch's references for the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from spd.kernels.native.library import NativeLibrary

Operation = Callable[..., Any]


class Facts(NamedTuple):
    """How a form differs from the others in what models and rounds must do for it."""

    chunk: int  # positions of a whole chunk of a prompt, which is a program of its own
    tail_rows: int  # of one pass over a prompt where it makes no whole chunk
    rows_alike: bool = False  # a row's bits are the same whatever rows stand beside it, in chunks too
    tries_rows: bool = False  # only trying shows which numbers of rows give the same bits
    host_free: bool = False  # all is launched without a look at lengths, which the device alone knows
    folds_norms: bool = False  # products take the norm before them as squares, its weight in their own
    needs_squares: bool = True  # a norm of rows reads the squares beside the stream
    float32_norms: bool = False  # the weights of queries' and keys' norms are float32
    exact_rotary: bool = False  # cosines and sines are float32, for a rotated head is rounded once
    gathers_rotary: bool = False  # cosines and sines come as the rows' own
    any_int8: bool = False  # products take int8 weights of every shape
    merges_experts: bool = False  # few small experts run as one product


FACTS: Mapping[str, Facts] = {
    "torch": Facts(64, 32, tries_rows=True, gathers_rotary=True, merges_experts=True),
    "native": Facts(256, 256, rows_alike=True, needs_squares=False, float32_norms=True),
    "triton": Facts(256, 64, host_free=True, folds_norms=True, exact_rotary=True, any_int8=True),
}


@dataclass(frozen=True)
class Kernels:
    """Every operation in one form, with the stem of its files; contracts stand with the torch references."""

    name: str
    facts: Facts
    embed: Annotated[Operation, "linear.rows"]
    norm_linear: Annotated[Operation, "linear.skinny_linear"]
    norm_gate_up: Annotated[Operation, "linear.skinny_linear"]
    linear: Annotated[Operation, "linear.skinny_linear"]
    linear_residual: Annotated[Operation, "linear.skinny_linear"]
    rms_norm_rows: Annotated[Operation, "linear.rows"]
    norm_residual: Annotated[Operation, "linear.rows"]
    head_logits: Annotated[Operation, "linear.skinny_linear"]
    head_sample: Annotated[Operation, "linear.skinny_linear"]
    rotary_store: Annotated[Operation, "attention.rotary_store"]
    plan_attention: Annotated[Operation, "attention.paged_attention"]
    paged_attention: Annotated[Operation, "attention.paged_attention"]
    prefill_attention: Annotated[Operation, "attention.paged_attention"]
    latent_store: Annotated[Operation, "latent.mla_attention"]
    head_linear: Annotated[Operation, "latent.mla_attention"]
    mla_attention: Annotated[Operation, "latent.mla_attention"]
    mla_prefill: Annotated[Operation, "latent.mla_attention"]
    router_logits: Annotated[Operation, "experts.moe"]
    route: Annotated[Operation, "experts.moe"]
    experts: Annotated[Operation, "experts.moe"]
    experts_onto: Annotated[Operation, "experts.moe"]
    short_conv: Annotated[Operation, "recurrent.short_conv"]
    delta_rule: Annotated[Operation, "recurrent.delta_rule"]
    delta_chunks: Annotated[Operation, "recurrent.delta_chunks"]
    gated_norm: Annotated[Operation, "recurrent.delta_rule"]
    sample_rows: Annotated[Operation, "sampling.sampling"]
    row_laws: Annotated[Operation, "sampling.sampling"]
    rejection_verify: Annotated[Operation, "sampling.draft_verify"]
    block_verify: Annotated[Operation, "sampling.draft_verify"]
    round_window: Annotated[Operation, "round.window"]
    round_commit: Annotated[Operation, "round.commit"]
    mark_time: Annotated[Operation, "round.window"]
    ngram_lookup: Annotated[Operation, "round.ngram_lookup"]
    committed_window: Annotated[Operation, "round.window"]
    draft_step: Annotated[Operation, "round.window"]
    head_input: Annotated[Operation, "linear.head_input"]
    keep_states: Annotated[Operation, "linear.head_input"]
    native: NativeLibrary | None = None
    """Of the native form: its products, which take weights that it packed."""
    token_tiles: Mapping[str, int] = field(default_factory=dict)
    """Of the Triton form: by the dtype that weights are kept in, how wide tiles of tokens may be."""


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
    "short_conv",
    "delta_rule",
    "delta_chunks",
    "gated_norm",
    "sample_rows",
    "ngram_lookup",
)
"""The operations that the native form has of its own."""

TILED = ("norm_linear", "norm_gate_up", "linear", "linear_residual", "head_logits", "head_sample")
"""The Triton form's operations that take `token_tiles`."""


def operation_stems() -> dict[str, str]:
    """Each operation's STEM: `spd.kernels.STEM` holds its torch form, `spd.kernels.STEM_triton` its twin."""
    hints = get_type_hints(Kernels, globalns={**globals(), "NativeLibrary": Any}, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def load_kernels(
    name: str,
    cache: Callable[[], Path] | None = None,
    token_tiles: Mapping[str, int] | None = None,
    dtype: str = "bfloat16",
) -> Kernels:
    """The operations in the form `name`: "torch", "triton", or "native", in the folder that `cache` names.

    dtype: "bfloat16" or "float32", of which the native form is. Imports triton for its own only. Raises
    NativeUnavailable.
    """
    if name == "native":
        from spd.kernels.native.library import open_library

        assert cache is not None
        library = open_library(cache, dtype)
        own = {operation: getattr(library, operation) for operation in NATIVE}
        return replace(load_kernels("torch"), name=name, facts=FACTS[name], native=library, **own)
    if name == "triton":
        from triton import knobs

        knobs.language.default_fp_fusion = True  # also where Triton's own default is another, or is warned of
    suffix = {"torch": "", "triton": "_triton"}[name]
    found = {
        operation: getattr(importlib.import_module(f"spd.kernels.{stem}{suffix}"), operation)
        for operation, stem in operation_stems().items()
    }
    if name == "triton" and token_tiles:
        import torch

        widest = {getattr(torch, kind): tile for kind, tile in token_tiles.items()}
        found |= {operation: partial(found[operation], widest=widest) for operation in TILED}
    return Kernels(name, FACTS[name], token_tiles=token_tiles or {}, **found)
