"""What an MTP module's tensors are called, which shapes they have, and what they take. No torch here."""

from __future__ import annotations

import math

from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, check_tensors
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpFamily, MtpLayout, check_mtp
from spd.formats.mtp_folder import MtpSource
from spd.runtime.models import family_layout
from spd.runtime.models.destinations import Destination, Shape
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.shards import Cut, Shard
from spd.runtime.models.weight_form import DTYPE_BYTES, WeightForm
from spd.runtime.models.weights import FP8_DTYPE, stored_scales


def module_layer(config: ModelConfig, family: MtpFamily, shard: Shard | None = None) -> LayerLayout:
    """The decoder layer inside a module, or a rank's part of it: one like the target's own."""
    layer = family_layout(config).layers[family.like_layer]
    return layer if shard is None else layer.sharded(shard)


def module_cuts(source: MtpSource, modules: int, shard: Shard | None) -> dict[str, Cut]:
    """What a rank takes of the modules' tensors that it does not take whole."""
    layer = module_layer(source.config, source.layout.family, shard)
    return {
        source.layout.layer_prefix(number) + name: cut
        for number in range(modules)
        for destination in layer.destinations()
        for name, cut in destination.cuts
    }


def glue_destinations(layout: MtpLayout, module: int, hidden_size: int) -> dict[str, Destination]:
    """What surrounds a module's layer, by the names that `ModuleGlue` gives it, under its full names."""
    family = layout.family
    names = {
        "token_norm": family.token_norm,
        "hidden_norm": family.hidden_norm,
        "projection": family.projection,
        "final_norm": family.final_norm,
    }
    shapes = layout.glue_tensors(module, hidden_size)
    full = {key: layout.named(name, module) for key, name in names.items() if name is not None}
    return {key: Destination.of({name: shapes[name]}) for key, name in full.items()}


def module_bytes(
    source: MtpSource, module: int, dtype: str, form: WeightForm, shard: Shard | None = None
) -> int:
    """Bytes of one module in a form, without embedding and head."""
    config, layout = source.config, source.layout
    glue = (3 + 2 * config.hidden_size) * config.hidden_size * DTYPE_BYTES[dtype]
    layer, prefix = module_layer(config, layout.family, shard).destinations(), layout.layer_prefix(module)
    return glue + sum(form.bytes_of(each, prefix, dtype) for each in layer)


def module_position_size(config: ModelConfig, family: MtpFamily, shard: Shard | None = None) -> int:
    """Elements that one position takes in a module's cache."""
    return sum(math.prod(shape) for shape in module_layer(config, family, shard).attention.cache)


def check_source(source: MtpSource, checkpoint: Checkpoint) -> dict[str, Shape]:
    """Names and shapes of a head's tensors, seen to be there; see `check_mtp`."""
    config = source.config
    layer = {
        name: shape
        for destination in module_layer(config, source.layout.family).destinations()
        for name, shape in destination.parts
    }
    dtypes = [*FLOAT_DTYPES, *((FP8_DTYPE, "F8_E8M0") if config.fp8_block else ())]
    expected = check_mtp(checkpoint, source.layout, config.hidden_size, config.vocab_size, layer, dtypes)
    if config.fp8_block is not None:
        scales = stored_scales(checkpoint, expected, config.fp8_block)
        check_tensors(checkpoint, scales, dtypes=dtypes, what="scales of the MTP head")
    return expected
