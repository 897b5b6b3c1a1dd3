"""The layout of block drafters: Qwen3's layers, and the tables around them.

See `spd.formats.block` for the meaning of a drafter's tensors. No torch at import.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spd.errors import CheckpointError
from spd.formats.block import CONTEXT_NORM, LAYER_PREFIX, BlockConfig, SelectorConfig
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.eagle3 import EMBEDDING, FINAL_NORM, FUSION, TOKEN_OFFSETS
from spd.formats.json_file import abbreviate
from spd.formats.model_config import ModelConfig
from spd.formats.names import HEAD
from spd.runtime.models import families, weights
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.eagle3 import OFFSET_DTYPES, read_vocabulary
from spd.runtime.models.layouts import ConvolutionLayout
from spd.runtime.models.parameters import ParameterSpec, Shape, Shard

STATE_PREFIXES = (
    "layers.",
    "fc",
    "norm",
    "hidden_norm",
    "aux_hidden_norms",
    "candidate_selector",
    "markov_head",
    "confidence_head",
)
"""Prefixes of tensors that change the drafts; a drafter with unknown ones is refused."""
IGNORABLE_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that repeat others or the target's."""
CONFIDENCE_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")
"""Tensors of the confidence head, which are not read."""
MASK_EMBEDDING = "mask_embedding.pt"
"""A file of an embedding of the mask token, which some engines read."""


def block_of(config: ModelConfig) -> BlockConfig:
    """Return the drafter's part of its configuration."""
    assert config.block is not None
    return config.block


def layout(config: ModelConfig, without: tuple[str, ...] = ()) -> weights.ModelLayout:
    """Return the layers, and the tables around them; without: tables that the checkpoint lacks."""
    block = block_of(config)
    model = families.qwen3(config)
    layers = []
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, GqaLayout)
        slides = attention.scores.sliding is not None
        sees_block = block.sliding_sees_block if slides else block.full_sees_block
        scores = replace(attention.scores, sees_block=sees_block)
        layer = replace(layer, attention=replace(attention, scores=scores))
        if (convolution := block.convolution) is not None:
            shape = ConvolutionLayout(config.hidden_size, convolution.kernel, convolution.group)
            layer = replace(layer, convolutions=shape)
        layers.append(layer)
    return replace(
        model, layers=tuple(layers), tables=partial(tables, config, without), prefix=LAYER_PREFIX
    )


def tables(config: ModelConfig, without: tuple[str, ...], shard: Shard) -> dict[str, ParameterSpec]:
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
    if block.draft_vocab_size != config.vocab_size and "head" not in without:
        parameters["head"] = weights.vocabulary_table(HEAD, block.draft_vocab_size, hidden, shard)
    if block.selector is not None:
        parameters |= _selector_parameters(config, block.selector)
    return parameters | _context_parameters(config, shard) | _markov_parameters(config, shard)


def _selector_parameters(config: ModelConfig, selector: SelectorConfig) -> dict[str, ParameterSpec]:
    """Return the parameters of a selector, by the names that `CandidateSelector` reads."""
    table = (config.vocab_size, selector.rank)
    shapes: dict[str, tuple[str, Shape]] = {
        "predecessors": ("predecessor_codebook", table),
        "successors": ("successor_codebook", table),
        "selector_projection": (
            "hidden_projection.weight",
            (selector.rank, config.hidden_size),
        ),
    }
    return {
        key: ParameterSpec.from_shapes({f"candidate_selector.{name}": shape})
        for key, (name, shape) in shapes.items()
    }


