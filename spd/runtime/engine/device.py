"""The engine's calls to its device side: opening it, activating slots, and the error for exhausted memory."""

from __future__ import annotations

from collections import abc

import torch

from spd.errors import ResourceError
from spd.runtime.engine.assembly import assemble_queue
from spd.runtime.engine.sequence import Sequence
from spd.runtime.load.progress import Progress
from spd.runtime.plan.config import format_size
from spd.runtime.plan.memory_fit import memory_remedies
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.limits import mask_width
from spd.runtime.round.out_of_memory import is_out_of_memory, release_memory
from spd.runtime.round.round_queue import RoundQueue, SlotAdmission


def open_device(plan: EnginePlan, usable_vocab: int, progress: Progress | None) -> RoundQueue:
    """Load a plan's models on all its ranks; return the queue of rounds that leads them.

    usable_vocab: ids that can be drawn. Raises ResourceError where memory runs out.
    """
    try:
        if plan.shape.tp == 1:
            return assemble_queue(plan, usable_vocab, progress)
        from spd.runtime.ranks.leader import start_ranks

        return start_ranks(plan, usable_vocab, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, plan, "loading") from None


def out_of_memory_error(error: BaseException, plan: EnginePlan, phase: str) -> ResourceError:
    """Release what an error's frames hold, and return the ResourceError for exhausted memory.

    It says what the plan counted, and how much each remedy would free. phase: the work that it
    interrupted, for the message.
    """
    release_memory(error)
    is_drafter_requested = plan.drafting_model is not None and plan.drafter.reason == "asked for"
    error_lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    plan_line = f"the plan counted {format_size(plan.need.total)}: {plan.need.summary()}"
    return ResourceError(
        f"out of memory on {plan.device} while {phase}",
        reason=[*error_lines[:1], plan_line],
        fix=[
            *memory_remedies(plan.shape, None, is_drafter_requested),
            "end what else uses this memory",
        ],
        code="out_of_memory",
    )


def admit_sequence(queue: RoundQueue, sequence: Sequence) -> None:
    """Write the row of a sequence's slot on the device; the slot stays inactive."""
    request = sequence.request
    queue.admit(
        SlotAdmission(
            slot=sequence.slot,
            tokens=sequence.tokens(),
            prompt_length=len(request.prompt_ids),
            params=request.params,
            draft_max=request.draft_max,
            length_limit=sequence.length_limit,
            stop_ids=sequence.stop_ids,
            prefilled=sequence.prefilled,
            pages=sequence.pages,
            snapshot=sequence.snapshot,
        )
    )


def activate_sequence(
    queue: RoundQueue, sequence: Sequence, drafts: abc.Sequence[int], verify_rule: str
) -> None:
    """Activate a sequence and its slot from the next round on, with masks for its drafts where it
    has a grammar.

    verify_rule: the rule by which drafts are accepted. Raises GrammarError for a grammar without a
    continuation.
    """
    if sequence.grammar is not None and not sequence.defers_grammar:
        words = mask_width(queue.sampler.vocab_size)
        masks = torch.empty(len(drafts) + 1, words, dtype=torch.int32)
        num_legal = sequence.grammar.write_masks(drafts, masks)
        # Where drafts are tested by their probability, a draft that its mask forbids has to fail the test:
        # if it were cut off before, the block would count as one whose drafts were all tested.
        if verify_rule != "coupled":
            num_legal = len(drafts)
        queue.set_masks(sequence.slot, masks, list(drafts), num_legal)
    sequence.is_active = True
    queue.set_active(sequence.slot, True)
