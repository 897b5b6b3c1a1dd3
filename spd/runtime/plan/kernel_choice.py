"""The choice of kernels: Triton's on a GPU, C's on a CPU with the instructions, torch's elsewhere.

Also the form of the weights, which follows from the request, the stored form and those kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

from spd.errors import IncompatibleError, ResourceError
from spd.formats.checkpoint import FLOAT_DTYPES
from spd.formats.folder import ModelFolder
from spd.formats.gguf.tensors import StoredTensor
from spd.formats.hub import spd_cache_folder
from spd.formats.model_config import ModelConfig
from spd.formats.quantized import Quantization
from spd.formats.weight_schemes import CODE_TENSORS
from spd.kernels.capabilities import ROUNDING_GROUP
from spd.kernels.native.build import (
    DTYPE_FLAGS,
    LARGEST_HEAD,
    NativeUnavailable,
    unavailable_reason,
)
from spd.runtime.models.gguf_forms import FORMS, find_packed_specs
from spd.runtime.models.layouts import AttentionLayout, LayerLayout
from spd.runtime.models.weight_forms import (
    DTYPE_BYTES,
    FOUR_BIT_STEP,
    WIDE,
    PackedSpec,
    ScaleKind,
    WeightForm,
    codes_form,
    int4_form,
)
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.machine import Machine

OLDEST_CAPABILITY = (8, 0)
"""CUDA's capability of the oldest GPU with bfloat16 products and enough shared memory."""
AS_STORED = "as the dtype says"
"""The reason for wide weights that were not quantized."""
FLOAT16_OVERFLOWS = "float16 could overflow before the norm's scales"
"""The reason for wide weights where Triton's kernels would multiply codes in float16."""
ROUNDING_TEXT = {
    "int8": "a scale a row, made at load",
    "int4": f"four to eight bits, tables too, a scale for {ROUNDING_GROUP} columns, made at load",
}
"""What --quantize makes."""


def native_obstacle(machine: Machine, dtype: str, layers: Iterable[LayerLayout]) -> str | None:
    """Return the reason why the C kernels cannot run such layers, or None; compiles nothing."""
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
    """Return the kernels, "torch", "native" or "triton", and the reason for them.

    Compiles the C kernels where these are chosen, unless the machine is only foreseen. Raises
    ResourceError and IncompatibleError where the requested kernels cannot run.
    """
    if requested == "torch":
        return requested, "asked for"
    if requested == "native" or (requested == "auto" and machine.on_cpu):
        return _choose_native(
            requested, native_obstacle(machine, dtype, layers), dtype, machine.is_foreseen
        )
    if not machine.is_foreseen and find_spec("triton") is None:
        if requested == "auto":
            return "torch", "triton is not installed"
        raise ResourceError(
            "--kernels triton, but triton is not installed", fix=["--kernels torch"]
        )
    if not machine.on_cpu:
        if machine.capability >= OLDEST_CAPABILITY or machine.capability == (0, 0):
            return "triton", "a GPU's"
        oldest = _architecture_name(OLDEST_CAPABILITY)
        own = _architecture_name(machine.capability)
        reason = f"Triton's need a GPU of {oldest}, and this one is {own}"
        return _fall_back_to_torch(requested, reason)
    from triton import knobs

    if not knobs.runtime.interpret:
        hint = (
            "Without one they run only in Triton's interpreter: set TRITON_INTERPRET=1 (very slow)."
        )
        message = "--kernels triton needs a CUDA device"
        raise ResourceError(message, reason=[hint], fix=["--kernels torch"])
    if dtype == "bfloat16":
        message = "Triton's interpreter gets bfloat16 products wrong"
        raise IncompatibleError(message, fix=["--dtype float32", "--kernels torch"])
    return "triton", "asked for"


def _architecture_name(capability: tuple[int, int]) -> str:
    """Return NVIDIA's name of an architecture, such as sm_90."""
    return f"sm_{capability[0]}{capability[1]}"


def _fall_back_to_torch(requested: str, reason: str) -> tuple[str, str]:
    """Return torch's kernels and the reason against others.

    Raises IncompatibleError where others were requested.
    """
    if requested == "auto":
        return "torch", reason
    message = f"--kernels {requested} cannot run this model here"
    raise IncompatibleError(message, reason=[f"{reason}."], fix=["--kernels auto"])


def _choose_native(
    requested: str, obstacle_text: str | None, dtype: str, is_foreseen: bool
) -> tuple[str, str]:
    """Return the C kernels and how they are compiled, or torch's and the reason against C.

    Compiles them, unless the machine is only foreseen. Raises IncompatibleError where C kernels were
    requested and cannot run.
    """
    if obstacle_text is None and is_foreseen:
        return "native", "foreseen"
    if obstacle_text is None:
        from spd.kernels.native.library import open_library

        try:
            return (
                "native",
                f"compiled for this processor's {open_library(spd_cache_folder, dtype).instructions}",
            )
        except NativeUnavailable as error:
            obstacle_text = str(error)
    return _fall_back_to_torch(
        requested, obstacle_text if requested == "native" else f"not the C kernels: {obstacle_text}"
    )


def check_activations(config: EngineConfig, machine: Machine, form: WeightForm) -> None:
    """Raise IncompatibleError where rows cannot be rounded to eight bits as requested.

    form: of the target's weights; a drafter without integer codes keeps whole activations.
    """
    if config.activations == "whole":
        return
    if not machine.on_cpu:
        message = "--activations int8 is for a CPU, and this model would run on a GPU"
        raise IncompatibleError(message, fix=["leave --activations out", "--device cpu"])
    if not form.has_integer_codes:
        message = "--activations int8 is for weights in integer codes, and these have none"
        fix = ["--quantize int8", "--quantize int4", "leave --activations out"]
        raise IncompatibleError(message, fix=fix if form.kind == "wide" else fix[2:])


