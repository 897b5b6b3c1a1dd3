"""Opens the device side of an engine, alone or with other ranks, and says where memory ran out."""

from __future__ import annotations

from spd.errors import ResourceError
from spd.runtime.engine.assembly import assemble
from spd.runtime.load.progress import Progress
from spd.runtime.plan.config import show_size
from spd.runtime.plan.memory import remedies
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.out_of_memory import is_out_of_memory, release_memory
from spd.runtime.round.round_queue import RoundQueue


def open_device(plan: EnginePlan, usable_vocab: int, progress: Progress | None) -> RoundQueue:
    """Load what a plan names on all its ranks; return the queue that leads them. Raises ResourceError."""
    try:
        if plan.shape.tp == 1:
            return assemble(plan, usable_vocab, progress)
        from spd.runtime.ranks.crew import lead

        return lead(plan, usable_vocab, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, plan, "loading") from None


def out_of_memory_error(error: BaseException, plan: EnginePlan, phase: str) -> ResourceError:
    """Return the refusal where memory ran out: what the plan counted, and what would free how much."""
    release_memory(error)
    asked = plan.drafting_model is not None and plan.drafter.reason == "asked for"
    said = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    reason = [*said[:1], f"the plan counted {show_size(plan.need.total)}: {plan.need.words()}"]
    fix = [*remedies(plan.shape, None, asked), "end what else uses this memory"]
    why = f"out of memory on {plan.device} while {phase}"
    return ResourceError(why, reason=reason, fix=fix, code="out_of_memory")
