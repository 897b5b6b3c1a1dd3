"""EAGLE-3 heads: Llama's one layer, whose attention reads a token and a state, and what surrounds it.

Which tensors a head has and what it takes; see `spd.formats.eagle3` for what they mean. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.eagle3 import EMBEDDING, FINAL_NORM, FUSION, LAYER_PREFIX, TOKEN_OFFSETS
from spd.formats.json_file import abbreviate
from spd.formats.model_config import ModelConfig
from spd.formats.names import HEAD
from spd.runtime.models import weights
from spd.runtime.models.destinations import Destination, Shard
from spd.runtime.models.families import usual_attention, usual_mlp
from spd.runtime.models.layouts import LayerLayout

if TYPE_CHECKING:
    from torch import Tensor

IGNORABLE = (TOKEN_OFFSETS, "t2d")  # what is read for itself, and what says nothing more
UNDERSTOOD = (LAYER_PREFIX, "fc", "input_norm", "norm")
"""Beginnings of names: what else begins so changes the states."""
INTEGERS = ("I64", "I32")


def layout(config: ModelConfig, without: tuple[str, ...] = ()) -> weights.ModelLayout:
    """One layer that reads pairs, and the tables around it but for some."""
    layer = LayerLayout(replace(usual_attention(config), reads_pairs=True), usual_mlp(config))
    return weights.ModelLayout(
        (layer,), tables=partial(tables, config, without), prefix=LAYER_PREFIX, shift=1
    )


def tables(config: ModelConfig, without: tuple[str, ...], shard: Shard) -> dict[str, Destination]:
    """What surrounds the layer, or a rank's part of it, under its full names."""
    facts = config.eagle3
    hidden = config.hidden_size
    assert facts is not None
    width = facts.target_hidden_size
    rows = facts.draft_vocab_size
    found = {
        "fuse": Destination.of({FUSION: (hidden, facts.num_aux_layers * width)}),
        "final_norm": Destination.of({FINAL_NORM: (hidden,)}),
        "head": weights.table_of_ids(HEAD, rows, hidden, shard),
    }
    if facts.norm_before_fc:
        found["aux_norm"] = Destination.of({"input_norm.weight": (facts.num_aux_layers * width,)})
    if facts.fc_norm:
        norms = {f"fc_norm.{i}.weight": (width,) for i in range(facts.num_aux_layers)}
        found["aux_norms"] = Destination.of(norms)
    if facts.private_embedding:
        found["embedding"] = weights.table_of_ids(EMBEDDING, config.vocab_size, hidden, shard)
    return {name: each for name, each in found.items() if name not in without}


def shares_head(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the target's output head is used: the checkpoint has none of its own and maps no ids."""
    facts = config.eagle3
    assert facts is not None
    mapped = TOKEN_OFFSETS in checkpoint.tensors or facts.draft_vocab_size != config.vocab_size
    return HEAD not in checkpoint.tensors and not mapped and not facts.private_embedding


def check_eagle3(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Names that a head does not use.

    Raises one CheckpointError for everything that it lacks, or has in another shape or dtype, and one for
    tensors that would change what it drafts and are not read.
    """
    assert config.eagle3 is not None
    rows = config.eagle3.draft_vocab_size
    without = ("head",) if shares_head(config, checkpoint) else ()
    expected = weights.expected_tensors(config, layout(config, without))
    if EMBEDDING in checkpoint.tensors:
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    if rows != config.vocab_size or TOKEN_OFFSETS in checkpoint.tensors:
        expected[TOKEN_OFFSETS] = (rows,)
    what = "tensors of the EAGLE-3 head"
    unused = check_tensors(checkpoint, expected, dtypes={TOKEN_OFFSETS: INTEGERS}, description=what)
    unread = [name for name in unused if name.startswith(UNDERSTOOD)]
    if unread:
        why = f"{checkpoint.folder}: {unread[0]}: this kind of EAGLE-3 head is not supported"
        reason = [f"{len(unread)} of its tensors are not read:", *abbreviate(unread)]
        raise CheckpointError(why, reason=reason)
    return [name for name in unused if name not in IGNORABLE]


def head_parts(config: ModelConfig, checkpoint: Checkpoint | None) -> list[weights.HeadPart]:
    """What loads a head, its one part. Raises CheckpointError.

    Without a checkpoint its ids are spread over the vocabulary.
    """
    facts = config.eagle3
    assert facts is not None
    rules = weights.HeadRules(
        normed_residual=facts.norm_before_residual, recycles_normed=facts.norm_output
    )
    shared = (
        {}
        if facts.private_embedding
        else {"embedding": weights.SharedTable(EMBEDDING, config.vocab_size)}
    )
    rows = facts.draft_vocab_size
    size = config.vocab_size
    if checkpoint is None:
        import torch

        ids = None if rows == size else torch.arange(rows) * size // rows
        return [weights.HeadPart(layout(config), rules, shared, ids)]
    weights.tell_unused(check_eagle3(config, checkpoint), checkpoint.folder)
    ids, order = _vocabulary(rows, size, checkpoint)
    if order is not None or shares_head(config, checkpoint):
        shared["head"] = weights.SharedTable(HEAD, rows, order)
    return [weights.HeadPart(layout(config, (*shared,)), rules, shared, ids)]


def _vocabulary(
    rows: int, size: int, checkpoint: Checkpoint
) -> tuple[Tensor | None, Tensor | None]:
    """The target's id of each of the head's, int64 and ascending, and the order in which they are stored.

    None where ids are the target's own, and where the order is this one.
    """
    import torch

    if TOKEN_OFFSETS not in checkpoint.tensors:
        return None, None
    found, order = (torch.arange(rows) + checkpoint.read(TOKEN_OFFSETS).long()).sort()
    if int(found[0]) < 0 or int(found[-1]) >= size or bool((found.diff() == 0).any()):
        why = f"tensor {TOKEN_OFFSETS}: does not lead to different token ids below {size:,}"
        reason = ["Each of its numbers is added to its own index."]
        raise CheckpointError(f"{checkpoint.folder}: {why}", reason=reason)
    ascending = torch.equal(order, torch.arange(rows))
    return None if rows == size else found, None if ascending else order
