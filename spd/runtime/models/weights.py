"""Names and shapes of the tensors a dense decoder's checkpoint must hold. No torch here.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

from spd.formats.model_config import ModelConfig


@dataclass(frozen=True)
class Differences:
    """What one family does that the shared decoder skeleton does not do by itself."""

    qk_norm: bool = False


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """The name under which a layer's tensors stand."""
    return f"model.layers.{layer}."


def layer_tensors(config: ModelConfig, differences: Differences) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their names inside the layer."""
    hidden, size = config.hidden_size, config.head_dim
    query, key = config.num_heads * size, config.num_kv_heads * size
    attention = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    inner = config.intermediate_size
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for block, matrices, biased in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        for name, shape in matrices.items():
            shapes[f"{block}.{name}.weight"] = shape
            if biased:
                shapes[f"{block}.{name}.bias"] = shape[:1]
    if differences.qk_norm:
        shapes["self_attn.q_norm.weight"] = (size,)
        shapes["self_attn.k_norm.weight"] = (size,)
    return shapes


def expected_tensors(config: ModelConfig, differences: Differences) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor that must be there; a tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in layer_tensors(config, differences).items()}
    return shapes


def is_ignorable(name: str) -> bool:
    """Tensors that older exporters wrote and nobody needs: rotary tables, a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or name == HEAD
