"""Runs one model over its paged cache: windows of a few rows, and prefill by spans.

Owns the model, its pools and how rows are padded. Knows slots as rows of a page table, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import KV_BLOCK
from spd.kernels.round_window import kv_slots
from spd.runtime.context_parts import admitted_parts, context_for
from spd.runtime.kv_cache import KvCache
from spd.runtime.memory import TAIL_ROWS
from spd.runtime.models.base import CausalModel, ForwardBatch, HeadStates, LayerCache
from spd.runtime.page_table import NUM_RESERVED, TRASH_PAGE, ZERO_PAGE
from spd.runtime.row_buckets import (
    CANDIDATES,
    PROBED_LAYERS,
    WIDEST,
    admitted_buckets,
    bucket_for,
)
from spd.runtime.spans import Run
from spd.runtime.transfer import to_device


class Rows(Protocol):
    """Windows of Q positions for each of S slots; positions ascend in a window."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [S, Q]."""
        ...

    @property
    def positions(self) -> Tensor:
        """int64 [S, Q]."""
        ...

    @property
    def valid(self) -> Tensor:
        """bool [S, Q]: rows that are not write their KV to the trash page."""
        ...

    @property
    def kv_slots(self) -> Tensor:
        """int64 [S, Q], into the flattened pools."""
        ...


@dataclass(frozen=True)
class PromptRows:
    """Rows of one slot's prompt; see `Rows`."""

    token_ids: Tensor
    positions: Tensor
    valid: Tensor
    kv_slots: Tensor


class SlotView(NamedTuple):
    """What the host knows of a slot's cache: an upper bound of its length, and its pages.

    A bound of 0 means that the slot has no rows.
    """

    bound: int
    pages: Sequence[int]


EMPTY_SLOT = SlotView(0, ())


