"""What to do when memory runs out after all: say where, name what would free how much, let go of the rest."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from spd.errors import ResourceError, SpdError
from spd.formats.model_config import read_model_config
from spd.runtime.memory import MemoryShape, measure, remedies, show_size
from spd.runtime.models.eagle3 import holds_embedding
from spd.runtime.models.weight_form import WIDE
from spd.runtime.page_table import NUM_RESERVED
from spd.runtime.plan import EnginePlan
from spd.runtime.weight_choice import choose_form

WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""How libraries say it that have no exception of their own for it."""


class OutOfMemory(MemoryError):
    """Memory ran out, and in what part of the work."""

    def __init__(self, phase: str, detail: str) -> None:
        super().__init__(detail)
        self.phase = phase


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch, the driver or the system means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


@contextmanager
def memory_phase(phase: str) -> Iterator[None]:
    """Raise OutOfMemory that names the phase for whatever runs out of memory inside."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(phase, _first_line(error)) from None


def let_go(error: BaseException) -> None:
    """Free what an exception's frames hold, and give unused device memory back to the driver."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def explained(error: BaseException, plan: EnginePlan, phase: str) -> ResourceError:
    """The refusal for an exhausted memory; an OutOfMemory knows the phase better than the caller."""
    let_go(error)
    phase = getattr(error, "phase", phase)
    counted, fix = "", []
    try:
        shape = shape_of(plan)
        counted = f"the plan counted {show_size(measure(shape).total)}: {measure(shape).words()}"
        asked = plan.drafting_model is not None and plan.spec_reason == "asked for"
        fix = [remedy.words() for remedy in remedies(shape, None, asked)]
    except SpdError:  # the folder is gone; what it held was only needed for the figures
        pass
    return ResourceError(
        f"out of memory on {plan.device} while {phase}",
        reason=[line for line in (_first_line(error), counted) if line],
        fix=[*fix, "end what else uses this memory"],
        code="out_of_memory",
    )


def shape_of(plan: EnginePlan) -> MemoryShape:
    """What a plan's memory was counted from. Reads the models' configurations."""
    draft = plan.drafting_model
    target = read_model_config(Path(plan.model))
    other, source = read_model_config(Path(draft)) if draft else None, plan.mtp_source(target)
    draft_form = WIDE
    if other is not None and draft:
        draft_form, _ = choose_form(other, Path(draft), plan)
    elif source is not None:
        draft_form, _ = choose_form(source.config, source.folder, plan)
    return MemoryShape(
        target=target,
        draft=other,
        dtype=plan.dtype,
        slots=plan.slots,
        ctx=plan.ctx,
        draft_ctx=plan.draft_ctx,
        draft_max=plan.draft_max,
        chunk=plan.chunk,
        kernels=plan.kernels,
        graphs=plan.graphs,
        on_cpu=plan.device == "cpu",
        pages=plan.num_pages - NUM_RESERVED,
        model_drafts=plan.model_drafts,
        mtp=source,
        head_embedding=draft is not None and holds_embedding(Path(draft)),
        form=choose_form(target, Path(plan.model), plan)[0],
        draft_form=draft_form,
        tp=plan.tp,
        draft_tp=plan.draft_tp,
    )


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line[:200]
