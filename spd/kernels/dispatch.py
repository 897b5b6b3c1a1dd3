"""Which form of every operation runs: the torch reference, its Triton twin, or on CPU one compiled from C.

A new kernel is one pair of files and one line here. The native form takes from C what its library has, and
torch's references for the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from spd.kernels.native.library import NativeLibrary

Operation = Callable[..., Any]


class Facts(NamedTuple):
    """How a form differs from the others in what models and rounds must do for it."""

    chunk: int  # positions of a whole chunk of a prompt, which is a program of its own
    tail_rows: int  # of one pass over a prompt where it makes no whole chunk
    rows_alike: bool = (
        False  # a row's bits are the same whatever rows stand beside it, in chunks too
    )
    tries_rows: bool = False  # only trying shows which numbers of rows give the same bits
    host_free: bool = (
        False  # all is launched without a look at lengths, which the device alone knows
    )
    folds_norms: bool = (
        False  # products take the norm before them as squares, its weight in their own
    )
    exact_rotary: bool = False  # cosines and sines are float32, for a rotated head is rounded once
    gathers_rotary: bool = False  # cosines and sines come as the rows' own


FACTS: Mapping[str, Facts] = {
    "torch": Facts(64, 32, tries_rows=True, gathers_rotary=True),
    "native": Facts(256, 256, rows_alike=True),
    "triton": Facts(256, 64, host_free=True, folds_norms=True, exact_rotary=True),
}


TILED = ("linear", "norm_gate_up", "head_logits", "head_sample")
"""The Triton form's operations that take `token_tiles`."""
OPERATIONS = {
    "linear.rows": ("embed", "rms_norm_rows", "norm_residual"),
    "linear.skinny_linear": TILED,
    "linear.head_input": ("head_input", "keep_states"),
    "attention.rotary_store": ("rotary_store",),
    "attention.paged_attention": ("plan_attention", "paged_attention"),
    "latent.mla_attention": ("latent_store", "head_linear", "mla_attention"),
    "experts.moe": ("router_logits", "route", "experts"),
    "recurrent.short_conv": ("short_conv",),
    "recurrent.delta_rule": ("delta_rule", "delta_chunks", "gated_norm"),
    "sampling.sampling": ("sample_rows", "row_laws"),
    "sampling.draft_verify": ("verify_drafts",),
    "round.window": ("round_window", "committed_window", "draft_step", "mark_time"),
    "round.commit": ("round_commit",),
    "round.ngram_lookup": ("ngram_lookup",),
}
"""By STEM: `spd.kernels.STEM` holds an operation's torch form, `spd.kernels.STEM_triton` its twin."""
SUFFIX = {"torch": "", "native": "", "triton": "_triton"}
PACKED = ("linear",)
"""What the C library has under this name takes weights that it packed: layers ask for it there."""


class Kernels:
    """Every operation in one form, by its name; contracts stand with the torch references."""

    def __init__(
        self, name: str, operations: Mapping[str, Operation], native: NativeLibrary | None = None
    ) -> None:
        """native: the native form's products."""
        self.name, self.facts, self.native = name, FACTS[name], native
        self.__dict__.update(operations)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operation: ...


def operation_stems() -> dict[str, str]:
    """Each operation's stem."""
    return {name: stem for stem, names in OPERATIONS.items() for name in names}


def load_kernels(
    name: str,
    cache: Callable[[], Path] | None = None,
    token_tiles: Mapping[str, int] | None = None,
    dtype: str = "bfloat16",
) -> Kernels:
    """The operations in the form `name`: "torch", "triton", or "native", in the folder that `cache` names.

    token_tiles: by the dtype of weights, how wide Triton's may be. dtype: "bfloat16" or "float32", of which
    the native form is. Imports triton for its own only. Raises NativeUnavailable.
    """
    found = {
        operation: getattr(importlib.import_module(f"spd.kernels.{stem}{SUFFIX[name]}"), operation)
        for operation, stem in operation_stems().items()
    }
    if name == "native":
        from spd.kernels.native.library import open_library

        assert cache is not None
        library = open_library(cache, dtype)
        own = [each for each in found if each not in PACKED and hasattr(library, each)]
        return Kernels(name, found | {each: getattr(library, each) for each in own}, library)
    if name == "triton":
        from triton import knobs

        knobs.language.default_fp_fusion = (
            True  # also where Triton's own default is another, or is warned of
        )
    if token_tiles:
        import torch

        widest = {getattr(torch, kind): tile for kind, tile in token_tiles.items()}
        found |= {operation: partial(found[operation], widest=widest) for operation in TILED}
    return Kernels(name, found)
