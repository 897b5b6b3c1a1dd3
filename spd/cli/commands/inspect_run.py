"""What a run of an inspected model would do: what proposes tokens and why, and the memory it takes.

The same rules and sums as the plan's, told without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spd.errors import SpdError
from spd.runtime.plan.config import METHODS, EngineConfig

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder
    from spd.runtime.plan.drafter_choice import Drafter

MARGIN = " " * 10
CONTEXTS = (4096, 16384, 32768, 65536, 131072)
"""Lengths whose memory is told, as far as the model goes."""


@dataclass(frozen=True)
class Choice:
    """What `--spec auto` comes to; without a drafter the run would be refused, for `error`."""

    config: EngineConfig
    folder: ModelFolder
    drafter: Drafter | None
    error: str | None
    others: Mapping[str, str | None]
    """Every method that can be asked for: None where it would run, else why it would not."""


def choose(
    folder: ModelFolder,
    draft: ModelFolder | None,
    quantize: str = "none",
    tp: int = 1,
    draft_tp: int | None = None,
) -> Choice:
    """What `auto` takes, and what the other methods would say. Reads small files and the draft's headers."""
    config = EngineConfig(model=folder, draft_model=draft, quantize=quantize, tp=tp, draft_tp=draft_tp)
    drafter, error = _try(folder, draft, "auto")
    taken = None if drafter is None else drafter.method
    others = {
        name: None if name == taken else _obstacle(folder, draft, name)
        for name in METHODS
        if name not in ("auto", "off")
    }
    return Choice(config, folder, drafter, error, others)


def _try(folder: ModelFolder, draft: ModelFolder | None, method: str) -> tuple[Drafter | None, str | None]:
    from spd.runtime.plan.drafter_choice import choose_drafter

    try:
        config = EngineConfig(model=folder, draft_model=draft, spec=method)
        return choose_drafter(config, folder), None
    except SpdError as error:
        return None, error.message


def _obstacle(folder: ModelFolder, draft: ModelFolder | None, method: str) -> str | None:
    """Why a method would not run, neither with the draft model that is given nor without one."""
    found, error = _try(folder, draft, method)
    if found is None and draft is not None:
        found, _ = _try(folder, None, method)
    return None if found is not None else error


def speculation(choice: Choice) -> dict[str, Any]:
    """What would be used, as JSON values."""
    drafter = choice.drafter
    given = choice.config.draft_model is not None
    return {
        "method": None if drafter is None else drafter.method,
        "reason": choice.error
        if drafter is None
        else "it is given with --draft"
        if given
        else drafter.reason,
        "draft_max": None if drafter is None else METHODS[drafter.method].draft_max,
        "methods": {name: {"possible": why is None, "why": why} for name, why in choice.others.items()},
    }


def needs(choice: Choice) -> dict[str, Any]:
    """Bytes that a run with one request and no flags takes here, part by part, and at other contexts.

    Where a pair cannot run, of the target with whatever it would choose alone.
    """
    from spd.runtime.plan.machine import foreseen_machine
    from spd.runtime.plan.memory import at_context, checkpoint_bytes, fitted, measure
    from spd.runtime.plan.plan import drafts_up_to, outline

    machine, config = foreseen_machine(), choice.config
    if choice.drafter is None:
        config = replace(config, draft_model=None)
    if choice.drafter is None or choice.drafter.source() is None:
        config = replace(config, draft_tp=None)
    plan = outline(config, machine)
    whole, free = plan.shape, machine.free // machine.beside(plan.shape.tp)
    try:
        shape, fits = fitted(whole, config, machine.device, free), True
    except SpdError:
        shape, fits = whole, False
    need, usable, most = measure(shape), plan.memory_budget_bytes, whole.target.max_positions
    contexts = sorted({shape.ctx, most, *(n for n in CONTEXTS if n < most)})
    totals = {}
    for ctx in contexts:  # with a drafter that goes as far as the context, or as its own model does
        unlimited = replace(whole, draft_ctx=drafts_up_to(whole.draft, ctx))
        totals[ctx] = measure(at_context(unlimited, ctx)).total
    return {
        "ctx": shape.ctx,
        "total": need.total,
        "parts": vars(need),
        "checkpoint_bytes": shape.checkpoints * checkpoint_bytes(shape) if shape.checkpoints else 0,
        "device": plan.device,
        "dtype": shape.dtype,
        "weights": plan.weights,
        "weights_reason": plan.weights_reason,
        "free": free,
        "tp": shape.tp,
        "draft_tp": shape.draft_tp,
        "draft_tp_reason": plan.draft_tp_reason,
        "usable": usable,
        "fits": fits,
        "contexts": [{"ctx": n, "total": size, "fits": size <= usable} for n, size in totals.items()],
    }


def speculation_lines(found: Mapping[str, Any]) -> list[str]:
    """What would propose tokens and why, and what else could."""
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
    from spd.runtime.plan.kernel_choice import AS_STORED
    from spd.runtime.plan.memory import show_size

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
    if (kept_beside := need["checkpoint_bytes"] - need["parts"]["checkpoints"]) > 0:
        lines.append(f"{MARGIN}checkpoints in the host's memory: {show_size(kept_beside)}")
    if len(need["contexts"]) > 1:
        lines.append(f"{MARGIN}by context: {contexts}")
    return lines
