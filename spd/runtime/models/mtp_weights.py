"""What an MTP module's tensors are called, which shapes they have, and what they take. No torch here."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpFamily, MtpSource, check_mtp
from spd.kernels.linear.activation import SILU
from spd.runtime.models import family_layout
from spd.runtime.models.destinations import WHOLE, Destination, Shape, Shard
from spd.runtime.models.families import usual_mlp
from spd.runtime.models.layouts import LayerLayout, MlpLayout, MoeLayout, NoLayout
from spd.runtime.models.weights import HeadPart, HeadRules, ModelLayout, SharedTable, WeightForm, layout_bytes


def module_layer(config: ModelConfig, family: MtpFamily, shard: Shard = WHOLE) -> LayerLayout:
    """The decoder layer inside a module, or a rank's part of it: one like the target's own."""
    every = family_layout(config).layers
    layers = [layer for layer in every if layer.attention.cache]
    if isinstance(layers[-1].mlp, NoLayout):  # a block a layer: the module has one of each
        experts = [layer.mlp for layer in every if isinstance(layer.mlp, MoeLayout)]
        mlp = replace(experts[-1], pre_norm="post_attention_layernorm") if experts else layers[-1].mlp
        layers = [replace(layer, mlp=mlp) for layer in layers]
    if family.slides:
        dense = next((layer.mlp for layer in layers if isinstance(layer.mlp, MlpLayout)), usual_mlp(config))
        dense = replace(dense, act=SILU)
        layers = [replace(layer, mlp=dense) for layer in layers if getattr(layer.attention, "sliding", None)]
    return layers[family.like_layer].sharded(shard)


def _glue(source: MtpSource, module: int, shard: Shard) -> dict[str, Destination]:
    """What surrounds a module's layer, by the names of `HeadPart`; whole on each rank."""
    layout = source.layout
    shapes = source.glue_tensors(module)
    full = {key: layout.named(name, module) for key, name in layout.family.glue.items()}
    return {key: Destination.of({name: shapes[name]}) for key, name in full.items()}


def module_parts(source: MtpSource, modules: int, checkpoint: Checkpoint | None) -> list[HeadPart]:
    """What loads the first `modules` modules, seen to be in a checkpoint. Raises CheckpointError."""
    if checkpoint is not None:
        check_source(source, checkpoint)
    config, layout, family = source.config, source.layout, source.layout.family
    parts = []
    for number in range(modules):
        own = ModelLayout(
            (module_layer(config, family),),
            centred_norm=family.centred_norms,
            tables=partial(_glue, source, number),
            prefix=layout.layer_prefix(number),
            shift=number + 1,
        )
        masked = number + 1 if family.masks_first else -1
        rules = HeadRules(masked, family.hidden_first, family.recycles_normed)
        names = {key: layout.named(family.tables.get(key, ""), number) for key in ("embedding", "head")}
        shared = {key: SharedTable(name, config.vocab_size) for key, name in names.items()}
        parts.append(HeadPart(own, rules, shared))
    return parts


def module_bytes(source: MtpSource, module: int, dtype: str, form: WeightForm, shard: Shard = WHOLE) -> int:
    """Bytes of one module in a form, without embedding and head."""
    layout = module_parts(source, module + 1, None)[module].layout.sharded(shard)
    return layout_bytes(source.config, layout, dtype, form)


def module_position_size(config: ModelConfig, family: MtpFamily, shard: Shard = WHOLE) -> int:
    """Elements that one position takes in a module's cache."""
    return sum(math.prod(shape) for shape in module_layer(config, family, shard).attention.cache)


def check_source(source: MtpSource, checkpoint: Checkpoint) -> dict[str, Shape]:
    """Names and shapes of a head's tensors, seen to be there; see `check_mtp`."""
    return check_mtp(checkpoint, source, module_layer(source.config, source.layout.family).tensors())
