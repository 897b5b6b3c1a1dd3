"""Kinds of layers in `config.json`: windows, layers without rotation, recurrent layers, MLPs.

Families have different keys for the same values; `family_keys` says which. Source: the
configurations of `lfm2`, `granitemoehybrid`, `nemotron_h`, `gemma4` and others in Hugging Face
transformers 5.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from spd.formats.block_config import (
    ATTENTION_KINDS,
    CONV_KINDS,
    LINEAR_KIND,
    MAX_PERIOD,
    MAX_POSITIONS,
    MLP_KINDS,
    SINGLE_BLOCK_KINDS,
    ConvConfig,
    DeltaConfig,
    Gemma4Config,
    RecurrentConfig,
)
from spd.formats.json_file import Fields

_KIND_ALIASES = {
    "mamba": LINEAR_KIND,
    "attention": ATTENTION_KINDS[0],
    "M": LINEAR_KIND,
    "*": ATTENTION_KINDS[0],
    "-": "mlp",
    "E": "moe",
}
"""Names of kinds in older files, and the letters of Nemotron-H."""
SWIGLU_LIMIT_KEYS = ("swiglu_limits", "swiglu_limits_shared")
"""Keys for the largest gate and up values of SwiGLU in each layer: of experts and of the others."""


def read_layer_kinds(
    fields: Fields,
    num_layers: int | None,
    supported: tuple[str, ...],
    key: str = "layer_types",
) -> list[str] | None:
    """Return each layer's kind; None without the key.

    The file has names, letters, or indices into `supported`; older names become the newer ones.
    """
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, list) and all(type(item) is int for item in value):
        names = [supported[index] for index in fields.integers(key, 0, len(supported) - 1)]
    else:
        file_names = list(value) if isinstance(value, str) else fields.strings(key)
        names = [
            _KIND_ALIASES[name] if _KIND_ALIASES.get(name) in supported else name
            for name in file_names
        ]
    reason = f"is not a list of {num_layers} names, one a layer"
    fields.require(num_layers in (None, len(names)), key, reason)
    for name in dict.fromkeys(names):
        fields.require_supported(key, name, supported)
    return names


def read_mlp_kinds(fields: Fields, num_layers: int) -> list[str] | None:
    """Return whether each layer's MLP is dense or sparse; None where no key lists it."""
    keys = ("mlp_layer_types", "moe_layer_freq")
    key = next((key for key in keys if isinstance(fields.get(key), list)), keys[0])
    return read_layer_kinds(fields, num_layers, MLP_KINDS, key)


def read_sliding_windows(
    fields: Fields, num_layers: int, family_keys: Container[str]
) -> tuple[int | None, ...]:
    """Return each layer's window, None for full attention; empty where no layer slides.

    family_keys: the keys that the family's files may leave out.
    """
    has_windows = "sliding_window" in family_keys
    supported = ATTENTION_KINDS if has_windows else ATTENTION_KINDS[:1]
    kinds = read_layer_kinds(fields, num_layers, supported)
    slides = [kind == ATTENTION_KINDS[1] for kind in kinds or ()]
    has_switch = "use_sliding_window" in (family_keys if has_windows else fields)
    window = fields.optional_integer("sliding_window", 0 if has_switch else 1, MAX_POSITIONS)
    if has_switch and not fields.boolean("use_sliding_window", False):
        window = None  # transformers writes 0 for a window that is switched off
    reason = f"{window}: sliding windows are not supported"
    fields.require(has_windows or window is None, "sliding_window", reason)
    if kinds is None or not (has_switch or "sliding_window_pattern" in fields):
        first = fields.integer("max_window_layers", 0, MAX_PERIOD, 0)
        period = fields.optional_integer("sliding_window_pattern", 1, MAX_PERIOD) or num_layers + 1
        layers = range(1, num_layers + 1)
        default = [bool(window) and layer > first and layer % period != 0 for layer in layers]
        agrees = kinds is None or slides == default
        fields.require(agrees, "layer_types", "is not what this architecture does")
        slides = default
    reason = f"names {ATTENTION_KINDS[1]}, but there is no sliding_window"
    fields.require(bool(window) or not any(slides), "layer_types", reason)
    return tuple(window if is_sliding else None for is_sliding in slides) if any(slides) else ()