def choose_form(
    model: ModelConfig,
    folder: ModelFolder,
    config: EngineConfig,
    machine: Machine,
    kernels: str,
    dtype: str,
) -> tuple[WeightForm, str]:
    """Return the form of a folder's weights and the reason for it.

    Reads the checkpoint's headers only where its weights are quantized.
    """
    form, reason = _unrounded_form(model, folder, config, kernels, dtype)
    rounds_rows = config.activations == "int8" and machine.on_cpu and form.has_integer_codes
    return replace(form, rounds_rows=rounds_rows), reason


def _unrounded_form(
    model: ModelConfig, folder: ModelFolder, config: EngineConfig, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    """Return the form of a folder's weights and the reason for it, before activations are rounded.

    Raises IncompatibleError where weights that are quantized already are to be quantized.
    """
    types = () if folder.gguf is None else folder.gguf.packed_types
    if config.quantize != "none":
        if model.quantization is not None or types:
            causes = [f"The file's tensors are {', '.join(types)}."]
            if model.quantization is not None:
                method = model.quantization.method
                causes = [f"quantization_config in config.json speaks of {method} weights."]
            message = (
                f"--quantize {config.quantize}, "
                f"but the weights of {folder.path.name} are quantized already"
            )
            raise IncompatibleError(message, reason=causes, fix=["leave --quantize out"])
        reason = f"--quantize {config.quantize}: {ROUNDING_TEXT[config.quantize]}"
        form = WeightForm("int8")
        if config.quantize == "int4":
            form = int4_form(model, kernels, dtype, config.tp)
        if form.widened:
            reason += f", kept as {dtype}, for these kernels want wide weights"
        return form, reason
    if model.quantization is not None:
        return _packed_form(
            quantization=model.quantization,
            folder=folder,
            config=config,
            kernels=kernels,
            dtype=dtype,
        )
    if not types:
        return WIDE, AS_STORED
    return _gguf_form(folder=folder, types=types, config=config, kernels=kernels, dtype=dtype)


def _gguf_form(
    folder: ModelFolder, types: Sequence[str], config: EngineConfig, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    """Return the form of a GGUF file's weights and the reason for it.

    Blocks stay packed where the kernels multiply them.
    """
    type_names = ", ".join(types)
    if kernels == "torch" or config.load == "dummy":
        return WIDE, f"{type_names} multiplied out: torch's kernels keep nothing packed"
    if kernels == "triton" and dtype == "float16":
        return WIDE, f"{type_names} multiplied out: {FLOAT16_OVERFLOWS}"
    assert folder.gguf is not None
    stored = folder.gguf.checkpoint.stored
    packed = find_packed_specs(stored)
    widened = _widened_types(stored, dtype)
    if not packed:
        return WIDE, widened or f"{type_names} multiplied out"
    form = replace(codes_form("packed", kernels, config.tp), packed=packed)
    reason = f"{type_names}: what has four bits or more is multiplied as stored"
    return form, f"{reason}; {widened}" if widened else reason


def _widened_types(stored: Mapping[str, StoredTensor], dtype: str) -> str:
    """Return the types of fewer than four bits and what they cost in memory; empty without any."""
    file_bytes: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for part in (part for tensor in stored.values() for part in tensor.parts):
        if part.type.name not in FORMS and part.type.name not in FLOAT_DTYPES:
            file_bytes[part.type.name] += part.nbytes
            elements[part.type.name] += math.prod(part.shape)
    if not file_bytes:
        return ""
    ratio = elements.total() * DTYPE_BYTES[dtype] / file_bytes.total()
    return f"{', '.join(file_bytes)} multiplied out to {dtype}, {ratio:.1f} times its bytes"


def _packed_form(
    quantization: Quantization, folder: ModelFolder, config: EngineConfig, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    """Return the form that keeps codes as stored, where these kernels multiply them."""
    if config.load == "dummy":
        return WIDE, AS_STORED
    if kernels == "triton" and dtype == "float16":
        return WIDE, f"{quantization.method} weights are multiplied out: {FLOAT16_OVERFLOWS}"
    tensors = folder.checkpoint.tensors
    packed = dict[str, PackedSpec]()
    odd_count = 0
    for name in tensors:
        stem, _, last = name.rpartition(".")
        scheme = quantization.scheme_of(stem) if last in CODE_TENSORS else None
        if scheme is None or scheme.codes_name != last or tensors[name].dtype in FLOAT_DTYPES:
            continue
        group = scheme.group_size or FOUR_BIT_STEP
        if scheme.reordered or (group not in (16, 32, 64) and group % FOUR_BIT_STEP):
            odd_count += 1
            continue
        scales = tensors.get(f"{stem}.{'scales' if last == 'qweight' else 'weight_scale'}")
        narrow = scales is not None and (scales.dtype == "BF16" or scheme.layout == "mxfp4")
        kind: ScaleKind = "bfloat16" if narrow else "float32"
        if scheme.layout == "spd":
            kind = "float16"
        packed[f"{stem}.weight"] = PackedSpec(
            scheme.code_kind, scheme.group_size, not scheme.symmetric, kind
        )
    reason = f"{quantization.method} weights are multiplied as stored"
    if odd_count:
        reason += f"; {odd_count} with act-order or odd groups are multiplied out"
    if not packed:
        return WIDE, reason
    form = WeightForm("packed", packed=packed)
    if quantization.method == "spd":  # other methods' tables may have any groups and zero points
        form = replace(codes_form("packed", kernels, config.tp), packed=packed)
    return form, reason
