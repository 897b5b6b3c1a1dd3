"""Rounds a checkpoint's matrices to four to six bits, as `--quantize int4` does at load.

`spd.formats.quantized` describes the layout, "spd".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spd.errors import IncompatibleError
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig
from spd.formats.mtp_layout import is_mtp_tensor
from spd.formats.names import HEAD
from spd.formats.safetensors_header import TensorMeta
from spd.formats.tensor_names import text_name
from spd.formats.weight_schemes import SPD_KINDS
from spd.formats.writer import OutputTensor, output_tensors
from spd.kernels.capabilities import CODE_BITS, ROUNDING_GROUP, CodeKind
from spd.kernels.linear.few_bits import FOUR_BIT_KINDS, unpack_nibbles
from spd.kernels.linear.group_rounding import quantize_groups
from spd.runtime.load.packed_weights import split_code_bits
from spd.runtime.models import family_layout
from spd.runtime.models.layouts import MoeLayout
from spd.runtime.models.weight_forms import PackedSpec, WeightForm, rounded_kinds, rounded_spec
from spd.runtime.models.weights import check_weights, iterate_parameters

Specs = Mapping[str, PackedSpec]
"""The codes of matrices that are rounded, by their names."""


def find_rounded_specs(folder: ModelFolder, includes_mtp: bool) -> dict[str, PackedSpec]:
    """Return the codes of the matrices that `--quantize int4` rounds, by their names.

    includes_mtp: among them those of MTP layers with the same last names.
    """
    layout = family_layout(folder.config)
    config = folder.config
    if config.quantization is not None:
        raise IncompatibleError(f"the weights of {folder.path} are quantized already")
    if any(
        isinstance(layer.mlp, MoeLayout) and layer.mlp.has_biases and layer.mlp.is_transposed
        for layer in layout.layers
    ):
        message = (
            f"the experts of {folder.path} are stored transposed, and no folder in codes is so"
        )
        raise IncompatibleError(message, reason=["--quantize int4 rounds them at load."])
    check_weights(folder.checkpoint, config, layout)
    form = WeightForm("int4", rounded=rounded_kinds(config))
    specs: dict[str, PackedSpec] = {}
    suffixes: dict[str, CodeKind] = {}
    for prefix, parameter in iterate_parameters(config, layout):
        for source, spec in form.find_rounded_specs(parameter, is_table=not prefix):
            if source.name.endswith(".weight"):
                specs[prefix + source.name] = spec
                if prefix:
                    suffixes[f".{source.name}"] = spec.kind
    tensors = folder.checkpoint.tensors
    for name, meta in tensors.items() if includes_mtp else ():
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        is_matrix = len(meta.shape) == 2 and is_mtp_tensor(name, config.num_layers)
        if suffix is not None and is_matrix:
            mtp_spec = rounded_spec(meta.shape[1], suffixes[suffix])
            if mtp_spec is not None:
                specs[name] = mtp_spec
    return {
        name: specs[name]
        for name, meta in tensors.items()
        if name in specs and meta.dtype in FLOAT_DTYPES
    }


def rounded_checkpoint_tensors(
    checkpoint: Checkpoint, specs: Specs, config: ModelConfig
) -> list[OutputTensor]:
    """Return every tensor of a checkpoint as it is written: codes and scales of those that are
    rounded.

    A tied head that is stored nevertheless is a copy, and is left out.
    """
    outputs: list[OutputTensor] = []
    for name, meta in checkpoint.tensors.items():
        if name in specs:
            outputs += _rounded_outputs(checkpoint, name, specs[name], config.dtype)
        elif name != HEAD or not config.tie_embeddings:
            outputs += output_tensors(checkpoint, [meta._replace(name=_stored_name(name, meta))])
    return outputs


def _rounded_outputs(
    checkpoint: Checkpoint, name: str, spec: PackedSpec, dtype: str
) -> list[OutputTensor]:
    """Return the tensors that store a rounded matrix. It is rounded when the first is written.

    dtype: the model's, which a stored matrix of another one is given first, as it is at load.
    """
    meta = checkpoint.tensors[name]
    stem = _stored_name(name, meta).removesuffix("weight")
    rows, columns = meta.shape
    bits = CODE_BITS[spec.kind]
    shapes = {
        "weight_scale": ("F16", (rows, columns // ROUNDING_GROUP)),
        "weight_packed": ("U8", (rows, columns // 2)),
    }
    if bits > 4:
        shapes["weight_upper"] = ("U8", (rows, columns * (bits - 4) // 8))
    parts: dict[str, Tensor] = {}

    def make_bytes(last: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor; the others wait for their turn."""
        if not parts:
            weight = checkpoint.read(name).to(getattr(torch, dtype))
            parts.update(_round_matrix(weight, spec))
        yield _to_bytes(parts.pop(last))

    return [
        OutputTensor(f"{stem}{last}", dtype, shape, partial(make_bytes, last))
        for last, (dtype, shape) in shapes.items()
    ]


def _round_matrix(weight: Tensor, spec: PackedSpec) -> dict[str, Tensor]:
    """Return the tensors that store a matrix, by last names."""
    rounded = quantize_groups(weight, spec.kind)
    is_paired = spec.kind in FOUR_BIT_KINDS
    codes = unpack_nibbles(rounded.codes) if is_paired else rounded.codes
    packed, upper = split_code_bits(codes, CODE_BITS[spec.kind])
    parts = {"weight_scale": rounded.scales, "weight_packed": packed}
    return parts if upper is None else parts | {"weight_upper": upper}


def quantization_config(specs: Specs) -> dict[str, Any]:
    """Return the entry of config.json: the modules of each number of bits, by the names that layouts
    have.

    They are named by a pattern for their last name, where all modules with it are alike.
    """
    modules = {name.removesuffix(".weight"): CODE_BITS[spec.kind] for name, spec in specs.items()}
    bits_by_last_name: defaultdict[str, set[int]] = defaultdict(set)
    for module, bits in modules.items():
        bits_by_last_name[module.rpartition(".")[2]].add(bits)
    targets: dict[str, set[str]] = {f"{bits}": set() for bits in SPD_KINDS}
    for module, bits in modules.items():
        parent, _, last = module.rpartition(".")
        is_alike = parent and len(bits_by_last_name[last]) == 1
        targets[f"{bits}"].add(rf"re:.*\.{last}$" if is_alike else module)
    return {
        "quant_method": "spd",
        "group_size": ROUNDING_GROUP,
        "modules": {bits: sorted(names) for bits, names in targets.items()},
    }


def _stored_name(name: str, meta: TensorMeta) -> str:
    """Return a tensor's name in the file, or an expert's name where the file has all experts in one
    tensor.
    """
    return meta.name if text_name(meta.name) == name else name


def _to_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's bytes."""
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.contiguous().view(torch.uint8).flatten())
    return bytes(data)
