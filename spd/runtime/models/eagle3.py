"""EAGLE-3 heads: Llama's one layer, whose attention reads a token and a state, and what surrounds it.

Which tensors a head has and what it takes; see `spd.formats.eagle3` for what they mean. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.eagle3 import EMBEDDING, FINAL_NORM, FUSE, HEAD, LAYER_PREFIXES, OFFSETS
from spd.formats.json_file import listed
from spd.formats.model_config import ModelConfig, read_model_config
from spd.runtime.models import llama
from spd.runtime.models.destinations import NOTHING, Destination, Shape
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.shards import Cut, Shard
from spd.runtime.models.weights import ModelLayout, is_ignorable, table_destinations

IGNORABLE = (OFFSETS, "t2d")
"""What is read for itself, and what says nothing more."""
UNDERSTOOD = ("fc", "input_norm", "norm")
"""Beginnings of names outside the layer: what else begins so changes the states."""
INTEGERS = ("I64", "I32")


def layout(config: ModelConfig) -> ModelLayout:
    """One layer that reads pairs."""
    layer = LayerLayout(replace(llama.attention(config), reads_pairs=True), llama.mlp(config))
    return ModelLayout((layer,), tables=partial(tables, config))


def head_rows(config: ModelConfig) -> int:
    """Ids that a head knows."""
    assert config.eagle3 is not None
    return config.eagle3.draft_vocab_size or config.vocab_size


def own_embedding(config: ModelConfig) -> bool:
    """Whether a head needs embeddings of its own, since the target's are of another size."""
    assert config.eagle3 is not None
    return config.eagle3.target_hidden_size != config.hidden_size


def holds_embedding(folder: Path) -> bool:
    """Whether a folder is a head with embeddings in its checkpoint. Reads headers."""
    if read_model_config(folder).eagle3 is None:
        return False
    with Checkpoint.open(folder) as checkpoint:
        return EMBEDDING in checkpoint.tensors


def tables(config: ModelConfig, shard: Shard | None) -> dict[str, Destination]:
    """What surrounds the layer, or a rank's part of it, under its full names."""
    facts, hidden = config.eagle3, config.hidden_size
    assert facts is not None
    width, rows = facts.target_hidden_size, head_rows(config)
    found = {
        "fuse": Destination.of({FUSE: (hidden, facts.num_aux * width)}),
        "final_norm": Destination.of({FINAL_NORM: (hidden,)}),
        "head": _divided(HEAD, rows, hidden, shard),
    }
    if facts.norm_before_fc:
        found["aux_norm"] = Destination.of({"input_norm.weight": (facts.num_aux * width,)})
    if facts.fc_norm:
        norms = {f"fc_norm.{i}.weight": (width,) for i in range(facts.num_aux)}
        found["aux_norms"] = Destination.of(norms)
    if own_embedding(config):
        found["embedding"] = _divided(EMBEDDING, config.vocab_size, hidden, shard)
    return found


def _divided(name: str, rows: int, columns: int, shard: Shard | None) -> Destination:
    """A table by ids, of which each rank has its own."""
    first, end = (0, rows) if shard is None else shard.ids(rows)
    cuts = NOTHING if shard is None else {name: Cut(0, ((first, end),))}
    return Destination.of({name: (end - first, columns)}, cuts=cuts)


DUMMY_PREFIX = LAYER_PREFIXES[0]


def layer_prefix(checkpoint: Checkpoint) -> str:
    """What stands before the layer's names in a head's checkpoint."""
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(prefix) for name in checkpoint.tensors):
            return prefix
    return LAYER_PREFIXES[0]


def cuts(config: ModelConfig, layout: ModelLayout, prefix: str) -> dict[str, Cut]:
    """What a rank takes of tensors that it does not take whole."""
    outside = {name: cut for each in table_destinations(config, layout).values() for name, cut in each.cuts}
    inside = (pair for each in layout.layers[0].destinations() for pair in each.cuts)
    return outside | {prefix + name: cut for name, cut in inside}


def shares_head(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the head that makes logits is the target's: there is none, and nothing that renames ids."""
    assert config.eagle3 is not None
    known = config.eagle3.draft_vocab_size in (None, config.vocab_size)
    return HEAD not in checkpoint.tensors and known and not own_embedding(config)


def check_eagle3(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Names that a head does not use.

    Raises one CheckpointError for everything that it lacks, or has in another shape or dtype, and one for
    tensors that would change what it drafts and are not read.
    """
    prefix, rows = layer_prefix(checkpoint), head_rows(config)
    expected: dict[str, Shape] = {
        name: shape for each in tables(config, None).values() for name, shape in each.parts
    }
    if shares_head(config, checkpoint):
        del expected[HEAD]
    if EMBEDDING in checkpoint.tensors:
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    for layer in layout(config).layers:
        expected |= {prefix + name: shape for each in layer.destinations() for name, shape in each.parts}
    unused = check_tensors(checkpoint, expected, ignorable=is_ignorable, what="tensors of the EAGLE-3 head")
    if rows != config.vocab_size or OFFSETS in checkpoint.tensors:
        check_tensors(checkpoint, {OFFSETS: (rows,)}, dtypes=INTEGERS, what="tensors of the EAGLE-3 head")
    unread = [name for name in unused if name.startswith((prefix, *UNDERSTOOD))]
    if unread:
        raise CheckpointError(
            f"{checkpoint.folder}: {unread[0]}: this kind of EAGLE-3 head is not supported",
            reason=[f"{len(unread)} of its tensors are not read:", *listed(unread)],
        )
    return [name for name in unused if name not in IGNORABLE]
