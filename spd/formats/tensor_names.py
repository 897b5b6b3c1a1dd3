"""Names of a checkpoint's tensors as the text models have them, and packed experts one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from spd.formats.safetensors_header import TensorMeta

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "backbone.": "model.",
    "midlayer.": "layers.0.",
}
"""Prefixes of names, and the text model's in their place.

They are those of models that see images too, of Nemotron, and of an EAGLE-3 head's layer, in its
authors' layout and in vLLM's.
"""
_EXPERT_MATRICES = ("gate", "up", "down")
_SCALE_SUFFIXES = ("", "_scale", "_scale_2")
_RENAMED_PARTS = {
    "block_sparse_moe": "mlp",
    "router.layer": "gate",
    "mlp.router": "mlp.gate",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{
        f"mixer.{name}": f"mamba.{name}"
        for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm")
    },
    "mixer.out_proj": "mamba.out_proj",
    "mixer": "mlp",
    "embeddings": "embed_tokens",
    "norm_f": "norm",
    "shared_mlp.input_linear": "mlp.shared_mlp.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_mlp.down_proj",
    "weight_scale_inv": "weight_scale",
    **{
        f"moe.{name}_proj.weight{suffix}": f"mlp.experts.{name}_proj{suffix}"
        for name in _EXPERT_MATRICES
        for suffix in _SCALE_SUFFIXES
    },
    **{
        f"moe.{name}_proj.weight_scale_inv": f"mlp.experts.{name}_proj_scale"
        for name in _EXPERT_MATRICES
    },
    "moe.router_bias": "mlp.gate.e_score_correction_bias",
    "moe": "mlp",
    "gate.wg": "gate",
    "share_expert": "mlp.shared_experts",
    "mlp.shared_mlp": "mlp.shared_experts",
    "attention_sink_bias": "sinks",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
"""Parts of names in checkpoints of several families, and the names in the others."""
_SECOND_BLOCK_PARTS = {
    "norm": "post_attention_layernorm",
    "mixer": "mlp",
    "final_layernorm": "final_layernorm",
}
"""Parts of names in the second layer of Nemotron's MTP head, and the names in a single layer.

The head has its two blocks in two layers.
"""
_SECOND_BLOCK = re.compile(rf"^mtp\.layers\.1\.({'|'.join(_SECOND_BLOCK_PARTS)})(?=\.)")
_RENAMED_PART = re.compile(rf"\.({'|'.join(map(re.escape, _RENAMED_PARTS))})(?=\.|$)")
_PACKED_ENDINGS = {
    "": (3, "weight"),
    "_scale": (3, "weight_scale"),
    "_scale_2": (1, "weight_scale_2"),
    "_blocks": (4, "weight_packed"),
    "_scales": (3, "weight_scale"),
}
"""Endings of tensors that pack experts: their dimensions, and the name of one expert's part."""
_PACKED_MATRICES = {
    f"{name}_proj{ending}": [f"{name}_proj"]
    for name in ("gate_up", *_EXPERT_MATRICES)
    for ending in _PACKED_ENDINGS
}
_PACKED_MATRICES["gate_up_proj"] = ["gate_proj", "up_proj"]
"""Names of tensors that pack experts, and the matrices of each expert in them."""


def text_name(name: str) -> str:
    """Return a tensor's name as a checkpoint of the text model alone has it."""
    prefix = next(filter(name.startswith, _PREFIXES), "")
    name = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
    name = _SECOND_BLOCK.sub(lambda match: f"mtp.layers.0.{_SECOND_BLOCK_PARTS[match[1]]}", name)
    return _RENAMED_PART.sub(lambda match: f".{_RENAMED_PARTS[match[1]]}", name)


def unpack_experts(name: str, meta: TensorMeta) -> Iterator[tuple[str, TensorMeta]]:
    """Yield a tensor, or the matrices of all experts that it packs.

    Packed are matrices [E, N, K], gate rows before up rows, or their scales; or, as gpt-oss
    publishes them in MXFP4, codes [E, N, K / 32, 16] and scales [E, N, K / 32].
    """
    stem, _, last = name.rpartition(".")
    dims, ending = _PACKED_ENDINGS.get(last.partition("_proj")[2], (0, ""))
    matrices = None
    if stem.endswith(".experts") and len(meta.shape) == dims:
        matrices = _PACKED_MATRICES.get(last)
    if matrices is None or math.prod(meta.shape[1:2]) % len(matrices) or not meta.nbytes:
        yield name, meta
        return
    experts, *inner = meta.shape
    shape = (inner[0] // len(matrices), math.prod(inner[1:])) if inner else ()
    nbytes = meta.nbytes // (experts * len(matrices))
    for number in range(experts * len(matrices)):
        expert, matrix = divmod(number, len(matrices))
        offset = meta.offset + number * nbytes
        matrix_name = f"{stem}.{expert}.{matrices[matrix]}.{ending}"
        yield matrix_name, meta._replace(shape=shape, nbytes=nbytes, offset=offset)
