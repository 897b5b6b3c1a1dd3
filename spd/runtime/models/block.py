"""The layout of block drafters: Qwen3's layers, and the tables around them.

See `spd.formats.block` for the meaning of a drafter's tensors. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spd.errors import CheckpointError
from spd.formats.block import CONTEXT_NORM, LAYER_PREFIX, BlockConfig
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.eagle3 import EMBEDDING, FINAL_NORM, FUSION
from spd.formats.json_file import abbreviate
from spd.formats.model_config import ModelConfig
from spd.formats.names import HEAD
from spd.runtime.models import families, weights
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.parameters import ParameterSpec, Shape, Shard

STATE_PREFIXES = ("layers.", "fc", "norm", "hidden_norm", "aux_hidden_norms", "candidate_selector")
"""Prefixes of tensors that change the drafts; a drafter with unknown ones is refused."""
MASK_EMBEDDING = "mask_embedding.pt"
"""A file of an embedding of the mask token, which some engines read."""


def block_of(config: ModelConfig) -> BlockConfig:
    """Return the drafter's part of its configuration."""
    assert config.block is not None
    return config.block


def layout(config: ModelConfig) -> weights.ModelLayout:
    """Return the layers, and the tables around them."""
    block = block_of(config)
    model = families.qwen3(config)
    layers = []
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, GqaLayout)
        slides = attention.scores.sliding is not None
        sees_block = block.sliding_sees_block if slides else block.full_sees_block
        scores = replace(attention.scores, sees_block=sees_block)
        layers.append(replace(layer, attention=replace(attention, scores=scores)))
    return replace(model, layers=tuple(layers), tables=partial(tables, config), prefix=LAYER_PREFIX)


def tables(config: ModelConfig, shard: Shard) -> dict[str, ParameterSpec]:
    """Return the parameters outside the layers, or a rank's part of them.

    Sources have full names.
    """
    block = block_of(config)
    hidden = config.hidden_size
    fused_width = block.num_aux_layers * block.target_hidden_size
    parameters = {
        "fuse": ParameterSpec.from_shapes({FUSION: (hidden, fused_width)}),
        "state_norm": ParameterSpec.from_shapes({CONTEXT_NORM: (hidden,)}),
        "final_norm": ParameterSpec.from_shapes(
            {FINAL_NORM: (hidden,)}, is_float32=block.logit_scale != 1.0
        ),
    }
    return parameters | _context_parameters(config, shard)


def _context_parameters(config: ModelConfig, shard: Shard) -> dict[str, ParameterSpec]:
    """Return the matrix of the keys and values of all layers, and its bias where there is one.

    It reads the target's states; the layers' own copies may be fused with norms and queries.
    """
    attention = families.default_attention(config).sharded(shard)
    key_rows = attention.key_shard.rows(attention.num_kv_heads * attention.head_dim)
    rows: dict[str, tuple[str, Shape]] = {
        "context": ("weight", (key_rows.num_rows, config.hidden_size))
    }
    if config.attention_bias:
        rows["context_bias"] = ("bias", (key_rows.num_rows,))
    parameters = {}
    for key, (ending, shape) in rows.items():
        names = [
            f"{LAYER_PREFIX.format(layer)}self_attn.{name}.{ending}"
            for layer in range(config.num_layers)
            for name in ("k_proj", "v_proj")
        ]
        parameters[key] = ParameterSpec.from_shapes(dict.fromkeys(names, shape), cut=key_rows.cut)
    return parameters


def check_block(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the names that a drafter does not use.

    Raises one CheckpointError for all tensors that it lacks, or has in another shape or dtype, and
    one for tensors that are not read and would change its drafts.
    """
    name = block_of(config).name
    if (checkpoint.folder / MASK_EMBEDDING).exists():
        message = f"{checkpoint.folder / MASK_EMBEDDING}: an embedding of the mask token by itself"
        raise CheckpointError(f"{message} is not supported")
    expected = weights.expected_tensors(config, layout(config))
    optional = {EMBEDDING: config.vocab_size, HEAD: config.vocab_size}
    expected |= {
        table: (rows, config.hidden_size)
        for table, rows in optional.items()
        if table in checkpoint.tensors
    }
    unused = check_tensors(checkpoint, expected, description=f"tensors of the {name} drafter")
    unread = [tensor for tensor in unused if tensor.startswith(STATE_PREFIXES)]
    if unread:
        message = f"{checkpoint.folder}: {unread[0]}: this kind of {name} drafter is not supported"
        reason = [f"{len(unread)} of its tensors are not read:", *abbreviate(unread)]
        raise CheckpointError(message, reason=reason)
    return unused


def head_parts(config: ModelConfig, checkpoint: Checkpoint | None) -> list[weights.HeadPart]:
    """Return the one part of a drafter, checked against its checkpoint. Raises CheckpointError."""
    if checkpoint is not None:
        weights.warn_unused_tensors(check_block(config, checkpoint), checkpoint.folder)
    shared = {
        "embedding": weights.SharedTable(EMBEDDING, config.vocab_size),
        "head": weights.SharedTable(HEAD, config.vocab_size),
    }
    return [weights.HeadPart(layout(config), weights.HeadRules(), shared)]