def read_no_rope_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer that does not rotate; empty where all layers rotate.

    The file lists 0 for such a layer, or has a period: every n-th layer does not rotate.
    """
    key = "no_rope_layers"
    if key not in fields:
        period = fields.optional_integer("no_rope_layer_interval", 1, MAX_PERIOD)
        return tuple(layer % period == 0 for layer in range(1, num_layers + 1)) if period else ()
    rotates = fields.integers(key, 0, 1)
    reason = f"is not a list of {num_layers}, one a layer"
    fields.require(len(rotates) >= num_layers, key, reason)
    return tuple(not layer_rotates for layer_rotates in rotates[:num_layers])


def read_recurrent(
    fields: Fields,
    num_layers: int,
    kinds: tuple[str, ...],
    *,
    interleaved: bool = False,
    uses_delta_rule: bool = True,
) -> RecurrentConfig:
    """Return the configuration of the layers of the second of the `kinds`.

    The file names each layer's kind, or numbers the layers of attention, or has their period.
    interleaved, uses_delta_rule: fields of `DeltaConfig`.
    """
    keys = ("layer_types", "full_attn_idxs", "full_attention_interval")
    key = next((key for key in keys if key in fields), keys[0])
    layer_kinds = read_layer_kinds(fields, num_layers, kinds)
    layers = range(num_layers)
    if layer_kinds is None and key == "full_attn_idxs":
        attention_layers = fields.integers(key, 0, num_layers - 1)
        layer_kinds = [kinds[layer not in attention_layers] for layer in layers]
    elif layer_kinds is None:
        period = fields.integer(key, 1, MAX_PERIOD)
        layer_kinds = [kinds[bool((layer + 1) % period)] for layer in layers]
    for kind in kinds[:2]:
        reason = f"no layer is {kind}: a model without is not supported"
        fields.require(kind in layer_kinds, key, reason)
    is_recurrent = tuple(kind == kinds[1] for kind in layer_kinds)
    if kinds == CONV_KINDS:
        return fields.read_dataclass(ConvConfig, layers=is_recurrent)
    delta = fields.read_dataclass(
        DeltaConfig,
        layers=is_recurrent,
        block_kinds=tuple(layer_kinds) if kinds == SINGLE_BLOCK_KINDS else (),
        interleaved=interleaved,
        uses_delta_rule=uses_delta_rule,
    )
    reason = f"{delta.key_heads} does not divide {delta.value_heads} heads"
    fields.require(delta.value_heads % delta.key_heads == 0, "linear_num_key_heads", reason)
    return delta


def read_swiglu_limits(
    fields: Fields, num_layers: int
) -> tuple[tuple[float | None, float | None], ...]:
    """Return each layer's bounds of gated products: of experts, of other MLPs; None: no bound.

    Empty where the file has no bounds.
    """
    if not any(key in fields for key in SWIGLU_LIMIT_KEYS):
        return ()
    limits = [
        fields.numbers(key, num_layers, 0.0, 1e6) if key in fields else (0.0,) * num_layers
        for key in SWIGLU_LIMIT_KEYS
    ]
    return tuple((routed or None, other or None) for routed, other in zip(*limits, strict=True))


def read_gemma4(
    fields: Fields, num_layers: int, num_heads: int, sliding_windows: tuple[int | None, ...]
) -> Gemma4Config:
    """Return the configuration of the parts that only `gemma4_text` has."""
    windows = sliding_windows or (None,) * num_layers
    local_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, num_heads)
    full = _full_attention_fields(fields, windows)
    gemma4 = fields.read_dataclass(
        Gemma4Config, head_dim=full.even_integer("head_dim", 1024, 512), kv_heads=local_kv_heads
    )
    if gemma4.key_is_value:
        kv_heads = full.integer("num_key_value_heads", 1, num_heads, local_kv_heads)
        gemma4 = replace(gemma4, kv_heads=kv_heads)
    divides = num_heads % gemma4.kv_heads == 0
    full.require(divides, "num_key_value_heads", f"does not divide {num_heads} heads")
    unshared = windows[: max(0, num_layers - gemma4.num_shared_layers)]
    reason = "a layer that shares has none of its kind before it"
    fields.require(set(windows) == set(unshared), "num_kv_shared_layers", reason)
    fields.require(windows[-1] is None, "layer_types", "the last layer is not full_attention")
    fields.require("rope_parameters" in fields, "rope_parameters", "is missing")
    return gemma4


def _full_attention_fields(fields: Fields, windows: tuple[int | None, ...]) -> Fields:
    """Return the keys of heads of full attention.

    The file has separate keys for them, or the same values in each such layer of
    `per_layer_config`.
    """
    by_layer = fields.optional_nested("per_layer_config")
    if by_layer is None:
        keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        return fields.with_values(
            {key: fields.get(file_key) for key, file_key in keys.items()}, keys
        )
    full_layers = [str(layer) for layer, window in enumerate(windows) if window is None]
    fields.require(bool(full_layers), "layer_types", "the last layer is not full_attention")
    by_layer = Fields(
        by_layer.where,
        {key.lstrip("0") or "0": value for key, value in by_layer.values.items()},
    )
    values = [by_layer.values.get(layer) for layer in full_layers]
    agrees = all(value == values[0] for value in values)
    reason = "differs among layers of a kind, which is not supported"
    fields.require(agrees and set(by_layer.values) == set(full_layers), "per_layer_config", reason)
    return by_layer.nested(full_layers[0])
