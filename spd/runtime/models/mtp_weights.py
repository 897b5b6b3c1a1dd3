"""What an MTP module's tensors are called, which shapes they have, and what they take. No torch here."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import abbreviate
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import HOW_TO_ATTACH, MtpSource
from spd.formats.mtp_layout import MtpFamily
from spd.formats.quantized import UNUSED_SUFFIXES
from spd.kernels.linear.activation import SILU
from spd.runtime.models import family_layout, weights
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.destinations import MLP_NORMS, WHOLE, Destination, Shape, Shard
from spd.runtime.models.families import usual_mlp
from spd.runtime.models.layouts import LayerLayout, MlpLayout, MoeLayout, NoLayout


def module_layer(config: ModelConfig, family: MtpFamily, shard: Shard = WHOLE) -> LayerLayout:
    """The decoder layer inside a module, or a rank's part of it: one like the target's own."""
    every = family_layout(config).layers
    layers = [layer for layer in every if layer.attention.cache]
    if isinstance(layers[-1].mlp, NoLayout):  # a block a layer: the module has one of each
        experts = [layer.mlp for layer in every if isinstance(layer.mlp, MoeLayout)]
        mlp = replace(experts[-1], norms=MLP_NORMS) if experts else layers[-1].mlp
        layers = [replace(layer, mlp=mlp) for layer in layers]
    if family.uses_sliding_window:
        dense = next(
            (layer.mlp for layer in layers if isinstance(layer.mlp, MlpLayout)), usual_mlp(config)
        )
        dense = replace(dense, act=SILU)
        layers = [
            replace(layer, mlp=dense)
            for layer in layers
            if isinstance(layer.attention, GqaLayout) and layer.attention.scores.sliding
        ]
    return layers[family.template_layer].sharded(shard)


def _glue(source: MtpSource, module: int, shard: Shard) -> dict[str, Destination]:
    """What surrounds a module's layer, by the names of `HeadPart`; whole on each rank."""
    hidden = source.config.hidden_size
    named = source.layout.tensor_name
    names = source.layout.family.module_tensors.items()
    shapes = {"projection": (hidden, 2 * hidden)}
    return {
        key: Destination.of({named(name, module): shapes.get(key, (hidden,))})
        for key, name in names
    }


def module_parts(
    source: MtpSource, modules: int, checkpoint: Checkpoint | None
) -> list[weights.HeadPart]:
    """What loads the first `modules` modules, seen to be in a checkpoint. Raises CheckpointError."""
    if checkpoint is not None:
        check_source(source, checkpoint)
    family = source.layout.family
    layout = source.layout
    config = source.config
    parts = []
    for number in range(modules):
        own = weights.ModelLayout(
            (module_layer(config, family),),
            centred_norm=family.zero_centered_norms,
            tables=partial(_glue, source, number),
            prefix=layout.layer_prefix(number),
            shift=number + 1,
        )
        masked = number + 1 if family.masks_first_embedding else -1
        rules = weights.HeadRules(masked, family.hidden_first, family.feeds_back_normed)
        names = {
            key: layout.tensor_name(family.private_tables.get(key, ""), number)
            for key in ("embedding", "head")
        }
        shared = {key: weights.SharedTable(name, config.vocab_size) for key, name in names.items()}
        parts.append(weights.HeadPart(own, rules, shared))
    return parts


def module_bytes(
    source: MtpSource, module: int, dtype: str, form: weights.WeightForm, shard: Shard = WHOLE
) -> int:
    """Bytes of one module in a form, without embedding and head."""
    layout = module_parts(source, module + 1, None)[module].layout.sharded(shard)
    return weights.layout_bytes(source.config, layout, dtype, form)


def module_position_size(config: ModelConfig, family: MtpFamily, shard: Shard = WHOLE) -> int:
    """Elements that one position takes in a module's cache."""
    return sum(math.prod(shape) for shape in module_layer(config, family, shard).attention.cache)


def check_source(source: MtpSource, checkpoint: Checkpoint) -> dict[str, Shape]:
    """Names and shapes of all that the head's modules need, seen to be there, and nothing else of it."""
    config = source.config
    layout = source.layout
    expected = dict[str, Shape]()
    for part in module_parts(source, layout.modules, None):
        expected |= weights.expected_tensors(config, part.layout)
        copies = {table.own: (table.rows, config.hidden_size) for table in part.shared.values()}
        expected |= {name: shape for name, shape in copies.items() if name in checkpoint.tensors}
    what = "tensors of the MTP head"
    kinds = dict[str, tuple[str, ...]]()
    if config.quantization is not None:
        expected, kinds = config.quantization.stored_tensors(expected, checkpoint.tensors)
    unexpected = check_tensors(
        checkpoint, expected, dtypes=kinds, description=what, fix=HOW_TO_ATTACH
    )
    own = (name for name in unexpected if layout.contains(name))
    foreign = [name for name in own if not name.endswith((*UNUSED_SUFFIXES, ".weight_scale"))]
    if foreign:
        why = "tensors of the MTP head belong to none of its layers as"
        why = f"{checkpoint.folder}: {len(foreign)} {why} {layout.family.name} has them; first: {foreign[0]}"
        raise CheckpointError(why, reason=abbreviate(foreign), fix=["--spec ngram"])
    return expected
