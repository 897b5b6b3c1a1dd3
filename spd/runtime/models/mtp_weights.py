"""The layouts of MTP modules, and the tensors that they need of a checkpoint. No torch here."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import abbreviate
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import HEAD_FIXES, MtpSource
from spd.formats.mtp_layout import MtpFamily
from spd.formats.quantized import UNUSED_SUFFIXES
from spd.kernels.linear.activation import SILU
from spd.runtime.models import family_layout, weights
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.families import default_mlp
from spd.runtime.models.layouts import EmptyLayout, LayerLayout, MlpLayout, MoeLayout
from spd.runtime.models.parameters import MLP_NORMS, UNSHARDED, ParameterSpec, Shape, Shard
from spd.runtime.models.weight_forms import WeightForm


def module_layer(config: ModelConfig, family: MtpFamily, shard: Shard = UNSHARDED) -> LayerLayout:
    """Return the decoder layer inside a module, or a rank's part of it: a copy of one of the
    target's.
    """
    target_layers = family_layout(config).layers
    layers = [layer for layer in target_layers if layer.attention.cache]
    if isinstance(layers[-1].mlp, EmptyLayout):
        # The target's layers have one block each; the module has two.
        experts = [layer.mlp for layer in target_layers if isinstance(layer.mlp, MoeLayout)]
        mlp = replace(experts[-1], norms=MLP_NORMS) if experts else layers[-1].mlp
        layers = [replace(layer, mlp=mlp) for layer in layers]
    if family.uses_sliding_window:
        dense = next(
            (layer.mlp for layer in layers if isinstance(layer.mlp, MlpLayout)), default_mlp(config)
        )
        dense = replace(dense, act=SILU)
        layers = [
            replace(layer, mlp=dense)
            for layer in layers
            if isinstance(layer.attention, GqaLayout) and layer.attention.scores.sliding
        ]
    return layers[family.template_layer].sharded(shard)


def _module_tables(source: MtpSource, module: int, shard: Shard) -> dict[str, ParameterSpec]:
    """Return the parameters outside a module's layer, by the names of `HeadPart`.

    Whole on each rank.
    """
    hidden = source.config.hidden_size
    layout = source.layout
    shapes = {"projection": (hidden, 2 * hidden)}
    return {
        key: ParameterSpec.from_shapes(
            {layout.tensor_name(name, module): shapes.get(key, (hidden,))}
        )
        for key, name in layout.family.module_tensors.items()
    }


def module_parts(
    source: MtpSource, modules: int, checkpoint: Checkpoint | None
) -> list[weights.HeadPart]:
    """Return the first `modules` modules, checked against a checkpoint. Raises CheckpointError."""
    if checkpoint is not None:
        check_mtp_source(source, checkpoint)
    family = source.layout.family
    layout = source.layout
    config = source.config
    parts = []
    for number in range(modules):
        module_layout = weights.ModelLayout(
            (module_layer(config, family),),
            centred_norm=family.zero_centered_norms,
            tables=partial(_module_tables, source, number),
            prefix=layout.layer_prefix(number),
            shift=number + 1,
        )
        masked_slot = number + 1 if family.masks_first_embedding else -1
        rules = weights.HeadRules(masked_slot, family.hidden_first, family.feeds_back_normed)
        shared = {
            key: weights.SharedTable(
                layout.tensor_name(family.private_tables.get(key, ""), number), config.vocab_size
            )
            for key in ("embedding", "head")
        }
        parts.append(weights.HeadPart(module_layout, rules, shared))
    return parts


def count_module_bytes(
    source: MtpSource, module: int, dtype: str, form: WeightForm, shard: Shard = UNSHARDED
) -> int:
    """Return the bytes of one module in a form, without embedding and head."""
    layout = module_parts(source, module + 1, None)[module].layout.sharded(shard)
    return weights.count_layout_bytes(source.config, layout, dtype, form)


def module_position_elements(
    config: ModelConfig, family: MtpFamily, shard: Shard = UNSHARDED
) -> int:
    """Return the number of elements of one position in a module's cache."""
    return sum(math.prod(shape) for shape in module_layer(config, family, shard).attention.cache)


def check_mtp_source(source: MtpSource, checkpoint: Checkpoint) -> dict[str, Shape]:
    """Check that a checkpoint has all tensors of an MTP head's modules, and no others of theirs.

    Returns their names and shapes. Raises CheckpointError otherwise.
    """
    config = source.config
    layout = source.layout
    expected = dict[str, Shape]()
    for part in module_parts(source, layout.modules, None):
        expected |= weights.expected_tensors(config, part.layout)
        copies = {
            table.checkpoint_name: (table.rows, config.hidden_size)
            for table in part.shared.values()
        }
        expected |= {name: shape for name, shape in copies.items() if name in checkpoint.tensors}
    dtypes = dict[str, tuple[str, ...]]()
    if config.quantization is not None:
        expected, dtypes = config.quantization.stored_tensors(expected, checkpoint.tensors)
    unexpected = check_tensors(
        checkpoint,
        expected,
        dtypes=dtypes,
        description="tensors of the MTP head",
        fix=HEAD_FIXES,
    )
    head_names = (name for name in unexpected if layout.contains(name))
    foreign = [
        name for name in head_names if not name.endswith((*UNUSED_SUFFIXES, ".weight_scale"))
    ]
    if foreign:
        message = (
            f"{checkpoint.folder}: {len(foreign)} tensors of the MTP head belong to none of its layers as"
            f" {layout.family.name} has them; first: {foreign[0]}"
        )
        raise CheckpointError(message, reason=abbreviate(foreign), fix=["--spec ngram"])
    return expected
