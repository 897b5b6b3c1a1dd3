"""Gemma 4's assistants: the configuration of a drafter's folder.

An assistant drafts for one target. Its layers have queries only: they attend to the keys and values
of the target's last layer of their kind that stores its own, at a position that stays the same for
all drafts of a round. N is the newest token, behind the text that the target has read; h is the
target's state (after its final norm) of the position before:

    x = pre_projection([target's embedding of the token ; h])      rotary position of N for every draft
    n = norm(layers(x))
    logits of the next token = embedding · n                       of all ids, or of some: `num_clusters`
    h of the next draft = post_projection(n)

Source: `gemma4_assistant` of Hugging Face transformers 5, and the published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spd.formats.json_file import Fields
from spd.formats.names import GENERATION_FILE

ASSISTANT_ARCHITECTURE = "Gemma4AssistantForCausalLM"
"""The architecture that stands for all assistants."""
ARCHITECTURES = {
    ASSISTANT_ARCHITECTURE: "gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_unified_assistant",
}
"""Model types by architecture."""
TOKEN_ORDERING = "masked_embedding.token_ordering"
"""The tensor of token ids int64 [V], cluster by cluster."""


@dataclass(frozen=True)
class AssistantConfig:
    """An assistant's configuration beyond that of its decoder."""

    target_hidden_size: int
    num_clusters: int = 0
    """Clusters of token ids, each with a vector; 0: there are logits of all ids."""
    selected_clusters: int = 0
    """Clusters whose ids get logits: those with the best matching vectors."""


def suppressed_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the ids that an assistant does not draft from its generation_config.json."""
    path = folder / GENERATION_FILE
    return Fields.read(path).token_ids("suppress_tokens", vocab_size) if path.exists() else ()


def read_assistant(fields: Fields) -> tuple[AssistantConfig, Fields] | None:
    """Return an assistant's configuration, and its layers' as a Gemma 4's.

    None for another model's.
    """
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in ARCHITECTURES:
        return None
    fields.choice("model_type", (ARCHITECTURES[str(name)],))
    inner = fields.nested("text_config")
    num_clusters, selected_clusters = _read_clusters(fields, inner)
    tied = fields.boolean("tie_word_embeddings", True)
    reason = "an assistant with a head of its own is not supported"
    fields.require(tied, "tie_word_embeddings", reason)
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        inner.require(not inner.get(key), key, "an assistant with it is not supported")
    layers = inner.integer("num_hidden_layers", 1, 1024)
    shared = inner.integer("num_kv_shared_layers", 0, layers, layers) or layers
    inner.require(shared == layers, "num_kv_shared_layers", "every layer of an assistant shares")
    decoder: dict[str, object] = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 1,
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
    }
    decoder |= {key: fields.get(key) for key in ("dtype", "torch_dtype") if key in fields}
    target_hidden_size = fields.integer("backbone_hidden_size", 1, 1 << 20, 1536)
    config = AssistantConfig(target_hidden_size, num_clusters, selected_clusters)
    return config, inner.with_values(decoder)


def _read_clusters(fields: Fields, inner: Fields) -> tuple[int, int]:
    """Return the numbers of clusters and of those whose ids get logits; zeros without clusters."""
    vocab_size = inner.integer("vocab_size", 1, 1 << 24)
    if not fields.boolean("use_ordered_embeddings", False):
        return 0, 0
    clusters = fields.integer("num_centroids", 1, vocab_size, 2048)
    reason = f"{clusters} does not divide {vocab_size} ids"
    fields.require(vocab_size % clusters == 0, "num_centroids", reason)
    return clusters, fields.integer("centroid_intermediate_top_k", 1, clusters, 32)
