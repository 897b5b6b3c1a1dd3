"""Which layers see a sliding window only: two spellings, and what each family makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from spd.formats.json_file import Fields, shown

MAX_WINDOW, MAX_PERIOD = 1 << 27, 1024
KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class SlidingRule:
    """How a family's code chooses the layers that slide. Source: the configurations of transformers 5."""

    window: int | None = None
    """What an absent `sliding_window` counts as; null is no window."""
    switched: bool = False
    """Whether `use_sliding_window` turns it on, for the layers from `max_window_layers` on."""
    period: int | None = None
    """Of so many layers the last sees everything; None: all slide. `sliding_window_pattern` overrides it."""
    listed: bool = True
    """Whether the code follows `layer_types`, or they may only say what it does anyway."""


def read_sliding(fields: Fields, num_layers: int, rule: SlidingRule) -> tuple[int | None, ...]:
    """Each layer's window, None where it sees everything; empty where no layer slides.

    Raises CheckpointError for kinds of layers that nobody knows, and for lists that contradict the rest.
    """
    window = fields.optional_integer("sliding_window", 1, MAX_WINDOW)
    if "sliding_window" not in fields.values:
        window = rule.window
    if rule.switched and not fields.boolean("use_sliding_window", False):
        window = None
    slides = _listed(fields, num_layers)
    usual = [window is not None and _slides(fields, rule, layer) for layer in range(num_layers)]
    if slides is None:
        slides = usual
    elif not rule.listed and slides != usual:
        raise fields.refused("layer_types", "is not what this architecture does with its sliding_window")
    if any(slides) and window is None:
        raise fields.refused("layer_types", "names sliding_attention, but there is no sliding_window")
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def _slides(fields: Fields, rule: SlidingRule, layer: int) -> bool:
    if rule.switched:
        return layer >= fields.integer("max_window_layers", 0, MAX_PERIOD, 28)
    if rule.period is None:
        return True
    return bool((layer + 1) % fields.integer("sliding_window_pattern", 1, MAX_PERIOD, rule.period))


def _listed(fields: Fields, num_layers: int) -> list[bool] | None:
    names = fields.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != num_layers:
        raise fields.refused("layer_types", f"is not a list of {num_layers} names, one a layer")
    for name in names:
        if name not in KINDS:
            raise fields.refused("layer_types", f"{shown(name)} is not supported ({', '.join(KINDS)} are)")
    return [name == KINDS[1] for name in names]
