"""Which kernels run a model: Triton's on a GPU, C's on a CPU that has the instructions, torch's elsewhere.

And the form in which its weights are kept: from the request, the stored form, and what those kernels know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from spd.errors import IncompatibleError, ResourceError
from spd.formats.checkpoint import FLOAT_DTYPES
from spd.formats.folder import ModelFolder
from spd.formats.hub import spd_cache_folder
from spd.formats.model_config import ModelConfig
from spd.formats.quantized import CODES, Quantization
from spd.kernels.capabilities import INT4_GROUP
from spd.kernels.native.build import (
    DTYPE_FLAGS,
    LARGEST_HEAD,
    NativeUnavailable,
    unavailable_reason,
)
from spd.runtime.models.gguf_forms import packed_specs
from spd.runtime.models.layouts import AttentionLayout, LayerLayout
from spd.runtime.models.weights import (
    STEP,
    WIDE,
    PackedSpec,
    ScaleKind,
    WeightForm,
    int4_form,
)
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.machine import Machine

OLDEST_CAPABILITY = (
    8,
    0,
)  # of a GPU with bfloat16 products and the shared memory that the kernels need
AS_STORED = "as the dtype says"  # why weights are wide that were not quantized
SCALES = {
    "int8": "a scale a row",
    "int4": f"a scale for {INT4_GROUP} columns",
}  # what --quantize makes


def native_obstacle(machine: Machine, dtype: str, layers: Iterable[LayerLayout]) -> str | None:
    """What keeps the C kernels from running models of these layers; nothing is compiled for an answer."""
    if not machine.on_cpu:
        return "they are a CPU's"
    if dtype not in DTYPE_FLAGS:
        return f"they multiply {' and '.join(DTYPE_FLAGS)}, not {dtype}"
    blocks = (layer.attention for layer in layers)
    largest = max(
        (block.heads[2] for block in blocks if isinstance(block, AttentionLayout)), default=0
    )
    if largest > LARGEST_HEAD:
        return f"heads of {largest} are too large for them"
    return unavailable_reason()


def choose_kernels(
    requested: str, machine: Machine, dtype: str, layers: Iterable[LayerLayout]
) -> tuple[str, str]:
    """The form of the kernels and why. Raises ResourceError, IncompatibleError for what cannot be."""
    if requested == "torch":
        return requested, "asked for"
    if requested == "native" or (requested == "auto" and machine.on_cpu):
        return _native(
            requested, native_obstacle(machine, dtype, layers), dtype, machine.from_driver_only
        )
    if not machine.from_driver_only and find_spec("triton") is None:
        if requested == "auto":
            return "torch", "triton is not installed"
        raise ResourceError(
            "--kernels triton, but triton is not installed", fix=["--kernels torch"]
        )
    if not machine.on_cpu:
        if machine.capability >= OLDEST_CAPABILITY or machine.capability == (0, 0):
            return "triton", "a GPU's"
        found = (*OLDEST_CAPABILITY, *machine.capability)
        return _torch_instead(
            requested, "Triton's need a GPU of sm_{}{}, and this one is sm_{}{}".format(*found)
        )
    from triton import knobs

    if not knobs.runtime.interpret:
        reason = [
            "Without one they run only in Triton's interpreter: set TRITON_INTERPRET=1 (very slow)."
        ]
        why = "--kernels triton needs a CUDA device"
        raise ResourceError(why, reason=reason, fix=["--kernels torch"])
    if dtype == "bfloat16":
        why = "Triton's interpreter gets bfloat16 products wrong"
        raise IncompatibleError(why, fix=["--dtype float32", "--kernels torch"])
    return "triton", "asked for"


def _torch_instead(requested: str, why: str) -> tuple[str, str]:
    """Torch's kernels, and why not others. Raises IncompatibleError where others were asked for."""
    if requested == "auto":
        return "torch", why
    why_not = f"--kernels {requested} cannot run this model here"
    raise IncompatibleError(why_not, reason=[f"{why}."], fix=["--kernels auto"])


