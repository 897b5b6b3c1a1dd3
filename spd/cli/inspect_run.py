"""What a run of an inspected model would do: who proposes tokens and why, and the memory it takes.

The same rules and sums as the plan's, told without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.errors import SpdError

if TYPE_CHECKING:
    from spd.formats.checkpoint import Checkpoint
    from spd.runtime.config import EngineConfig
    from spd.runtime.drafter import Drafter
    from spd.runtime.memory import MemoryShape

MARGIN = " " * 10
CONTEXTS = (4096, 16384, 32768, 65536, 131072)
"""Lengths whose memory is told, as far as the model goes."""


@dataclass(frozen=True)
class Choice:
    """What `--spec auto` comes to; without a drafter the run would be refused, for `error`."""

    config: EngineConfig
    checkpoint: Checkpoint
    drafter: Drafter | None
    error: str | None
    others: Mapping[str, str | None]
    """Every method that can be asked for: None where it would run, else why it would not."""


def choose(
    checkpoint: Checkpoint,
    draft: Path | None,
    quantize: str = "none",
    tp: int = 1,
    draft_tp: int | None = None,
) -> Choice:
    """Whom `auto` takes, and what the other methods would say. Reads small files and the draft's headers."""
    from spd.runtime.config import SPEC_METHODS, EngineConfig

    folder = checkpoint.folder
    config = EngineConfig(model=folder, draft_model=draft, quantize=quantize, tp=tp, draft_tp=draft_tp)
    drafter, error = _try(checkpoint, draft, "auto")
    taken = None if drafter is None else drafter.method
    others = {
        name: None if name == taken else _obstacle(checkpoint, draft, name)
        for name in SPEC_METHODS
        if name not in ("auto", "off")
    }
    return Choice(config, checkpoint, drafter, error, others)


def _try(checkpoint: Checkpoint, draft: Path | None, method: str) -> tuple[Drafter | None, str | None]:
    from spd.formats.model_config import read_model_config
    from spd.runtime.config import EngineConfig
    from spd.runtime.drafter import choose_drafter

    try:
        config = EngineConfig(model=checkpoint.folder, draft_model=draft, spec=method)
        return choose_drafter(config, read_model_config(checkpoint.folder), checkpoint), None
    except SpdError as error:
        return None, error.message


def _obstacle(checkpoint: Checkpoint, draft: Path | None, method: str) -> str | None:
    """Why a method would not run, neither with the draft model that is given nor without one."""
    found, error = _try(checkpoint, draft, method)
    if found is None and draft is not None:
        found, _ = _try(checkpoint, None, method)
    return None if found is not None else error


def speculation(choice: Choice) -> dict[str, Any]:
    """What would be used, as JSON values."""
    from spd.runtime.memory import DEFAULT_DRAFT_MAX

    drafter = choice.drafter
    given = choice.config.draft_model is not None
    return {
        "method": None if drafter is None else drafter.method,
        "reason": choice.error
        if drafter is None
        else "it is given with --draft"
        if given
        else drafter.reason,
        "draft_max": None if drafter is None else DEFAULT_DRAFT_MAX.get(drafter.method, 0),
        "methods": {name: {"possible": why is None, "why": why} for name, why in choice.others.items()},
    }