def _markov_parameters(config: ModelConfig, shard: Shard) -> dict[str, ParameterSpec]:
    """Return the parameters of a DSpark's bias, by the names that `MarkovHead` reads."""
    block = block_of(config)
    markov = block.markov
    if markov is None:
        return {}
    prefix = "markov_head."
    rows = block.draft_vocab_size
    shapes: dict[str, dict[str, Shape]] = {
        "markov_embedding": {"markov_w1.weight": (config.vocab_size, markov.rank)}
    }
    if markov.kind != "vanilla":
        is_gated = markov.kind == "gated"
        name = "gate_proj" if is_gated else "joint_proj"
        pieces = 1 if is_gated else 3
        states = 1 if is_gated else 2
        width = states * markov.rank + config.hidden_size
        shapes["markov_mix"] = {f"{name}.weight": (pieces * markov.rank, width)}
        shapes["markov_mix_bias"] = {f"{name}.bias": (pieces * markov.rank,)}
    parameters = {
        key: ParameterSpec.from_shapes({prefix + name: shape for name, shape in named.items()})
        for key, named in shapes.items()
    }
    table = weights.vocabulary_table(f"{prefix}markov_w2.weight", rows, markov.rank, shard)
    return parameters | {"markov_output": table}


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
    """Check a drafter's checkpoint, and return the names of tensors that the drafter does not use.

    Raises one CheckpointError for all tensors that it lacks, or has in another shape or dtype, and
    one for tensors that are not read and would change its drafts.
    """
    name = block_of(config).name
    if (checkpoint.folder / MASK_EMBEDDING).exists():
        message = f"{checkpoint.folder / MASK_EMBEDDING}: an embedding of the mask token by itself"
        raise CheckpointError(f"{message} is not supported")
    block = block_of(config)
    without = () if HEAD in checkpoint.tensors else ("head",)
    expected = weights.expected_tensors(config, layout(config, without))
    optional = {EMBEDDING: config.vocab_size, HEAD: block.draft_vocab_size}
    expected |= {
        table: (rows, config.hidden_size)
        for table, rows in optional.items()
        if table in checkpoint.tensors
    }
    if block.draft_vocab_size != config.vocab_size:
        expected[TOKEN_OFFSETS] = (block.draft_vocab_size,)
    if block.has_confidence:
        rank = block.markov.rank if block.markov and block.confidence_reads_token else 0
        weight, bias = CONFIDENCE_TENSORS
        expected |= {weight: (1, config.hidden_size + rank), bias: (1,)}
    unused = check_tensors(
        checkpoint,
        expected,
        dtypes={TOKEN_OFFSETS: OFFSET_DTYPES},
        description=f"tensors of the {name} drafter",
    )
    unread = [tensor for tensor in unused if tensor.startswith(STATE_PREFIXES)]
    if unread:
        message = f"{checkpoint.folder}: {unread[0]}: this kind of {name} drafter is not supported"
        reason = [f"{len(unread)} of its tensors are not read:", *abbreviate(unread)]
        raise CheckpointError(message, reason=reason)
    ignorable = (*IGNORABLE_TENSORS, TOKEN_OFFSETS)
    return [tensor for tensor in unused if tensor not in ignorable]


def head_parts(config: ModelConfig, checkpoint: Checkpoint | None) -> list[weights.HeadPart]:
    """Return the one part of a drafter, checked against its checkpoint. Raises CheckpointError.

    Without a checkpoint its ids are spread evenly over the vocabulary.
    """
    rows = block_of(config).draft_vocab_size
    size = config.vocab_size
    shared = {"embedding": weights.SharedTable(EMBEDDING, size)}
    if rows == size:
        shared["head"] = weights.SharedTable(HEAD, size)
    rules = weights.HeadRules()
    if checkpoint is None:
        import torch

        ids = None if rows == size else torch.arange(rows) * size // rows
        return [weights.HeadPart(layout(config), rules, shared, ids)]
    weights.warn_unused_tensors(check_block(config, checkpoint), checkpoint.folder)
    ids, order = (None, None) if rows == size else read_vocabulary(rows, size, checkpoint)
    if order is not None:
        message = f"{checkpoint.folder}: tensor {TOKEN_OFFSETS}: its ids are not ascending"
        raise CheckpointError(message)
    if HEAD not in checkpoint.tensors:
        shared["head"] = weights.SharedTable(HEAD, rows, target_ids=ids)
    return [weights.HeadPart(layout(config, (*shared,)), rules, shared, ids)]
