"""Everything that the host asks of an engine's device side: plain values in, work enqueued.

With several ranks the same calls, in the same order, are made on every one of them; so nothing here may
depend on what only one rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from itertools import compress

import torch
from torch import Tensor

from spd.formats.model_config import ModelConfig
from spd.runtime.assembly import Assembly, assemble
from spd.runtime.graphs import RoundShape
from spd.runtime.out_of_memory import OutOfMemory, explained, is_out_of_memory, let_go
from spd.runtime.plan import EnginePlan
from spd.runtime.progress import Progress
from spd.runtime.request import SamplingParams
from spd.runtime.round_queue import RoundResult, Ticket
from spd.runtime.rows import EMPTY_SLOT, PromptPart, SlotView, filled_rows
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run
from spd.runtime.transfer import to_device


class DeviceSide:
    """Writes slots' rows and enqueues rounds; nothing is waited for."""

    def __init__(self, parts: Assembly, plan: EnginePlan) -> None:
        self.parts, self.plan = parts, plan
        self._ids: Tensor | None = None
        """Of the sequence that is being prefilled: int64 [length]."""
        self._unwritten: list[PromptPart] = []
        """Parts of prompts that are written together, in one pass where the kernels allow that."""

    # -- slots -----------------------------------------------------------------------------------

    def place(
        self,
        slot: int,
        tokens: list[int],
        prompt: int,
        params: SamplingParams,
        length_limit: int,
        stop_ids: tuple[int, ...],
        draft_max: int | None,
        prefilled: int,
        pages: list[int],
        prepared: bool,
    ) -> None:
        """Write the row of a sequence, of whose tokens `prompt` are its prompt; it stays silent.

        One that is not `prepared` is never drafted for, and nothing of it comes into the drafter's cache.
        """
        proposer = self.parts.proposer if prepared else None
        if prefilled and proposer is not None and proposer.captures:
            self._flush()  # it wants what is kept of the pages that the slot begins with
        self._ids = to_device(tokens, torch.long, self.plan.device)
        self.parts.state.admit(
            slot,
            self._ids,
            length_limit,
            prompt + params.min_tokens,
            stop_ids,
            self.plan.draft_ctx if prepared else 0,
            draft_max,
            active=False,
        )
        self.parts.sampler.admit(slot, params, self._ids[:prompt], self._ids[prompt:])
        self.parts.queue.follows[slot] = prepared
        if proposer is not None:
            proposer.admit(slot, prefilled, SlotView(len(tokens), pages))
        self._upload_pages(slot, pages)

    def show_pages(self, slot: int, pages: list[int]) -> None:
        """Upload a slot's page numbers."""
        self._upload_pages(slot, pages)

    def _upload_pages(self, slot: int, pages: list[int]) -> None:
        table = self.parts.state.page_table
        table[slot] = self.parts.runner.page_row(pages, table.shape[1])

    @torch.inference_mode()
    def write(self, slot: int, view: SlotView, start: int, end: int, runs: Listed[Run]) -> None:
        """Write the caches of positions of the prompt of who was placed last, at the latest in `flush`."""
        assert self._ids is not None
        runner, part = self.parts.runner, PromptPart(slot, self._ids[None], start, end, view, runs)
        if sum(filled_rows(each.end - each.begin) for each in (*self._unwritten, part)) > runner.chunk:
            self._flush()
        self._unwritten.append(part)

    @property
    def owes(self) -> bool:
        """Whether anything is still to be written of prompts."""
        return bool(self._unwritten)

    def flush(self) -> None:
        """Enqueue what is still to be written of prompts."""
        self._flush()

    @torch.inference_mode()
    def _flush(self) -> None:
        if not self._unwritten:
            return
        states = self.parts.runner.write(self._unwritten)
        follows = [self.parts.queue.follows[part.slot] for part in self._unwritten]
        if self.parts.proposer is not None and any(follows):
            kept = list(compress(self._unwritten, follows))
            self.parts.proposer.prefill(kept, list(compress(states, follows)))
        self._unwritten = []  # and not before: what broke off is still to be written

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

    def retire(self, slot: int, views: Listed[SlotView], held: int) -> None:
        """Silence a slot, once its pages hold what others find there: up to position `held`."""
        self._flush()
        self.parts.queue.settle(views)
        if held % self.plan.page_size and self.parts.proposer is not None and self.parts.queue.follows[slot]:
            page = views[slot].pages[held // self.plan.page_size]
            self.parts.proposer.leave(slot, held, page)
        self.parts.state.retire(slot)
        self.parts.queue.last_views[slot] = EMPTY_SLOT

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        self._flush()
        self.parts.runner.cache.clear(pages)
        if self.parts.proposer is not None:
            self.parts.proposer.clear(pages)

    # -- rounds ----------------------------------------------------------------------------------

    def launch(
        self, k: int, views: Listed[SlotView], needs: SamplerClass, num_logprobs: int | None, next_k: int
    ) -> Ticket:
        """Enqueue one round; see `Round.run`."""
        self._flush()
        return self.parts.queue.launch(k, views, needs, num_logprobs, next_k)

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs. False: memory ran out, all are let go. Ranks: ResourceError."""
        captured = self.parts.queue.captured
        assert captured is not None
        try:
            captured.capture(shape, [EMPTY_SLOT] * self.plan.slots)
        except OutOfMemory as error:
            if self.plan.tp > 1:
                raise explained(error, self.plan, "running") from None
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
        self._unwritten.clear()
        self.parts.queue.restart()


def open_device(
    plan: EnginePlan, config: ModelConfig, usable: int, progress: Progress | None, rendezvous: str | None
) -> DeviceSide:
    """Load everything that a plan names, on all its ranks. Raises ResourceError where memory runs out."""
    try:
        if plan.tp == 1:
            return DeviceSide(assemble(plan, config, usable, progress), plan)
        from spd.runtime.parallel.leader import lead

        return lead(plan, config, usable, progress, rendezvous)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise explained(error, plan, "loading") from None
