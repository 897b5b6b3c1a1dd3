"""Whose arithmetic runs a model: Triton's on a GPU, C's on a CPU with the instructions, torch's elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from spd.errors import IncompatibleError, ResourceError
from spd.formats.hub import own_cache
from spd.kernels.native.build import LARGEST_HEAD, NativeUnavailable, obstacle
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.plan.machine import Machine

OLDEST_CAPABILITY = (8, 0)
"""Of a GPU that multiplies bfloat16 and has the shared memory that the kernels count on."""


def native_obstacle(machine: Machine, dtype: str, quantize: str, layers: Iterable[LayerLayout]) -> str | None:
    """What keeps the C kernels from running models of these layers; nothing is compiled for an answer."""
    if not machine.on_cpu:
        return "they are a CPU's"
    if dtype != "bfloat16":
        return f"they multiply bfloat16, not {dtype}"
    if quantize != "none":
        return f"they know no {quantize} weights"
    largest = max((layer.attention.heads[2] for layer in layers), default=0)
    if largest > LARGEST_HEAD:
        return f"heads of {largest} are too large for them"
    return obstacle()


def choose_kernels(
    wish: str, machine: Machine, dtype: str, quantize: str, layers: Iterable[LayerLayout]
) -> tuple[str, str]:
    """The form of the kernels and why. Raises ResourceError, IncompatibleError for what cannot be."""
    if wish == "torch":
        return wish, "asked for"
    if wish == "native" or (wish == "auto" and machine.on_cpu):
        return _native(wish, native_obstacle(machine, dtype, quantize, layers), compiled=not machine.foreseen)
    if not machine.foreseen and find_spec("triton") is None:
        if wish == "auto":
            return "torch", "triton is not installed"
        raise ResourceError("--kernels triton, but triton is not installed", fix=["--kernels torch"])
    if not machine.on_cpu:
        if machine.capability >= OLDEST_CAPABILITY or machine.capability == (0, 0):
            return "triton", "a GPU's"
        found = (*OLDEST_CAPABILITY, *machine.capability)
        why = "Triton's need a GPU of sm_{}{}, and this one is sm_{}{}".format(*found)
        if wish == "auto":
            return "torch", why
        raise IncompatibleError(
            "--kernels triton cannot run on this GPU", reason=[f"{why}."], fix=["--kernels auto"]
        )
    if not _interpreted():
        raise ResourceError(
            "--kernels triton needs a CUDA device",
            reason=["Without one they run only in Triton's interpreter: set TRITON_INTERPRET=1 (very slow)."],
            fix=["--kernels torch"],
        )
    if dtype == "bfloat16":
        raise IncompatibleError(
            "Triton's interpreter gets bfloat16 products wrong", fix=["--dtype float32", "--kernels torch"]
        )
    return "triton", "asked for"


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _native(wish: str, why_not: str | None, compiled: bool) -> tuple[str, str]:
    if why_not is None and not compiled:
        return "native", "foreseen"
    if why_not is None:
        from spd.kernels.native.library import open_library

        try:
            return "native", f"compiled for this processor's {open_library(own_cache).instructions}"
        except NativeUnavailable as error:
            why_not = str(error)
    if wish == "native":
        raise IncompatibleError(
            "--kernels native cannot run this here", reason=[f"{why_not}."], fix=["--kernels auto"]
        )
    return "torch", f"not the C kernels: {why_not}"
