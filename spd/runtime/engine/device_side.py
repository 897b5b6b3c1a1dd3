"""Everything that the host asks of an engine's device side: work is enqueued, and nothing is waited for.

Rank 0 asks for a sequence what its slot needs. With several ranks the calls below that take plain values are
made on every one of them, in the same order; so those may not depend on what only one rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from spd.errors import ResourceError
from spd.runtime.engine.assembly import Assembly, assemble
from spd.runtime.engine.request import Request
from spd.runtime.engine.sequence import Sequence
from spd.runtime.load.progress import Progress
from spd.runtime.plan.memory import remedies, show_size
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.graphs import RoundShape
from spd.runtime.round.limits import PAGE_SIZE, TRASH_PAGE, mask_width
from spd.runtime.round.out_of_memory import OutOfMemory, first_line, is_out_of_memory, let_go
from spd.runtime.round.round_queue import RoundResult, Ticket
from spd.runtime.round.rows import EMPTY_SLOT, PromptPart, SlotView, filled_rows
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.spans import Run
from spd.runtime.round.transfer import to_device


class DeviceSide:
    """Writes slots' rows and enqueues rounds."""

    def __init__(self, parts: Assembly, plan: EnginePlan) -> None:
        self.parts, self.plan = parts, plan
        self._ids: Tensor | None = None
        """Of the sequence that is being prefilled: int64 [length]."""
        self._unwritten: list[PromptPart] = []
        """Parts of prompts that are written together, in one pass where the kernels allow that."""
        self._unsaved: list[tuple[int, int, int, int]] = []
        """What `save` is to copy once they are written."""

    # -- sequences, on rank 0 ----------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """Write the row of a sequence that was given a slot; it stays silent until it is prefilled."""
        sequence.placed = True
        row = (sequence.slot, sequence.request, sequence.generated, sequence.length_limit, sequence.stop_ids)
        self.place(*row, sequence.prefilled, sequence.pages, sequence.checkpoint)
        self.show_pages(sequence.slot, sequence.pages)

    def prefill(self, sequence: Sequence, runs: Listed[Run]) -> int:
        """Enqueue the next pass over the prompt, at most one chunk; returns where it ended."""
        start, end = sequence.prefilled, sequence.prefill_end
        run = next((run for run in runs if run.start <= start < run.end), None)
        if run is None:
            return end
        rows = self.plan.shape.chunk if run.kind == "chunk" else self.parts.runner.tail_rows
        stop = min(start + rows, run.end, *(end for end in sequence.stops if end > start))
        self.write(sequence.slot, SlotView(sequence.length, sequence.pages), start, stop, runs)
        return stop

    def arm(self, sequence: Sequence, drafts: Listed[int] = ()) -> None:
        """Let a slot take part from the next round on, with masks for its drafts where a grammar wants them.

        Raises GrammarError for a grammar that cannot go on.
        """
        if sequence.grammar is not None:
            words = mask_width(self.parts.sampler.vocab_size)
            rows = torch.empty(len(drafts) + 1, words, dtype=torch.int32)
            legal = sequence.grammar.masks(drafts, rows)
            # Where drafts are tested by their probability the one that a mask forbids has to fail its test:
            # cut away unseen, it would count as a block that came to a fair end.
            legal = legal if self.plan.wishes.verify == "coupled" else len(drafts)
            self.allow(sequence.slot, rows, list(drafts), legal)
        sequence.active = True
        self.set_active(sequence.slot, True)

    # -- slots, on every rank ----------------------------------------------------------------------

    def place(
        self,
        slot: int,
        request: Request,
        generated: list[int],
        length_limit: int,
        stop_ids: tuple[int, ...],
        prefilled: int,
        pages: list[int],
        checkpoint: int | None,
    ) -> None:
        """Write the row of a request that enters a slot, silent for now; `generated`: before a preemption.

        Its pages hold `prefilled` positions already, but for what comes from a checkpoint's place.
        """
        parts, params, prompt = self.parts, request.params, len(request.prompt_ids)
        if checkpoint is not None or (prefilled and parts.proposer is not None and parts.proposer.captures):
            self._flush()  # it wants what is kept of the pages that the slot begins with
        if checkpoint is not None:
            parts.states.load(checkpoint, slot, prefilled, page_of(pages, prefilled))
        self._ids = ids = to_device([*request.prompt_ids, *generated], torch.long, self.plan.device)
        least, reach = prompt + params.min_tokens, self.plan.shape.draft_ctx
        parts.state.admit(slot, ids, length_limit, least, stop_ids, reach, request.draft_max, active=False)
        parts.sampler.admit(slot, params, ids[:prompt], ids[prompt:])
        parts.runner.admit(slot, prefilled)
        if parts.proposer is not None:
            parts.proposer.admit(slot, prefilled, SlotView(len(ids), pages))

    def show_pages(self, slot: int, pages: list[int]) -> None:
        """Upload a slot's page numbers."""
        table = self.parts.state.page_table
        table[slot] = self.parts.runner.page_row(pages, table.shape[1])

    @torch.inference_mode()
    def write(self, slot: int, view: SlotView, start: int, end: int, runs: Listed[Run]) -> None:
        """Write the caches of positions of the prompt that was placed last, at the latest in `flush`."""
        assert self._ids is not None
        part = PromptPart(slot, self._ids[None], start, end, view, runs)
        rows = sum(filled_rows(each.end - each.begin) for each in (*self._unwritten, part))
        recurrent = any(each.cache.recurrent for each in self.parts.states.runners)
        again = recurrent and any(each.slot == slot for each in self._unwritten)
        if again or rows > self.parts.runner.chunk:
            self._flush()
        self._unwritten.append(part)

    def save(self, place: int, slot: int, end: int, page: int) -> None:
        """Copy a slot's states as of position `end`, at the latest in `flush`, to a checkpoint's place."""
        self._unsaved.append((place, slot, end, page))

    @property
    def has_unwritten(self) -> bool:
        """Whether anything is still to be written of prompts."""
        return bool(self._unwritten or self._unsaved)

    def flush(self) -> None:
        """Enqueue what is still to be written of prompts."""
        self._flush()

    @torch.inference_mode()
    def _flush(self) -> None:
        if self._unwritten:
            states = self.parts.runner.write(self._unwritten)
            if self.parts.proposer is not None:
                self.parts.proposer.prefill(self._unwritten, states)
        for place, slot, end, page in self._unsaved:
            self.parts.states.save(place, slot, end, page)
        self._unwritten, self._unsaved = [], []  # and not before: what broke off is still to be written

    def allow(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        """Masks int32 [R, words] for a slot's next round, and its drafts, of which `legal` are allowed."""
        state = self.parts.state
        self.parts.sampler.allow(slot, rows)
        if drafts:  # rounds that it did not take part in may have overwritten them
            state.draft[slot, : len(drafts)] = to_device(drafts, torch.long, self.plan.device)
        state.num_drafts[slot].fill_(legal)

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        self.parts.state.set_active(slot, active)

    def retire(self, slot: int, views: Listed[SlotView], held: int, place: int | None) -> None:
        """Silence a slot, once its pages hold what others find there: up to position `held`.

        place: of the checkpoint that its states go to.
        """
        self._flush()
        self.parts.queue.catch_up(views)
        page = page_of(views[slot].pages, held)
        if place is not None:
            self.parts.states.save(place, slot, held, page)
        elif page != TRASH_PAGE and self.parts.proposer is not None:
            self.parts.proposer.leave(slot, held, page)
        self.parts.state.retire(slot)
        self.parts.queue.last_views[slot] = EMPTY_SLOT

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        self._flush()
        self.parts.runner.cache.clear(pages)
        if self.parts.proposer is not None:
            self.parts.proposer.clear(pages)

    # -- rounds, on every rank ---------------------------------------------------------------------

    def launch(
        self, k: int, views: Listed[SlotView], needs: SamplerClass, num_logprobs: int | None, next_k: int
    ) -> Ticket:
        """Enqueue one round; see `Round.run`."""
        self.parts.threads.follow()
        if self._unwritten or self._unsaved:
            self._flush()
        return self.parts.queue.launch(k, views, needs, num_logprobs, next_k)

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs. False: memory ran out, all are let go. Ranks: ResourceError."""
        captured = self.parts.queue.captured
        assert captured is not None
        try:
            captured.capture(shape, [EMPTY_SLOT] * self.plan.shape.slots)
        except OutOfMemory as error:
            if self.plan.shape.tp > 1:
                raise memory_refusal(error, self.plan, "running") from None
            captured.captured.clear()
            captured.pool, captured.lazily = None, True
            let_go(error)
            return False
        return True

    def read(self, ticket: Ticket) -> RoundResult:
        """Wait until a round has run, and return what it emitted. Of rank 0 only."""
        return ticket.read()

    def close(self) -> None:
        """Let go of what is not this process's own."""

    def restart(self) -> None:
        """Go on after a round that broke off."""
        self._unwritten, self._unsaved = [], []
        self.parts.queue.restart()


def page_of(pages: Listed[int], held: int) -> int:
    """The page that goes on behind `held` positions; the trash page where none does."""
    return pages[held // PAGE_SIZE] if held % PAGE_SIZE else TRASH_PAGE


def open_device(
    plan: EnginePlan, usable_vocab: int, progress: Progress | None, rendezvous: str | None
) -> DeviceSide:
    """Load everything that a plan names, on all its ranks. Raises ResourceError where memory runs out."""
    try:
        if plan.shape.tp == 1:
            return DeviceSide(assemble(plan, usable_vocab, progress), plan)
        from spd.runtime.ranks.leader import lead

        return lead(plan, usable_vocab, progress, rendezvous)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise memory_refusal(error, plan, "loading") from None


def memory_refusal(error: BaseException, plan: EnginePlan, phase: str) -> ResourceError:
    """The refusal where memory ran out: what the plan counted, and what would free how much of it.

    An OutOfMemory knows the phase better than the caller.
    """
    let_go(error)
    asked = plan.drafting_model is not None and plan.drafter.reason == "asked for"
    counted = f"the plan counted {show_size(plan.need.total)}: {plan.need.words()}"
    return ResourceError(
        f"out of memory on {plan.device} while {getattr(error, 'phase', phase)}",
        reason=[line for line in (first_line(error), counted) if line],
        fix=[*(each.words() for each in remedies(plan.shape, None, asked)), "end what else uses this memory"],
        code="out_of_memory",
    )
