"""Gemma 4's assistants: layers of queries over their target's cache; see `spd.formats.assistant`."""

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
from spd.runtime.models.destinations import Destination, Shard

if TYPE_CHECKING:
    import torch

CENTROIDS = "masked_embedding.centroids.weight"


def layout(config: ModelConfig, reads: Mapping[bool, int] | None = None) -> weights.ModelLayout:
    """The layers, and the tables around them.

    reads: the target's layer whose cache those read that see everything (True), and those that slide.
    """
    made = families.gemma4(config, reads or {True: 0, False: 0})
    return replace(made, tables=partial(tables, config), embedding_scale=None, shift=-1)


def tables(config: ModelConfig, shard: Shard) -> dict[str, Destination]:
    """What surrounds the layers; with clusters the head's table is whole on every rank."""
    facts = config.assistant
    hidden = config.hidden_size
    size = config.vocab_size
    assert facts is not None
    wide = facts.target_hidden_size
    found = {
        "pre_projection": Destination.of({"pre_projection.weight": (hidden, 2 * wide)}),
        "post_projection": Destination.of({"post_projection.weight": (wide, hidden)}),
        "final_norm": Destination.of({FINAL_NORM: (hidden,)}),
    }
    if not facts.num_clusters:
        return {**found, "head": weights.table_of_ids(EMBEDDING, size, hidden, shard)}
    found["ordered"] = Destination.of({EMBEDDING: (size, hidden)})
    return {**found, "centroids": Destination.of({CENTROIDS: (facts.num_clusters, hidden)})}


def read_layers(target: weights.ModelLayout) -> dict[bool, int]:
    """Of a target's layers that see everything (True), and of those that slide, the last with its own cache.

    The windows must be those that the assistant was trained beside: nothing says so but its configuration.
    """
    own = enumerate(block for block in target.attending if isinstance(block, GqaLayout))
    return {block.scores.sliding is None: index for index, block in own if block.reads is None}


def check_assistant(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Names that an assistant does not use. Raises one CheckpointError for everything that it lacks."""
    what = "tensors of the assistant"
    facts = config.assistant
    assert facts is not None
    expected = weights.expected_tensors(config, layout(config))
    if facts.num_clusters:
        expected[TOKEN_ORDERING] = (config.vocab_size,)
    unused = check_tensors(
        checkpoint, expected, dtypes={TOKEN_ORDERING: ("I64", "I32")}, description=what
    )
    return [name for name in unused if name != TOKEN_ORDERING]


def parts(
    config: ModelConfig, target: weights.ModelLayout, checkpoint: Checkpoint | None
) -> list[weights.HeadPart]:
    """What loads an assistant, its one part. Raises CheckpointError."""
    whole = layout(config, read_layers(target))
    facts = config.assistant
    rules = weights.HeadRules()
    order = None
    assert facts is not None
    if checkpoint is not None:
        weights.tell_unused(check_assistant(config, checkpoint), checkpoint.folder)
        rules = weights.HeadRules(never=suppressed_ids(checkpoint.folder, config.vocab_size))
        order = _order(checkpoint, config.vocab_size) if facts.num_clusters else None
    elif facts.num_clusters:
        import torch

        order = torch.arange(config.vocab_size)
    return [weights.HeadPart(whole, rules, {}, order)]


def _order(checkpoint: Checkpoint, size: int) -> torch.Tensor:
    """Token ids int64 [V], cluster by cluster."""
    import torch

    order = checkpoint.read(TOKEN_ORDERING).long()
    if not torch.equal(order.sort().values, torch.arange(size)):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {TOKEN_ORDERING}: does not hold each id once"
        )
    return order
