"""Gemma 4's assistants: layers of queries over the target's cache; see `spd.formats.assistant`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spd.errors import CheckpointError
from spd.formats.assistant import TOKEN_ORDERING, suppressed_ids
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.model_config import ModelConfig
from spd.formats.names import EMBEDDING, FINAL_NORM
from spd.runtime.models import families, weights
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.parameters import ParameterSpec, Shard

if TYPE_CHECKING:
    import torch

CENTROIDS_TENSOR = "masked_embedding.centroids.weight"


def layout(
    config: ModelConfig, cache_sources: Mapping[bool, int] | None = None
) -> weights.ModelLayout:
    """Return the layers, and the tables around them.

    cache_sources: the target's layers whose caches are read, by full attention (True) and by
    sliding layers.
    """
    model = families.gemma4(config, cache_sources or {True: 0, False: 0})
    return replace(model, tables=partial(tables, config), embedding_scale=None, shift=-1)


def tables(config: ModelConfig, shard: Shard) -> dict[str, ParameterSpec]:
    """Return the parameters outside the layers.

    With clusters the head's table is whole on every rank.
    """
    assistant = config.assistant
    hidden = config.hidden_size
    size = config.vocab_size
    assert assistant is not None
    target_hidden = assistant.target_hidden_size
    pre_shape = (hidden, 2 * target_hidden)
    post_shape = (target_hidden, hidden)
    parameters = {
        "pre_projection": ParameterSpec.from_shapes({"pre_projection.weight": pre_shape}),
        "post_projection": ParameterSpec.from_shapes({"post_projection.weight": post_shape}),
        "final_norm": ParameterSpec.from_shapes({FINAL_NORM: (hidden,)}),
    }
    if not assistant.num_clusters:
        parameters["head"] = weights.vocabulary_table(EMBEDDING, size, hidden, shard)
        return parameters
    head_table = ParameterSpec.from_shapes({EMBEDDING: (size, hidden)})
    centroids = ParameterSpec.from_shapes({CENTROIDS_TENSOR: (assistant.num_clusters, hidden)})
    parameters["head_table"] = replace(head_table, is_unquantized=True)
    parameters["centroids"] = replace(centroids, is_unquantized=True)
    return parameters


def find_cache_sources(target: weights.ModelLayout) -> dict[bool, int]:
    """Return the last layers with caches among a target's full-attention (True) and sliding layers.

    Windows must be those that the assistant was trained with; only its configuration states them.
    """
    blocks = (block for block in target.attention_blocks if isinstance(block, GqaLayout))
    return {
        block.scores.sliding is None: index
        for index, block in enumerate(blocks)
        if block.cache_source is None
    }


def check_assistant(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Check an assistant's checkpoint, and return the names of tensors that it does not use.

    Raises one CheckpointError for all that it lacks.
    """
    description = "tensors of the assistant"
    assert config.assistant is not None
    expected = weights.expected_tensors(config, layout(config))
    if config.assistant.num_clusters:
        expected[TOKEN_ORDERING] = (config.vocab_size,)
    unused = check_tensors(
        checkpoint, expected, dtypes={TOKEN_ORDERING: ("I64", "I32")}, description=description
    )
    return [name for name in unused if name != TOKEN_ORDERING]


def head_parts(
    config: ModelConfig, target: weights.ModelLayout, checkpoint: Checkpoint | None
) -> list[weights.HeadPart]:
    """Return the one part of an assistant, checked against its checkpoint.

    Raises CheckpointError.
    """
    model = layout(config, find_cache_sources(target))
    assistant = config.assistant
    rules = weights.HeadRules()
    order = None
    assert assistant is not None
    if checkpoint is not None:
        weights.warn_unused_tensors(check_assistant(config, checkpoint), checkpoint.folder)
        suppressed = suppressed_ids(checkpoint.folder, config.vocab_size)
        rules = weights.HeadRules(suppressed_ids=suppressed)
        order = _read_token_order(checkpoint, config.vocab_size) if assistant.num_clusters else None
    elif assistant.num_clusters:
        import torch

        order = torch.arange(config.vocab_size)
    return [weights.HeadPart(model, rules, {}, order)]


def _read_token_order(checkpoint: Checkpoint, size: int) -> torch.Tensor:
    """Read the token ids int64 [V], cluster by cluster.

    Raises CheckpointError unless each id of the vocabulary stands there once.
    """
    import torch

    order = checkpoint.read(TOKEN_ORDERING).long()
    if not torch.equal(order.sort().values, torch.arange(size)):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {TOKEN_ORDERING}: does not hold each id once"
        )
    return order
