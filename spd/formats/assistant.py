"""Gemma 4's assistants: what `config.json` of a drafter's folder says of it.

An assistant drafts for one target. Its layers have queries only: they attend to the keys and values of the
target's last layer of their kind that has some of its own, at a position that stays the same for all drafts
of a round. Of the newest token N, which stands behind the text that the target has read, with h for the
target's state (after its final norm) of the position before:

    x = pre_projection([target's embedding of the token ; h])      rotary position of N for every draft
    n = norm(layers(x))
    logits of the next token = embedding · n                       of all ids, or of some: see `clusters`
    h of the next draft = post_projection(n)

Source: `gemma4_assistant` of Hugging Face transformers 5, and the published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spd.formats.json_file import Fields
from spd.formats.names import GENERATION_FILE

ARCHITECTURE = "Gemma4AssistantForCausalLM"
ARCHITECTURES = {ARCHITECTURE: "gemma4_assistant"}
ARCHITECTURES["Gemma4UnifiedAssistantForCausalLM"] = "gemma4_unified_assistant"
"""Architectures, and their model types."""
ORDER = "masked_embedding.token_ordering"  # the tensor of token ids int64 [V], cluster by cluster


@dataclass(frozen=True)
class AssistantConfig:
    """What an assistant's configuration says beyond a decoder's."""

    target_hidden_size: int
    clusters: int = (
        0  # into which ids are divided, each with a vector; 0: logits are made of all ids
    )
    kept: int = 0  # clusters whose ids get logits: those whose vectors fit best


def suppressed_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that an assistant does not draft, as its generation_config.json says."""
    path = folder / GENERATION_FILE
    return Fields.read(path).token_ids("suppress_tokens", vocab_size) if path.exists() else ()


def read_assistant(fields: Fields) -> tuple[AssistantConfig, Fields] | None:
    """An assistant's facts, and its layers' configuration as a Gemma 4's; None for another model's."""
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in ARCHITECTURES:
        return None
    fields.choice("model_type", (ARCHITECTURES[str(name)],))
    inner = fields.nested("text_config")
    vocab_size = inner.integer("vocab_size", 1, 1 << 24)
    clusters = 0
    kept = 0
    if fields.boolean("use_ordered_embeddings", False):
        clusters = fields.integer("num_centroids", 1, vocab_size, 2048)
        why = f"{clusters} does not divide {vocab_size} ids"
        fields.require(vocab_size % clusters == 0, "num_centroids", why)
        kept = fields.integer("centroid_intermediate_top_k", 1, clusters, 32)
    tied = fields.boolean("tie_word_embeddings", True)
    fields.require(
        tied, "tie_word_embeddings", "an assistant with a head of its own is not supported"
    )
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        inner.require(not inner.get(key), key, "an assistant with it is not supported")
    layers = inner.integer("num_hidden_layers", 1, 1024)
    shared = inner.integer("num_kv_shared_layers", 0, layers, layers) or layers
    inner.require(shared == layers, "num_kv_shared_layers", "every layer of an assistant shares")
    text: dict[str, object] = {"architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 0}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1}
    text |= {"tie_word_embeddings": True, "final_logit_softcapping": None}
    text |= {key: fields.get(key) for key in ("dtype", "torch_dtype") if key in fields}
    facts = AssistantConfig(
        fields.integer("backbone_hidden_size", 1, 1 << 20, 1536), clusters, kept
    )
    return facts, inner.with_values(text)