def needs(choice: Choice) -> dict[str, Any]:
    """Bytes that a run with one request and no flags takes here, part by part, and at other contexts.

    Where a pair cannot run, of the target with whatever it would choose alone.
    """
    from spd.formats.model_config import read_model_config
    from spd.runtime.fitting import fitted, shape_of
    from spd.runtime.measuring.foresight import foresee
    from spd.runtime.memory import DEFAULT_DRAFT_MAX, at_context, measure
    from spd.runtime.parallel.choice import divide
    from spd.runtime.weight_choice import Wishes, choose_forms

    if choice.drafter is None:
        asked = choice.config
        choice = choose(choice.checkpoint, None, asked.quantize, asked.tp, asked.draft_tp)
        assert choice.drafter is not None  # `auto` has prompt lookup in the end
    here, config, drafter = foresee(), choice.config, choice.drafter
    model = read_model_config(config.model)
    draft = None if drafter.folder is None else read_model_config(drafter.folder)
    kernels = here.kernels(model, config.quantize)
    whole: MemoryShape = shape_of(
        config,
        model,
        draft,
        here.dtype(model),
        kernels,
        not here.on_cpu,
        DEFAULT_DRAFT_MAX.get(drafter.method, 0),
        here.on_cpu,
        *drafter.head,
    )
    dtype = here.dtype(model)
    wishes = Wishes(config.quantize, kernels, here.device, dtype, config.load, config.tp)
    source, target = drafter.source(draft), (model, config.model)
    form, draft_form, why = choose_forms(target, source, wishes, here.capability)
    asked_groups = None if source is None else config.draft_tp
    ranks = divide(config.tp, asked_groups, model, whole.draft, whole.mtp, dtype, here.device)
    whole = replace(whole, form=form, draft_form=draft_form, tp=ranks.tp, draft_tp=ranks.draft_tp)
    free = here.free // (ranks.tp if here.on_cpu else 1)
    usable = int(free * config.memory_fraction)
    try:
        shape, fits = fitted(config, whole, here.device, free), True
    except SpdError:
        shape, fits = whole, False
    need = measure(shape)
    contexts = sorted({shape.ctx, model.max_positions, *(n for n in CONTEXTS if n < model.max_positions)})
    totals = {ctx: measure(at_context(_unlimited(whole, ctx), ctx)).total for ctx in contexts}
    return {
        "ctx": shape.ctx,
        "total": need.total,
        "parts": vars(need),
        "device": here.device,
        "dtype": shape.dtype,
        "weights": shape.dtype if form.kind == "wide" or form.widened else form.kind,
        "weights_reason": why,
        "free": free,
        "tp": ranks.tp,
        "draft_tp": ranks.draft_tp,
        "draft_tp_reason": ranks.reason,
        "usable": usable,
        "fits": fits,
        "contexts": [{"ctx": n, "total": size, "fits": size <= usable} for n, size in totals.items()],
    }


def _unlimited(shape: MemoryShape, ctx: int) -> MemoryShape:
    """The shape with a drafter that goes as far as the context, or as its own model does."""
    from spd.runtime.fitting import drafts_up_to

    return replace(shape, draft_ctx=drafts_up_to(shape.draft, ctx))


def speculation_lines(found: Mapping[str, Any]) -> list[str]:
    """Who would propose tokens and why, and who else could."""
    if found["method"] is None:
        text = f"none: a run with this draft model is refused ({found['reason']})"
    else:
        text = f"{found['method']}, up to {found['draft_max']} a round: {found['reason']}"
    could = [name for name, how in found["methods"].items() if how["possible"] and name != found["method"]]
    lines = [f"spec      auto takes {text}"]
    if could:
        lines.append(f"{MARGIN}also possible: {', '.join(could)}")
    blocked = {name: how["why"] for name, how in found["methods"].items() if not how["possible"]}
    return [*lines, *(f"{MARGIN}not {name}: {why}" for name, why in blocked.items())]


def need_lines(need: Mapping[str, Any]) -> list[str]:
    """The memory of a run, whether it is there, and that of other contexts."""
    from spd.runtime.memory import show_size
    from spd.runtime.weight_choice import AS_STORED

    parts = " + ".join(
        f"{show_size(size)} {name.replace('_', ' ')}" for name, size in need["parts"].items() if size
    )
    kept = (
        ""
        if need["weights_reason"] == AS_STORED
        else f", weights {need['weights']} ({need['weights_reason']})"
    )
    words = f"{show_size(need['total'])} for {need['ctx']:,} tokens in {need['dtype']}{kept}: {parts}"
    if need["tp"] > 1:
        words = f"on each of {need['tp']} ranks {words}"
    known = need["free"] < 2**62
    there = (
        f"{show_size(need['usable'])} of the {show_size(need['free'])} free on {need['device']} may be used"
    )
    verdict = "" if need["fits"] else "; this does not fit"
    contexts = " · ".join(
        f"{each['ctx']:,}: {show_size(each['total'])}{'' if each['fits'] else ' (too much)'}"
        for each in need["contexts"]
    )
    lines = [f"needs     {words}"]
    if need["tp"] > 1:
        lines.append(f"{MARGIN}the drafter on {need['draft_tp']} of them: {need['draft_tp_reason']}")
    if known:
        lines.append(f"{MARGIN}{there}{verdict}")
    if len(need["contexts"]) > 1:
        lines.append(f"{MARGIN}by context: {contexts}")
    return lines
