"""EAGLE-3 heads: what `config.json` and the tensors of a head folder say of it, in the published layouts.

A head drafts for one target. Of each position P it reads the target's residual stream where it enters
a few layers (`aux_layers`), un-normed, side by side; one matrix makes the head's own state of them:

    h = fc(streams of P)                                      norms before it: `norm_before_fc`, `fc_norm`
    x = h + attention([input_layernorm(embedding of token P+1) ; hidden_norm(h)])   rotary position P
    y = x + mlp(post_attention_layernorm(x))
    logits of token P+2 = lm_head(norm(y)), of `draft_vocab_size` ids; target id = i + d2t[i]

What goes on, in the place of h, is y; norm(y) where `norm_output`. With `norm_before_residual` what is
added to attention is hidden_norm(h). One layer; keys and values as in a Llama of the head's own numbers.

Three layouts, which the configuration tells apart:

    research       a Llama configuration with draft_vocab_size, or of the architectures below; `midlayer.*`
    vLLM           the same under its own architecture; `layers.0.*`
    speculators    speculators_model_type "eagle3", the layer's configuration in transformer_layer_config

`aux_layers` counts the layers that a stream has passed. Top-level eagle_aux_hidden_state_layer_ids says
just that; inside eagle_config, as SGLang and SpecForge write it, it names the layer whose output is read,
which is one less. Without either it is (2, L // 2, L - 3) of the target's L layers. Source: the published
heads' configurations and the forward passes of the EAGLE repository, vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spd.errors import CheckpointError
from spd.formats.json_file import Fields, display_text, json_key

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
MODEL_TYPE = "eagle3"
MOST_AUX = 16
IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_IDS = "aux_hidden_state_layer_ids"
LAYER = "midlayer."  # before the names of the head's layer, whatever its layout: see `text_name`
OFFSETS = "d2t"
_BUILT = {
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), (True,)),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}
"""Keys of eagle_config that change the forward pass, and the value that is built."""
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
FUSE = "fc.weight"


@dataclass(frozen=True)
class Eagle3Config:
    """What a head's configuration says beyond a decoder's."""

    target_hidden_size: int = field(metadata=json_key("target_hidden_size", 1, 1 << 20))
    draft_vocab_size: int  # ids that the head knows
    listed_layers: tuple[int, ...] | None
    num_aux: int
    norm_before_residual: bool = field(metadata=json_key("norm_before_residual"))
    norm_before_fc: bool = field(metadata=json_key("norm_before_fc"))
    fc_norm: bool = field(metadata=json_key("fc_norm"))
    norm_output: bool = field(metadata=json_key("norm_output"))
    own_embedding: bool = (
        False  # it needs embeddings of its own, since the target's are of another size
    )

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """Layers that each stream has passed which the head reads."""
        found = self.listed_layers or (2, target_layers // 2, target_layers - 3)
        if not all(0 <= passed <= target_layers for passed in found):
            what = (
                f"an EAGLE-3 head that reads the streams behind {', '.join(map(str, found))} layers"
            )
            reason = [f"the target has {target_layers} layers"]
            raise CheckpointError(f"{what} needs another target", reason=reason)
        return found


def read_eagle3(fields: Fields) -> tuple[Eagle3Config, Fields] | None:
    """A head's facts, and its layer's configuration as a Llama's; None where it is another model's."""
    speculators = fields.get("speculators_model_type") == MODEL_TYPE
    layer = fields
    if speculators:
        layer = fields.nested("transformer_layer_config")
        layer.refuse_unsupported_values({"model_type": ("llama",)})
    else:  # whatever model_type says: trainers write the target's there
        names = fields.get("architectures")
        named = isinstance(names, list) and any(name in ARCHITECTURES for name in names)
        if not named and (names != ["LlamaForCausalLM"] or "draft_vocab_size" not in fields):
            return None
    layer.refuse_unsupported_values({"num_hidden_layers": (1,)})
    nested = fields.optional_nested("eagle_config") or Fields(f"{fields.where}: eagle_config", {})
    nested.refuse_unsupported_values(_BUILT)
    listed = _listed(fields, IDS, 0) or _listed(fields, OTHER_IDS, 0) or _listed(nested, IDS, 1)
    absent = {"target_hidden_size": layer.get("target_hidden_size") or layer.get("hidden_size")}
    absent |= {
        "norm_before_fc": nested.get("norm_before_fc") or False,
        "norm_before_residual": speculators,
    }
    vocab_size = layer.integer("vocab_size", 1, 1 << 24)
    hidden = layer.get("hidden_size")
    said = {key: value for key, value in fields.values.items() if value is not None}
    facts = Fields(
        fields.where, {"fc_norm": False, "norm_output": False, **absent, **said}
    ).read_dataclass(
        Eagle3Config,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, vocab_size, vocab_size),
        own_embedding=(said.get("target_hidden_size") or absent["target_hidden_size"]) != hidden,
        listed_layers=listed,
        num_aux=len(listed) if listed else 3,
    )
    stored = [each.get(key) for each in (layer, fields) for key in ("dtype", "torch_dtype")]
    llama: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    llama |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": None}
    llama |= {"dtype": next((dtype for dtype in stored if dtype), None)}
    llama |= dict.fromkeys(
        ("bos_token_id", "eos_token_id")
    )  # the target's, and often another one's
    return facts, layer.with_values(llama)


def _listed(fields: Fields, key: str, added: int) -> tuple[int, ...] | None:
    """An ascending list of layers, `added` to each; None where there is none or it is empty."""
    if not fields.get(key):
        return None
    value = fields.integers(key, 0, 1024)
    fields.require(len(value) <= MOST_AUX, key, f"names more than {MOST_AUX} layers")
    fields.require(value == sorted(set(value)), key, f"{display_text(value)} is not ascending")
    return tuple(i + added for i in value)
