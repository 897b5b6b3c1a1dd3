"""EAGLE-3 heads: configuration and tensors' names of a head folder, in the published layouts.

A head drafts for one target. For each position P it reads the target's residual stream at the input
of a few layers (`aux_layers`), without a norm, side by side; one matrix makes the head's state of
them:

    h = fc(streams of P)                                      norms before it: `norm_before_fc`, `fc_norm`
    x = h + attention([input_layernorm(embedding of token P+1) ; hidden_norm(h)])   rotary position P
    y = x + mlp(post_attention_layernorm(x))
    logits of token P+2 = lm_head(norm(y)), of `draft_vocab_size` ids; target id = i + d2t[i]

Without an lm_head the target's rows of these ids are used. The next step's h is y; norm(y) where
`norm_output`. With `norm_before_residual` the sum with attention is of hidden_norm(h). One layer;
keys and values as in a Llama of the head's numbers.

Three layouts, which the configuration distinguishes:

    research       a Llama configuration with draft_vocab_size, or of the architectures below; `midlayer.*`
    vLLM           the same under its own architecture; `layers.0.*`
    speculators    speculators_model_type "eagle3", the layer's configuration in transformer_layer_config

`aux_layers` counts the layers that a stream has passed. Top-level eagle_aux_hidden_state_layer_ids
has the same meaning; inside eagle_config, as SGLang and SpecForge write it, it is the index of the
layer whose output is read, which is one less. Without either it is (2, L // 2, L - 3) of the
target's L layers. Source: the published heads' configurations and the forward passes of the EAGLE
repository, vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spd.errors import CheckpointError
from spd.formats.json_file import Fields, display_text, json_key

EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (
    EAGLE3_ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
SPECULATORS_TYPE = "eagle3"
MAX_AUX_LAYERS = 16
"""Streams that a head may read."""
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
OTHER_AUX_LAYERS_KEY = "aux_hidden_state_layer_ids"
LAYER_PREFIX = "layers.0."
"""The beginning of the names of the head's layer, whatever its layout: see `text_name`."""
TOKEN_OFFSETS = "d2t"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
FUSION = "fc.weight"
"""Names of the tensors outside of the layer."""
_SUPPORTED = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}
"""Keys of eagle_config that change the forward pass, and the supported values."""


@dataclass(frozen=True)
class Eagle3Config:
    """A head's configuration beyond that of its decoder layer."""

    target_hidden_size: int = field(metadata=json_key("target_hidden_size", 1, 1 << 20))
    draft_vocab_size: int
    """The number of token ids that the head has logits for."""
    configured_layers: tuple[int, ...] | None
    """For each stream, the layers that it has passed; None: the file states none."""
    num_aux_layers: int
    """Streams that the head reads."""
    norm_before_residual: bool = field(metadata=json_key("norm_before_residual"))
    norm_before_fc: bool = field(metadata=json_key("norm_before_fc"))
    fc_norm: bool = field(metadata=json_key("fc_norm"))
    norm_output: bool = field(metadata=json_key("norm_output"))
    private_embedding: bool = False
    """True if the head needs its own embedding, since the target's has another size."""

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """Return, for each stream that the head reads, the number of layers that it has passed.

        Raises CheckpointError where the target has fewer layers.
        """
        layers = self.configured_layers or (2, target_layers // 2, target_layers - 3)
        if not all(0 <= passed <= target_layers for passed in layers):
            numbers = ", ".join(map(str, layers))
            message = f"an EAGLE-3 head that reads the streams behind {numbers} layers"
            message += " needs another target"
            raise CheckpointError(message, reason=[f"the target has {target_layers} layers"])
        return layers


def read_eagle3(fields: Fields) -> tuple[Eagle3Config, Fields] | None:
    """Return a head's configuration, and its layer's as a Llama's.

    None for another kind of model.
    """
    is_speculators = fields.get("speculators_model_type") == SPECULATORS_TYPE
    layer = fields
    if is_speculators:
        layer = fields.nested("transformer_layer_config")
        layer.refuse_unsupported_values({"model_type": ("llama",)})
    elif not _is_eagle3(fields):
        return None
    layer.refuse_unsupported_values({"num_hidden_layers": (1,)})
    nested = fields.optional_nested("eagle_config") or Fields(f"{fields.where}: eagle_config", {})
    nested.refuse_unsupported_values(_SUPPORTED)
    aux_layers = (
        _read_layer_numbers(fields, AUX_LAYERS_KEY, 0)
        or _read_layer_numbers(fields, OTHER_AUX_LAYERS_KEY, 0)
        or _read_layer_numbers(nested, AUX_LAYERS_KEY, 1)
    )
    hidden_size = layer.get("hidden_size")
    defaults = {
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": layer.get("target_hidden_size") or hidden_size,
        "norm_before_fc": nested.get("norm_before_fc") or False,
        "norm_before_residual": is_speculators,
    }
    vocab_size = layer.integer("vocab_size", 1, 1 << 24)
    present = {key: value for key, value in fields.values.items() if value is not None}
    target_hidden_size = present.get("target_hidden_size") or defaults["target_hidden_size"]
    config = Fields(fields.where, {**defaults, **present}).read_dataclass(
        Eagle3Config,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, vocab_size, vocab_size),
        private_embedding=target_hidden_size != hidden_size,
        configured_layers=aux_layers,
        num_aux_layers=len(aux_layers) if aux_layers else 3,
    )
    dtypes = [source.get(key) for source in (layer, fields) for key in ("dtype", "torch_dtype")]
    llama: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": None,
        "dtype": next((dtype for dtype in dtypes if dtype), None),
        "bos_token_id": None,  # these ids are the target's, and often another model's
        "eos_token_id": None,
    }
    return config, layer.with_values(llama)


def _is_eagle3(fields: Fields) -> bool:
    """True if a configuration without speculators' key is an EAGLE-3 head's.

    The model_type does not count: trainers write the target's there.
    """
    names = fields.get("architectures")
    if isinstance(names, list) and any(name in ARCHITECTURES for name in names):
        return True
    return names == ["LlamaForCausalLM"] and "draft_vocab_size" in fields


def _read_layer_numbers(fields: Fields, key: str, offset: int) -> tuple[int, ...] | None:
    """Return an ascending list of layers, `offset` added to each.

    None where it is absent or empty.
    """
    if not fields.get(key):
        return None
    layers = fields.integers(key, 0, 1024)
    reason = f"names more than {MAX_AUX_LAYERS} layers"
    fields.require(len(layers) <= MAX_AUX_LAYERS, key, reason)
    is_ascending = layers == sorted(set(layers))
    fields.require(is_ascending, key, f"{display_text(layers)} is not ascending")
    return tuple(layer + offset for layer in layers)
