"""The layout of EAGLE-3 heads: one Llama layer, whose attention reads a token and a state, and its
tables.

See `spd.formats.eagle3` for the meaning of a head's tensors. No torch at import.
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
from spd.runtime.models.families import default_attention, default_mlp
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.parameters import ParameterSpec, Shard

if TYPE_CHECKING:
    from torch import Tensor

IGNORABLE_TENSORS = (TOKEN_OFFSETS, "t2d")
"""Tensors that may be unused: one is read separately, the other repeats it."""
STATE_PREFIXES = (LAYER_PREFIX, "fc", "input_norm", "norm")
"""Prefixes of tensors that change the states; a head with unknown ones is refused."""
OFFSET_DTYPES = ("I64", "I32")
"""Dtypes of token offsets."""


def layout(config: ModelConfig, without: tuple[str, ...] = ()) -> weights.ModelLayout:
    """Return the layout of a head; without: tables that its checkpoint lacks."""
    layer = LayerLayout(
        replace(default_attention(config), has_paired_input=True), default_mlp(config)
    )
    return weights.ModelLayout(
        (layer,), tables=partial(tables, config, without), prefix=LAYER_PREFIX, shift=1
    )


def tables(config: ModelConfig, without: tuple[str, ...], shard: Shard) -> dict[str, ParameterSpec]:
    """Return the parameters outside the layer, or a rank's part of them.

    Sources have full names.
    """
    eagle3 = config.eagle3
    hidden = config.hidden_size
    assert eagle3 is not None
    width = eagle3.target_hidden_size
    rows = eagle3.draft_vocab_size
    parameters = {
        "fuse": ParameterSpec.from_shapes({FUSION: (hidden, eagle3.num_aux_layers * width)}),
        "final_norm": ParameterSpec.from_shapes({FINAL_NORM: (hidden,)}),
        "head": weights.vocabulary_table(HEAD, rows, hidden, shard),
    }
    if eagle3.norm_before_fc:
        parameters["aux_norm"] = ParameterSpec.from_shapes(
            {"input_norm.weight": (eagle3.num_aux_layers * width,)}
        )
    if eagle3.fc_norm:
        norms = {f"fc_norm.{i}.weight": (width,) for i in range(eagle3.num_aux_layers)}
        parameters["aux_norms"] = ParameterSpec.from_shapes(norms)
    if eagle3.private_embedding:
        parameters["embedding"] = weights.vocabulary_table(
            EMBEDDING, config.vocab_size, hidden, shard
        )
    return {name: spec for name, spec in parameters.items() if name not in without}


def shares_head(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """True if the target's output head is used, or its rows of the head's ids: the checkpoint has
    none.
    """
    assert config.eagle3 is not None
    return HEAD not in checkpoint.tensors and not config.eagle3.private_embedding


def check_eagle3(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Check a head's checkpoint, and return the names of tensors that the head does not use.

    Raises one CheckpointError for all tensors that it lacks, or has in another shape or dtype, and
    one for tensors that are not read and would change its drafts.
    """
    assert config.eagle3 is not None
    rows = config.eagle3.draft_vocab_size
    without = ("head",) if shares_head(config, checkpoint) else ()
    expected = weights.expected_tensors(config, layout(config, without))
    if EMBEDDING in checkpoint.tensors:
        expected[EMBEDDING] = (config.vocab_size, config.hidden_size)
    if rows != config.vocab_size or TOKEN_OFFSETS in checkpoint.tensors:
        expected[TOKEN_OFFSETS] = (rows,)
    unused = check_tensors(
        checkpoint,
        expected,
        dtypes={TOKEN_OFFSETS: OFFSET_DTYPES},
        description="tensors of the EAGLE-3 head",
    )
    unread = [name for name in unused if name.startswith(STATE_PREFIXES)]
    if unread:
        message = f"{checkpoint.folder}: {unread[0]}: this kind of EAGLE-3 head is not supported"
        reason = [f"{len(unread)} of its tensors are not read:", *abbreviate(unread)]
        raise CheckpointError(message, reason=reason)
    return [name for name in unused if name not in IGNORABLE_TENSORS]


def head_parts(config: ModelConfig, checkpoint: Checkpoint | None) -> list[weights.HeadPart]:
    """Return the one part of a head, checked against its checkpoint; warn of tensors not used.

    Its ids of a smaller vocabulary are read from the checkpoint; without one they are spread evenly
    over the target's. Raises CheckpointError.
    """
    eagle3 = config.eagle3
    assert eagle3 is not None
    rules = weights.HeadRules(
        normed_residual=eagle3.norm_before_residual, recycles_normed=eagle3.norm_output
    )
    shared = (
        {}
        if eagle3.private_embedding
        else {"embedding": weights.SharedTable(EMBEDDING, config.vocab_size)}
    )
    rows = eagle3.draft_vocab_size
    size = config.vocab_size
    if checkpoint is None:
        import torch

        ids = None if rows == size else torch.arange(rows) * size // rows
        return [weights.HeadPart(layout(config), rules, shared, ids)]
    weights.warn_unused_tensors(check_eagle3(config, checkpoint), checkpoint.folder)
    ids, order = read_vocabulary(rows, size, checkpoint)
    if shares_head(config, checkpoint):
        shared["head"] = weights.SharedTable(HEAD, rows, target_ids=ids)
    elif order is not None:
        shared["head"] = weights.SharedTable(HEAD, rows, order)
    return [weights.HeadPart(layout(config, (*shared,)), rules, shared, ids)]


def read_vocabulary(
    rows: int, size: int, checkpoint: Checkpoint
) -> tuple[Tensor | None, Tensor | None]:
    """Return the target's ids of the head's rows, int64 and ascending, and the order of the stored
    rows.

    The ids are None where they are the target's, the order where rows are stored in it.
    """
    import torch

    if TOKEN_OFFSETS not in checkpoint.tensors:
        return None, None
    parameters, order = (torch.arange(rows) + checkpoint.read(TOKEN_OFFSETS).long()).sort()
    if (
        int(parameters[0]) < 0
        or int(parameters[-1]) >= size
        or bool((parameters.diff() == 0).any())
    ):
        message = f"tensor {TOKEN_OFFSETS}: does not lead to different token ids below {size:,}"
        reason = ["Each of its numbers is added to its own index."]
        raise CheckpointError(f"{checkpoint.folder}: {message}", reason=reason)
    ascending = torch.equal(order, torch.arange(rows))
    return None if rows == size else parameters, None if ascending else order
