"""The refusal where memory runs out: what the plan counted, and what would free how much of it."""

from __future__ import annotations

from spd.errors import ResourceError
from spd.runtime.plan.memory import remedies, show_size
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.out_of_memory import first_line, let_go


def explained(error: BaseException, plan: EnginePlan, phase: str) -> ResourceError:
    """The refusal for an exhausted memory; an OutOfMemory knows the phase better than the caller."""
    let_go(error)
    phase = getattr(error, "phase", phase)
    asked = plan.drafting_model is not None and plan.drafter.reason == "asked for"
    fix = [remedy.words() for remedy in remedies(plan.shape, None, asked)]
    counted = f"the plan counted {show_size(plan.need.total)}: {plan.need.words()}"
    return ResourceError(
        f"out of memory on {plan.device} while {phase}",
        reason=[line for line in (first_line(error), counted) if line],
        fix=[*fix, "end what else uses this memory"],
        code="out_of_memory",
    )
