"""Runs one model over its paged cache: windows of a few rows, and prefill by spans.

Owns the model, its pools and the row buckets. Knows slots as rows of a page table, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.paged_attention import KV_BLOCK, causal_bias
from spd.runtime.kv_cache import KvCache
from spd.runtime.models.base import CausalModel, ForwardBatch, LayerCache
from spd.runtime.page_table import NUM_RESERVED, TRASH_PAGE, ZERO_PAGE
from spd.runtime.row_buckets import CANDIDATES, PROBED_LAYERS, WIDEST, admitted_buckets, bucket_for
from spd.runtime.spans import Run


@dataclass(frozen=True)
class SlotView:
    """What the host knows of a slot's cache: an upper bound of its length, and its pages.

    A bound of 0 means that the slot has no rows.
    """

    bound: int
    pages: Sequence[int]


EMPTY_SLOT = SlotView(0, ())


class ModelRunner:
    """One model, its cache and its two programs: verify-class tiles and prefill chunks."""

    def __init__(self, model: CausalModel, cache: KvCache, chunk: int, device: str) -> None:
        self.model, self.cache, self.chunk, self.device = model, cache, chunk, device
        self.dtype = cache.layers[0].key.dtype
        self.pages_per_block = KV_BLOCK // cache.page_size
        self.buckets: tuple[int, ...] = (*CANDIDATES, WIDEST)
        self.buckets = self._find_buckets()

    def _find_buckets(self) -> tuple[int, ...]:
        """Run one fixed text through the first layers in windows of every width; see `row_buckets`."""
        model = self.model
        start = min(KV_BLOCK, model.max_positions) - WIDEST
        if start < 0:
            return (WIDEST,)
        generator = torch.Generator().manual_seed(0)
        pages = list(range(NUM_RESERVED, NUM_RESERVED + 2 * self.pages_per_block))
        shape = (pages[-1] + 1, self.cache.page_size, model.num_kv_heads, model.head_dim)
        caches = [
            LayerCache(
                *(torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(2))
            )
            for _ in range(min(PROBED_LAYERS, model.num_layers))
        ]
        ids = torch.randint(model.vocab_size, (1, WIDEST), generator=generator).to(self.device)
        positions = torch.arange(start, start + WIDEST, device=self.device)[None]
        table = self.page_row(pages, len(pages))[None]

        def window(first: int, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
            cut = slice(first, first + rows)
            valid = torch.ones(1, rows, dtype=torch.bool, device=self.device)
            views = [SlotView(blocks * KV_BLOCK, pages)]
            batch = self._batch(ids[:, cut], positions[:, cut], valid, table, views, WIDEST)
            hidden = model.forward(batch, caches)
            return hidden, model.logits(hidden, WIDEST)

        return admitted_buckets(window)

    def _first_page(self, pages: Sequence[int], count: int) -> int | None:
        run = pages[:count]
        if len(run) < count or any(page != run[0] + i for i, page in enumerate(run)):
            return None
        return run[0]

    def page_row(self, pages: Sequence[int], width: int) -> Tensor:
        """A page-table row int64 [width], unused entries pointing at the zero page."""
        row = torch.full((width,), ZERO_PAGE, dtype=torch.long)
        row[: len(pages)] = torch.tensor(pages, dtype=torch.long)
        return row.to(self.device)

    def _kv_slots(self, page_table: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        size = self.cache.page_size
        columns = (positions // size).clamp(max=page_table.shape[1] - 1)
        slots = page_table.gather(1, columns) * size + positions % size
        return torch.where(valid, slots, TRASH_PAGE * size)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        valid: Tensor,
        page_table: Tensor,
        views: Sequence[SlotView],
    ) -> Tensor:
        """Hidden states [S, Q, hidden] of windows of Q positions, writing the KV of valid rows.

        token_ids, positions int64 [S, Q] with positions ascending in a window; valid bool [S, Q];
        page_table int64 [S, pages]; one view a slot.
        """
        slots, width = token_ids.shape
        if width == self.chunk and slots == 1:
            padded, tile = width, width
        else:
            padded, tile = bucket_for(width, self.buckets), WIDEST
        if padded > width:
            token_ids, positions, valid = (
                torch.cat((t, t[:, -1:].expand(-1, padded - width)), dim=1)
                for t in (token_ids, positions, valid)
            )
            valid = valid.clone()
            valid[:, width:] = False
        batch = self._batch(token_ids, positions, valid, page_table, views, tile)
        hidden = self.model.forward(batch, self.cache.layers)
        return hidden[: slots * padded].view(slots, padded, -1)[:, :width]

    def _batch(
        self,
        token_ids: Tensor,
        positions: Tensor,
        valid: Tensor,
        page_table: Tensor,
        views: Sequence[SlotView],
        tile: int,
    ) -> ForwardBatch:
        slots, width = token_ids.shape
        rows = slots * width
        extra = (bucket_for(rows, self.buckets) if tile == WIDEST else rows) - rows
        flat = [t.reshape(-1) for t in (token_ids, positions, self._kv_slots(page_table, positions, valid))]
        if extra:
            flat = [torch.cat((t, t.new_zeros(extra))) for t in flat]
        groups = self.model.num_heads // self.model.num_kv_heads
        biases: list[Tensor | None] = []
        first_pages: list[int | None] = []
        for s, view in enumerate(views):
            blocks = -(-view.bound // KV_BLOCK)
            if not blocks:
                biases.append(None)
                first_pages.append(None)
                continue
            biases.append(causal_bias(positions[s], blocks * KV_BLOCK, groups, self.dtype))
            first_pages.append(self._first_page(view.pages, blocks * self.pages_per_block))
        return ForwardBatch(
            token_ids=flat[0],
            positions=flat[1],
            kv_slots=flat[2],
            page_table=page_table,
            biases=tuple(biases),
            first_pages=tuple(first_pages),
            num_slots=slots,
            width=width,
            tile=tile,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of hidden [..., hidden]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        extra = bucket_for(flat.shape[0], self.buckets) - flat.shape[0]
        if extra:
            flat = torch.cat((flat, flat.new_zeros(extra, flat.shape[1])))
        logits = self.model.logits(flat, WIDEST)
        return logits[: logits.shape[0] - extra].view(*hidden.shape[:-1], -1)

    def prefill(self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView) -> int:
        """Write the KV of positions start to end of one slot; returns the number of forward passes.

        token_ids int64 [1, length] on the device; runs say which program writes which positions, and
        `start` does not cut a chunk run.
        """
        page_table = self.page_row(view.pages, max(1, len(view.pages)))[None]
        passes = 0
        for run in runs:
            first, last = max(run.start, start), min(run.end, end)
            step = self.chunk if run.kind == "chunk" else WIDEST
            for begin in range(first, last, step):
                stop = min(begin + step, last)
                positions = torch.arange(begin, stop, device=self.device)[None]
                ids = token_ids[:, begin:stop]
                seen = SlotView(stop, view.pages)
                self.forward(ids, positions, torch.ones_like(ids, dtype=torch.bool), page_table, [seen])
                passes += 1
        return passes
