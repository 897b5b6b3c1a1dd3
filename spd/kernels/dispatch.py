"""Load one of the three sets of kernels by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spd.kernels.interface import Kernels


def load_kernels(
    name: str,
    cache: Callable[[], Path] | None = None,
    token_tiles: Mapping[str, int] | None = None,
    dtype: str = "bfloat16",
) -> Kernels:
    """Return the set of kernels "torch", "triton" or "native".

    cache: returns the folder where the C kernels are compiled; only "native" needs it. token_tiles:
    the widest token tiles of Triton's products, by the name of a weight's dtype. dtype: "bfloat16"
    or "float32", the one that the C kernels are compiled for. Raises NativeUnavailable.
    """
    if name == "native":
        from spd.kernels.native.library import open_library

        assert cache is not None
        return open_library(cache, dtype)
    if name == "triton":
        return _triton_kernels(token_tiles or {})
    from spd.kernels.torch_form import TorchKernels

    return TorchKernels()


def _triton_kernels(token_tiles: Mapping[str, int]) -> Kernels:
    import torch
    from triton import knobs

    from spd.kernels.triton_form import TritonKernels

    # Set explicitly: Triton's own default differs between versions, and changes bits.
    knobs.language.default_fp_fusion = True
    return TritonKernels({getattr(torch, kind): tile for kind, tile in token_tiles.items()})