def _native(requested: str, why_not: str | None, dtype: str, foreseen: bool) -> tuple[str, str]:
    if why_not is None and foreseen:
        return "native", "foreseen"
    if why_not is None:
        from spd.kernels.native.library import open_library

        try:
            return (
                "native",
                f"compiled for this processor's {open_library(spd_cache_folder, dtype).instructions}",
            )
        except NativeUnavailable as error:
            why_not = str(error)
    return _torch_instead(
        requested, why_not if requested == "native" else f"not the C kernels: {why_not}"
    )


def choose_form(
    model: ModelConfig,
    folder: ModelFolder,
    config: EngineConfig,
    machine: Machine,
    kernels: str,
    dtype: str,
) -> tuple[WeightForm, str]:
    """The form of a folder's weights, and why; headers are read where they are quantized, and only there."""
    types = () if folder.gguf is None else folder.gguf.packed_types
    if config.quantize != "none":
        if model.quantization is not None or types:
            reason = [f"The file's tensors are {', '.join(types)}."]
            if model.quantization is not None:
                method = model.quantization.method
                reason = [f"quantization_config in config.json speaks of {method} weights."]
            why = f"--quantize {config.quantize}, but the weights of {folder.path.name} are quantized already"
            raise IncompatibleError(why, reason=reason, fix=["leave --quantize out"])
        why = f"--quantize {config.quantize}: {SCALES[config.quantize]}, made at load"
        rows = config.quantize == "int8"
        form = WeightForm("int8") if rows else int4_form(kernels, dtype)
        return (
            form,
            f"{why}, kept as {dtype}, for these kernels want wide weights" if form.widened else why,
        )
    if model.quantization is not None:
        return _packed(model.quantization, folder, config, kernels, dtype)
    if not types:
        return WIDE, AS_STORED
    return _gguf_form(folder, types, config, kernels)


def _gguf_form(
    folder: ModelFolder, types: Sequence[str], config: EngineConfig, kernels: str
) -> tuple[WeightForm, str]:
    """Return the form of a GGUF file's weights, and why; blocks are kept where kernels multiply them."""
    found = ", ".join(types)
    if kernels != "native" or config.load == "dummy":
        return WIDE, f"{found} multiplied out: the C kernels alone keep them packed"
    assert folder.gguf is not None
    packed = packed_specs(folder.gguf.checkpoint.stored)
    kept = {spec.kind for spec in packed.values()}
    if not kept:
        return WIDE, f"{found} multiplied out"
    form = WeightForm("packed", packed=packed, packs_tables=config.tp == 1)
    return form, f"{found}: what has four bits or more is multiplied as stored"


def _packed(
    how: Quantization, folder: ModelFolder, config: EngineConfig, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    """Codes as they are stored, where these kernels multiply them."""
    if config.load == "dummy":
        return WIDE, AS_STORED
    if kernels == "triton" and dtype == "float16":
        why = "float16 could overflow before the norm's scales"
        return WIDE, f"{how.method} weights are multiplied out: {why}"
    tensors = folder.checkpoint.tensors
    packed = dict[str, PackedSpec]()
    odd = 0
    for name in tensors:
        stem, _, last = name.rpartition(".")
        scheme = how.scheme_of(stem) if last in CODES else None
        if scheme is None or scheme.codes_name != last or tensors[name].dtype in FLOAT_DTYPES:
            continue
        if scheme.reordered or (
            (scheme.group_size or STEP) not in (16, 32, 64) and (scheme.group_size or STEP) % STEP
        ):
            odd += 1
            continue
        scales = tensors.get(f"{stem}.{'scales' if last == 'qweight' else 'weight_scale'}")
        narrow = scales is not None and (scales.dtype == "BF16" or scheme.layout == "mxfp4")
        kind: ScaleKind = "bfloat16" if narrow else "float32"
        packed[f"{stem}.weight"] = PackedSpec(
            scheme.code_kind, scheme.group_size, not scheme.symmetric, kind
        )
    why = f"{how.method} weights are multiplied as stored, activations are not rounded"
    if odd:
        why += f"; {odd} with act-order or odd groups are multiplied out"
    return (WeightForm("packed", packed=packed), why) if packed else (WIDE, why)