class ModelRunner:
    """One model, its cache and its two programs: verify-class windows and prompt chunks."""

    def __init__(self, model: CausalModel, cache: KvCache, chunk: int, device: str, kernels: Kernels) -> None:
        self.model, self.cache, self.chunk, self.device = model, cache, chunk, device
        self.kernels = kernels
        self.dtype = cache.dtype
        self.context_parts: tuple[int, ...] = ()
        """Sizes of an attended context's last block beside a whole one; see `context_parts`."""
        self.trash_slot = TRASH_PAGE * cache.page_size
        self.buckets: tuple[int, ...] | None = None
        """Row counts that give the same bits; None where every number does by construction."""
        if kernels.name == "torch":
            self._try_arithmetic()

    @property
    def pages_per_block(self) -> int:
        """Pages of a whole block of an attended context."""
        return KV_BLOCK // self.cache.page_size

    def _try_arithmetic(self) -> None:
        """Run one fixed text through the first layers in windows of every shape; see `row_buckets`."""
        model = self.model
        start = min(KV_BLOCK, model.max_positions) - WIDEST
        self.buckets = (WIDEST,)
        if start < 0:
            return
        self.buckets = (*CANDIDATES, WIDEST)  # none of them is rounded while they are tried
        generator = torch.Generator().manual_seed(0)
        pages = list(range(NUM_RESERVED, NUM_RESERVED + 2 * KV_BLOCK // self.cache.page_size))
        pool = (pages[-1] + 1, self.cache.page_size)
        caches = [
            LayerCache(
                tuple(
                    torch.randn(*pool, *shape, generator=generator).to(self.device, self.dtype)
                    for shape in position
                )
            )
            for position in model.cache_shapes[: max(PROBED_LAYERS, model.varied_layers)]
        ]
        ids = torch.randint(model.vocab_size, (1, WIDEST), generator=generator).to(self.device)
        table = self.page_row(pages, len(pages))[None]
        ring = torch.randn(1, WIDEST, model.hidden_size, generator=generator)
        states = HeadStates(ring.to(self.device, self.dtype), WIDEST)

        def window(start: int, first: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
            positions = torch.arange(start + first, start + first + rows, device=self.device)[None]
            prompt = self._prompt_rows(ids[:, first : first + rows], positions, table)
            views = [SlotView(context, pages)]
            hidden = model.forward(self._batch(prompt, table, views, WIDEST, states=states), caches)
            return hidden, model.logits(hidden, WIDEST)

        self.buckets = admitted_buckets(window, start, KV_BLOCK)
        if self.device == "cpu":
            self.context_parts = admitted_parts(model.heads, self.dtype, self.cache.page_size, self.buckets)

    def _first_page(self, pages: Sequence[int], count: int) -> int | None:
        run = pages[:count]
        if len(run) < count or any(page != run[0] + i for i, page in enumerate(run)):
            return None
        return run[0]

    def page_row(self, pages: Sequence[int], width: int) -> Tensor:
        """A page-table row int64 [width], unused entries pointing at the zero page."""
        return to_device([*pages, *[ZERO_PAGE] * (width - len(pages))], torch.long, self.device)

    def forward(
        self, rows: Rows, page_table: Tensor, views: Sequence[SlotView], states: HeadStates | None = None
    ) -> Tensor:
        """Hidden states [S, Q, hidden] of windows, writing the KV of valid rows; one view a slot.

        states: of S slots, for models that read some.
        """
        slots, width = rows.token_ids.shape
        padded = width if self.buckets is None else bucket_for(width, self.buckets)
        if padded > width:
            rows = self._padded(rows, padded - width)
        batch = self._batch(rows, page_table, views, WIDEST, states=states)
        hidden = self.model.forward(batch, self.cache.layers)
        return hidden[: slots * padded].view(slots, padded, -1)[:, :width]

    def _padded(self, rows: Rows, extra: int) -> PromptRows:
        """The rows with `extra` more in every window, which repeat its last and keep nothing."""
        ids, positions = (
            torch.cat((t, t[:, -1:].expand(-1, extra)), 1) for t in (rows.token_ids, rows.positions)
        )
        nothing = rows.valid.new_zeros(rows.valid.shape[0], extra)
        trash = torch.full_like(rows.kv_slots[:, :1], self.trash_slot).expand(-1, extra)
        return PromptRows(
            ids, positions, torch.cat((rows.valid, nothing), 1), torch.cat((rows.kv_slots, trash), 1)
        )

    def _batch(
        self,
        rows: Rows,
        page_table: Tensor,
        views: Sequence[SlotView],
        tile: int,
        chunk_start: int | None = None,
        states: HeadStates | None = None,
    ) -> ForwardBatch:
        slots, width = rows.token_ids.shape
        flat = [t.reshape(-1) for t in (rows.token_ids, rows.positions, rows.kv_slots)]
        if self.buckets is not None and chunk_start is None:
            extra = bucket_for(slots * width, self.buckets) - slots * width
            if extra:
                flat = [torch.cat((t, t.new_zeros(extra))) for t in flat]
        plan = None
        if chunk_start is None or self.buckets is not None:
            plan = self._attention_plan(rows, page_table, views)
        return ForwardBatch(
            token_ids=flat[0],
            positions=flat[1],
            kv_slots=flat[2],
            page_table=page_table,
            plan=plan,
            num_slots=slots,
            width=width,
            tile=tile,
            chunk_start=chunk_start,
            first_key=self.model.heads.first_key,
            states=states,
        )

    def _attention_plan(self, rows: Rows, page_table: Tensor, views: Sequence[SlotView]) -> object:
        bounds, first_pages = [], []
        if self.buckets is not None:  # only the torch form asks the host
            for view in views:
                bounds.append(context_for(view.bound, self.context_parts))
                pages = bounds[-1] // self.cache.page_size
                first_pages.append(self._first_page(view.pages, pages) if pages else None)
        return self.kernels.plan_attention(
            rows.positions,
            rows.valid,
            page_table,
            self.model.heads,
            self.cache.page_size,
            self.dtype,
            bounds,
            first_pages,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of hidden [..., hidden]."""
        return self._scores(hidden, self.model.logits)

    def _scores(self, hidden: Tensor, scores: Callable[[Tensor, int], Tensor]) -> Tensor:
        """What a head says of hidden [..., hidden], in a bucket's rows."""
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        rows = flat.shape[0]
        extra = 0 if self.buckets is None else bucket_for(rows, self.buckets) - rows
        if extra:
            flat = torch.cat((flat, flat.new_zeros(extra, flat.shape[1])))
        return scores(flat, WIDEST)[:rows].view(*hidden.shape[:-1], -1)

    def sample(
        self,
        hidden: Tensor,
        usable_vocab: int,
        seed: Tensor,
        first: Tensor,
        step: int,
        temperature: Tensor,
        *,
        noise: bool = True,
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [S, R] and whether each is finite, by the model's own drawing head; None without one.

        hidden [S, R, hidden]; seed, first, temperature [S]: row r draws the token at first + step + r.
        Without `noise` no temperature is above 0.
        """
        head = self.model.part
        if head is not None:
            part = self._scores(hidden, self.model.part_logits)
            warmth = temperature if noise else None
            found: tuple[Tensor, Tensor] = head.choose(part, usable_vocab, seed, first, step, warmth)
            return found
        slots, rows = hidden.shape[:2]
        # The last row of every window reshapes to a view with gaps, which kernels do not read.
        flat = hidden.reshape(slots * rows, -1).contiguous()
        drawn = self.model.sample(flat, usable_vocab, seed, first, step, temperature)
        return None if drawn is None else (drawn[0].view(slots, rows), drawn[1].view(slots, rows))

    def prompt_rows(self, token_ids: Tensor, begin: int, end: int, page_table: Tensor) -> PromptRows:
        """The rows of positions begin to end of one slot's prompt int64 [1, length]."""
        positions = torch.arange(begin, end, device=self.device)[None]
        return self._prompt_rows(token_ids[:, begin:end], positions, page_table)

    def _prompt_rows(self, token_ids: Tensor, positions: Tensor, page_table: Tensor) -> PromptRows:
        valid = torch.ones_like(token_ids, dtype=torch.bool)
        slots = kv_slots(page_table, positions, valid, self.cache.page_size, self.trash_slot)
        return PromptRows(token_ids, positions, valid, slots)

    def page_table_of(self, view: SlotView) -> Tensor:
        """A page table int64 [1, pages] of one slot, in whole blocks of context."""
        width = -(-len(view.pages) // self.pages_per_block) * self.pages_per_block
        return self.page_row(view.pages, max(self.pages_per_block, width))[None]

    def passes(self, runs: Sequence[Run], start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The forward passes that write positions start to end: (first, end, whether a whole chunk)."""
        for run in runs:
            first, last = max(run.start, start), min(run.end, end)
            chunked = run.kind == "chunk"
            step = self.chunk if chunked else TAIL_ROWS[self.kernels.name]
            for begin in range(first, last, step):
                yield begin, min(begin + step, last), chunked

    def prefill(
        self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView
    ) -> list[Tensor]:
        """Write the KV of positions start to end of one slot; hidden states [1, rows, hidden] of each pass.

        token_ids int64 [1, length] on the device; runs say which program writes which positions, and
        `start` does not cut a chunk run.
        """
        page_table = self.page_table_of(view)
        return [
            self.forward_prompt(token_ids, begin, stop, page_table, view.pages, chunked=chunked)
            for begin, stop, chunked in self.passes(runs, start, end)
        ]

    def forward_prompt(
        self,
        token_ids: Tensor,
        begin: int,
        end: int,
        page_table: Tensor,
        pages: Sequence[int],
        *,
        chunked: bool,
        states: HeadStates | None = None,
    ) -> Tensor:
        """Hidden states [1, end - begin, hidden] of positions of one slot's prompt, writing their KV.

        token_ids int64 [1, length]; page_table int64 [1, pages]; chunked: as one whole prompt chunk;
        states: the slot's, for models that read some.
        """
        rows = self.prompt_rows(token_ids, begin, end, page_table)
        views = [SlotView(end, pages)]
        if not chunked:
            return self.forward(rows, page_table, views, states)
        batch = self._batch(rows, page_table, views, end - begin, chunk_start=begin, states=states)
        return self.model.forward(batch, self.cache.layers).unsqueeze(0)
