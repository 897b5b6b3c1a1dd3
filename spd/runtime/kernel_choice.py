"""Whose arithmetic runs a model: Triton's on a GPU, C's on a CPU with the instructions, torch's elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from spd.errors import IncompatibleError, ResourceError
from spd.kernels.native.build import LARGEST_HEAD, NativeUnavailable, obstacle
from spd.runtime.models.layouts import LayerLayout


def native_obstacle(device: str, dtype: str, quantize: str, layers: Iterable[LayerLayout]) -> str | None:
    """What keeps the C kernels from running models of these layers; nothing is compiled for an answer."""
    if device != "cpu":
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
    wish: str,
    device: str,
    dtype: str,
    quantize: str,
    layers: Iterable[LayerLayout],
    cache: Callable[[], Path],
    interpreted: Callable[[], bool],
) -> tuple[str, str]:
    """The form of the kernels and why. Raises ResourceError, IncompatibleError for a wish that cannot be met.

    layers: the model's; cache: where C kernels are kept; interpreted: whether Triton's interpreter is on.
    """
    if wish == "torch":
        return wish, "asked for"
    if wish == "native" or (wish == "auto" and device == "cpu"):
        return _native(wish, native_obstacle(device, dtype, quantize, layers), cache)
    if find_spec("triton") is None:
        if wish == "auto":
            return "torch", "triton is not installed"
        raise ResourceError("--kernels triton, but triton is not installed", fix=["--kernels torch"])
    if device != "cpu":
        return "triton", "a GPU's"
    if not interpreted():
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


def _native(wish: str, why_not: str | None, cache: Callable[[], Path]) -> tuple[str, str]:
    if why_not is None:
        from spd.kernels.native.library import open_library

        try:
            open_library(cache)
        except NativeUnavailable as error:
            why_not = str(error)
    if why_not is None:
        return "native", "compiled for this processor"
    if wish == "native":
        raise IncompatibleError(
            "--kernels native cannot run this here", reason=[f"{why_not}."], fix=["--kernels auto"]
        )
    return "torch", f"not the C kernels: {why_not}"
