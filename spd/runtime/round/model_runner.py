"""Running one model over its paged cache: windows of a few rows, and prefill of parts of prompts.

The runner owns the model, its pools and the padding of rows. To it a slot is a row of a page table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.functional import pad

from spd.kernels.attention.attention_chunks import KV_BLOCK
from spd.kernels.attention.paged_attention import AttentionPlan, Windows
from spd.kernels.interface import Kernels
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.recurrent.short_conv import SegmentRow, Segments
from spd.kernels.recurrent.state_blocks import last_border
from spd.kernels.round.window import Rows, kv_slots
from spd.kernels.seeded import seeded_generator
from spd.runtime.layers.base import ForwardBatch, HeadShape, HeadStates, ModelOutput
from spd.runtime.layers.skinny_linear import SkinnyLinear
from spd.runtime.layers.torch_linear import Linear
from spd.runtime.models.block_model import BlockModel
from spd.runtime.models.decoder import Decoder
from spd.runtime.round import arithmetic_probe as probe
from spd.runtime.round.arithmetic_probe import CANDIDATE_BUCKETS, WIDEST_BUCKET
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import NUM_RESERVED_PAGES, TRASH_PAGE, ZERO_PAGE
from spd.runtime.round.row_padding import (
    concatenate_outputs,
    padded_row_count,
    repeat_last,
    scatter_rows,
)
from spd.runtime.round.rows import MERGED_WIDTH, BlockEnds, PromptPart, SlotRows, SlotView
from spd.runtime.round.transfer import to_device

AttentionPlans = dict[HeadShape, AttentionPlan]
"""Plans by the shape of heads."""


class ModelRunner:
    """One model, its cache and its two programs: verify-class windows and prompt chunks."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        chunk: int,
        device: str,
        kernels: Kernels,
        *,
        is_only_rank: bool = True,
    ) -> None:
        """chunk: positions of a full chunk. is_only_rank: True if no other rank runs passes."""
        self.model = model
        self.cache = cache
        self.chunk = chunk
        self.device = device
        self.samples_in_head = isinstance(model.head, SkinnyLinear) and model.logit_softcap is None
        """True if the head can sample tokens without writing logits, which must not be capped."""
        self.kernels = kernels
        self.dtype = cache.dtype
        self.merges_prompts = kernels.capabilities.row_independent
        """True if prompts of several slots may share a pass, as other rows do not change a row's bits."""
        self.pages_per_block = KV_BLOCK // cache.page_size
        """Pages of a full block of an attended context."""
        self.trash_slot = TRASH_PAGE * cache.page_size  # takes entries of rows that are not kept
        self.buckets: tuple[int, ...] | None = None
        """Row counts that give the same bits; None where every count does by construction."""
        self.tile = sys.maxsize if kernels.capabilities.row_independent else WIDEST_BUCKET
        """Rows of a product at most."""
        if kernels.capabilities.probes_row_counts:
            self._probe_row_counts(is_only_rank)

    def _probe_row_counts(self, is_only_rank: bool) -> None:
        """Set `buckets` by running a fixed text through the first layers: see `arithmetic_probe`."""
        model = self.model
        self.buckets = (WIDEST_BUCKET,)
        end = min(KV_BLOCK, model.max_positions)
        if end < WIDEST_BUCKET:
            return
        self.buckets = (*CANDIDATE_BUCKETS, WIDEST_BUCKET)  # no width is padded while it is tested
        generator = seeded_generator()
        start = end - WIDEST_BUCKET
        pages = list(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + 2 * self.pages_per_block))
        cache = KvCache(
            model.cache_layouts[: max(probe.MIN_PROBED_LAYERS, model.num_probe_layers)],
            num_pages=pages[-1] + 1,
            page_size=self.cache.page_size,
            dtype=self.dtype,
            device=self.device,
            slots=1,
            depth=2 * WIDEST_BUCKET,
            rounded=self.cache.rounded,
        )
        for layer in cache.layers:
            for pool in layer.pools:
                pool.copy_(torch.randn(pool.shape, generator=generator))
        ids = torch.randint(model.vocab_size, (1, end), generator=generator).to(self.device)
        ring = torch.randn(1, WIDEST_BUCKET, model.state_size, generator=generator)
        states = HeadStates(ring.to(self.device, self.dtype), WIDEST_BUCKET)

        def run_window(first: int, rows: int, blocks: int) -> probe.WindowOutputs:
            """Run a window of the text's last rows with so many blocks of context."""
            begin = start + first
            view = SlotView(blocks * KV_BLOCK, pages)
            part = PromptPart(
                slot=0, token_ids=ids, begin=begin, end=begin + rows, view=view, chunked=False
            )
            slot_rows = SlotRows(self.prompt_rows(part), self.page_tables([part]), [view], states)
            if cache.has_recurrent_layers:
                applied = cache.applied.fill_(last_border(start))
                table = torch.tensor([0, 0, rows, begin, last_border(start)], device=self.device)
                slot_rows = slot_rows._replace(segments=Segments(table[:, None], applied))
            hidden = model.forward(self._make_batch(slot_rows), cache.layers).hidden
            return hidden, model.logits(hidden, WIDEST_BUCKET)

        self.buckets = probe.matching_buckets(run_window)
        if is_only_rank:
            products = {p.weight.shape: p for p in model.products if isinstance(p, Linear)}
            for product in products.values():  # one of each shape
                self.buckets = probe.widths_with_matching_sum_order(product, self.buckets)

    def page_row(self, pages: Sequence[int], width: int) -> Tensor:
        """Return a row of a page table, int64 [width], whose unused entries are the zero page."""
        return to_device([*pages, *[ZERO_PAGE] * (width - len(pages))], torch.long, self.device)

    def forward(
        self,
        rows: Rows,
        page_table: Tensor,
        views: Sequence[SlotView],
        states: HeadStates | None = None,
        *,
        prefix_committed: bool = True,
        block_ends: BlockEnds | None = None,
    ) -> ModelOutput:
        """Return the hidden states [S, Q, hidden] of windows, and write the KV of their valid rows.

        views: one for each slot. states: target states of the S slots, for models that read some.
        prefix_committed: True if all tokens before the rows are committed, so that recurrent layers
        may store their states. block_ends: of rows that are a block drafter's. In torch's form the
        states of slots without rows are zeros.
        """
        slot_rows = SlotRows(rows, page_table, views, states, block_ends=block_ends)
        occupied = self._occupied_slots(views)
        if occupied is not None:
            slot_rows = slot_rows.select(occupied)
        num_slots, width = slot_rows.rows.token_ids.shape
        if self.cache.has_recurrent_layers:
            slots = occupied
            if slots is None:
                slots = torch.arange(num_slots, device=self.device)
            slot_rows = slot_rows.with_segments(
                slots, self.cache.applied, prefix_committed=prefix_committed
            )
        output = self._run_model(self._make_batch(slot_rows)).map(
            lambda tensor: tensor[: num_slots * width].view(num_slots, width, -1)
        )
        if occupied is None:
            return output
        return output.map(lambda tensor: scatter_rows(tensor, occupied, len(views)))

    def _prompt_slot_rows(
        self,
        parts: Sequence[PromptPart],
        states: Sequence[HeadStates | None],
        width: int | None = None,
    ) -> SlotRows:
        """Return the rows of parts of prompts, see `prompt_rows`, with all that one pass over them
        reads.

        states: target states of each part's slot. Every layer writes all rows before it reads any.
        """
        part_rows = [self.prompt_rows(part, width) for part in parts]
        rows = Rows(
            torch.cat([rows.token_ids for rows in part_rows]),
            torch.cat([rows.positions for rows in part_rows]),
            torch.cat([rows.valid for rows in part_rows]),
            torch.cat([rows.kv_slots for rows in part_rows]),
        )
        window_counts = [len(rows.valid) for rows in part_rows]
        window_states = None
        segments = None
        if states[0] is not None:
            rings = [
                part_states.rings.expand(count, -1, -1)
                for part_states, count in zip(states, window_counts, strict=True)
                if part_states
            ]
            window_states = HeadStates(torch.cat(rings), states[0].depth)
        if self.cache.has_recurrent_layers:  # all of their rows are committed
            firsts = accumulate((rows.valid.numel() for rows in part_rows[:-1]), initial=0)
            segments = self._upload_segments(
                [
                    SegmentRow(
                        slot=part.slot,
                        first=first,
                        rows=part.end - part.begin,
                        start=part.begin,
                        keep=last_border(part.end),
                    )
                    for part, first in zip(parts, firsts, strict=True)
                ]
            )
        tables = zip(self.page_tables(parts), window_counts, strict=True)
        page_table = torch.cat([table.expand(count, -1) for table, count in tables])
        views: list[SlotView] = []
        for part, count in zip(parts, window_counts, strict=True):
            views.extend([part.view] * count)
        return SlotRows(
            rows=rows, page_table=page_table, views=views, states=window_states, segments=segments
        )

    def _upload_segments(self, segment_rows: Sequence[SegmentRow]) -> Segments:
        """Return segments whose table, a column each, is uploaded to the device; see `Segments`."""
        table = [value for column in zip(*segment_rows, strict=True) for value in column]
        return Segments(to_device(table, torch.long, self.device).view(5, -1), self.cache.applied)

    def _occupied_slots(self, views: Sequence[SlotView]) -> Tensor | None:
        """Return the numbers of the slots that have rows, int64 [P]; None if all slots are run.

        All are run where each has rows or none has, and on a GPU.
        """
        if self.kernels.capabilities.reads_no_lengths:
            return None
        occupied = [slot for slot, view in enumerate(views) if view.bound]
        if not 0 < len(occupied) < len(views):
            return None
        return to_device(occupied, torch.long, self.device)

    def _make_batch(
        self,
        slot_rows: SlotRows,
        tile: int | None = None,
        chunk_start: int | None = None,
        *,
        attends: bool = True,
    ) -> ForwardBatch:
        """Return the batch of a pass with its plans of attention, padded to a bucket of rows.

        tile: rows of a product at most; None: `self.tile`. chunk_start: the first position of a
        prompt's chunk; None for windows. attends: False for a pass without attention.
        """
        plan: AttentionPlans = {}
        block_plan: AttentionPlans = {}
        if attends:
            plan, block_plan = self._plan_attention(slot_rows, chunk_start)
        rows = slot_rows.rows
        tile = tile or self.tile
        slots, width = rows.token_ids.shape
        token_ids = rows.token_ids.reshape(-1)
        positions = rows.positions.reshape(-1)
        kv_slots = rows.kv_slots.reshape(-1)
        if self.buckets is not None and chunk_start is None:
            padding = padded_row_count(slots * width, self.buckets) - slots * width
            if padding:
                # The last row is repeated, so that no other expert is used. Its KV is not stored.
                token_ids = torch.cat((token_ids, token_ids[-1:].expand(padding)))
                positions = torch.cat((positions, positions[-1:].expand(padding)))
                kv_slots = pad(kv_slots, (0, padding), value=self.trash_slot)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            page_table=slot_rows.page_table,
            plan=plan,
            block_plan=block_plan,
            is_block=slot_rows.block_ends is not None,
            num_slots=slots,
            width=width,
            tile=tile,
            chunk_start=chunk_start,
            states=slot_rows.states,
            segments=slot_rows.segments,
        )

    def _run_model(self, batch: ForwardBatch) -> ModelOutput:
        """Run the model over its cache, write the batch's entries there, and return its output.

        Recurrent states of slots with rows are as of `keeps` afterwards, which `applied` records.
        """
        output = self.model.forward(batch, self.cache.layers)
        if batch.segments is not None:
            segments = batch.segments
            slots = segments.slots
            before = segments.applied[slots]
            after = torch.where(segments.counts > 0, segments.keeps, before)
            segments.applied.scatter_(0, slots, after)
        return output

    def _plan_attention(
        self, slot_rows: SlotRows, chunk_start: int | None
    ) -> tuple[AttentionPlans, AttentionPlans]:
        """Plan the attention of all layers over the slots' rows, for each shape of heads.

        The second plans are those of layers whose rows attend to all rows of their block.
        """
        positions = slot_rows.rows.positions
        block_ends = slot_rows.block_ends
        bounds: list[int] = []
        first_pages: list[int | None] = []
        if self.buckets is not None:  # only torch's form reads the host's views
            if chunk_start is None:
                padded_width = padded_row_count(positions.shape[1], self.buckets)
                pad_rows = partial(repeat_last, count=padded_width)
                positions = pad_rows(positions)
                block_ends = None if block_ends is None else block_ends.map(pad_rows)
            for view in slot_rows.views:
                bounds.append(-(-view.bound // KV_BLOCK) * KV_BLOCK)
                count = bounds[-1] // self.cache.page_size
                pages = list(view.pages[:count])
                is_consecutive = bool(pages) and pages == list(range(pages[0], pages[0] + count))
                first_pages.append(pages[0] if is_consecutive else None)
        windows = Windows(
            positions,
            slot_rows.rows.valid,
            slot_rows.page_table,
            bounds,
            first_pages,
            chunk_start,
        )
        block_windows = windows
        if block_ends is not None:
            block_windows = replace(windows, last=block_ends.last)
            if block_ends.window_ends is not None:
                windows = replace(windows, positions=block_ends.window_ends, last=positions)
                block_windows = replace(block_windows, positions=block_ends.window_ends)
        plans: tuple[AttentionPlans, AttentionPlans] = ({}, {})
        for heads in self.model.heads:
            shape = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
            plans[heads.sees_block][shape] = self.kernels.plan_attention(
                block_windows if heads.sees_block else windows,
                replace(heads, rounded=self.cache.rounded),
                self.cache.page_size,
                self.dtype,
            )
        return plans

    def logits(self, hidden: Tensor, views: Sequence[SlotView] = ()) -> Tensor:
        """Return float32 logits [..., V] of hidden [..., hidden].

        views: one for each entry of the first dimension, where some may have no rows; see
        `forward`.
        """
        occupied = self._occupied_slots(views)
        if occupied is not None:
            hidden = hidden.index_select(0, occupied)
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        rows = flat.shape[0]
        padding = 0 if self.buckets is None else padded_row_count(rows, self.buckets) - rows
        if padding:
            flat = torch.cat((flat, flat.new_zeros(padding, flat.shape[1])))
        logits = self.model.logits(flat, self.tile)[:rows].view(*hidden.shape[:-1], -1)
        return logits if occupied is None else scatter_rows(logits, occupied, len(views))

    def sample_in_head(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor] | None:
        """Sample tokens [S, R] in the head from hidden [S, R, hidden]; True where they are finite.

        None if the head cannot sample.
        """
        if not self.samples_in_head:
            return None
        slots, rows = hidden.shape[:2]
        flat = hidden.reshape(slots * rows, -1).contiguous()  # windows' last rows are apart
        tokens, finite = self.model.sample_tokens(flat, draw)
        return tokens.view(slots, rows), finite.view(slots, rows)

    def admit(self, slot: int, start: int) -> None:
        """Record that a slot's pages, recurrent states and rings are as of position `start`."""
        if self.cache.has_recurrent_layers:
            self.cache.applied[slot].fill_(last_border(start))

    def settle(self, slot: int, end: int) -> None:
        """Apply a slot's rings, committed up to `end`, to its states up to the last border."""
        if self.cache.has_recurrent_layers:
            end = min(end, self.model.max_positions)
            segment = SegmentRow(slot, first=0, rows=1, start=end, keep=last_border(end))
            self.model.apply_rings(self._upload_segments([segment]), self.cache.layers)
            self.cache.applied[slot].fill_(segment.keep)

    def prompt_rows(self, part: PromptPart, width: int | None = None) -> Rows:
        """Return the rows of a part of a prompt, as one window or as windows of `width`.

        The last window is padded by repeating its last row, so that no other expert is used. The
        padding is not valid and its KV is not stored.
        """
        width = width or part.end - part.begin
        count = -(-(part.end - part.begin) // width)
        padded = part.begin + torch.arange(count * width, device=self.device).view(count, width)
        valid = padded < part.end
        positions = padded.clamp(max=part.end - 1)
        table = self.page_tables([part]).expand(count, -1)
        slots = kv_slots(
            page_table=table,
            positions=positions,
            valid=valid,
            page_size=self.cache.page_size,
            trash_slot=self.trash_slot,
        )
        return Rows(part.token_ids[0][positions], positions, valid, slots)

    def page_tables(self, parts: Sequence[PromptPart]) -> Tensor:
        """Return a page table, int64 [N, pages], of the parts' slots, in full blocks of context."""
        blocks = max(1, *(-(-len(part.view.pages) // self.pages_per_block) for part in parts))
        width = blocks * self.pages_per_block
        return torch.stack([self.page_row(part.view.pages, width) for part in parts])

    def write_prompt_parts(
        self, parts: Sequence[PromptPart], states: Sequence[HeadStates] = ()
    ) -> list[ModelOutput]:
        """Write the cache entries of prompt parts; return the output [1, end - begin, hidden] of
        each.

        states: target states of each part's slot, for models that read some.
        """
        rings: Sequence[HeadStates | None] = states or [None] * len(parts)
        if self.merges_prompts and parts:
            return self._write_merged_parts(parts, rings)
        return [self._write_part(part, ring) for part, ring in zip(parts, rings, strict=True)]

    def _write_part(self, part: PromptPart, ring: HeadStates | None) -> ModelOutput:
        """Write one part, by one pass a chunk or one a tile of few rows; return its output."""
        step = self.chunk if part.chunked else self.kernels.capabilities.tail_rows
        outputs: list[ModelOutput] = []
        for begin in range(part.begin, part.end, step):
            end = min(begin + step, part.end)
            piece = part._replace(begin=begin, end=end, view=part.view._replace(bound=end))
            outputs.append(self.forward_prompt(piece, ring))
        return outputs[0] if len(outputs) == 1 else concatenate_outputs(outputs)

    def _write_merged_parts(
        self, parts: Sequence[PromptPart], states: Sequence[HeadStates | None]
    ) -> list[ModelOutput]:
        """Write parts, each of another slot, in one pass and return the output of each.

        states: one for each part, or None for all. Attention writes all rows before it reads any, so
        a part may read pages that another slot's part writes.
        """
        slot_rows = self._prompt_slot_rows(parts, states, MERGED_WIDTH)
        output = self._run_model(self._make_batch(slot_rows))
        outputs: list[ModelOutput] = []
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.end - part.begin)
            outputs.append(output.map(itemgetter((None, rows))))
            begin += part.padded_rows
        return outputs

    def forward_prompt(self, part: PromptPart, states: HeadStates | None = None) -> ModelOutput:
        """Write the KV of a part of a prompt in one pass; return its output [1, end - begin,
        hidden].

        states: target states of its slot, for models that read some.
        """
        slot_rows = self._prompt_slot_rows([part], [states])
        count = part.end - part.begin
        if part.chunked:
            batch = self._make_batch(slot_rows, count, chunk_start=part.begin)
        else:
            batch = self._make_batch(slot_rows)
        return self._run_model(batch).map(lambda tensor: tensor[None, :count])

    def write_context_entries(
        self, states: Tensor, rows: Rows, page_table: Tensor, chunk_start: int | None = None
    ) -> None:
        """Write the cache entries that this block drafter makes of the target's states of rows.

        states: [S, W, hidden]. chunk_start: the first position of a full chunk; None for windows.
        """
        assert isinstance(self.model, BlockModel)
        slot_rows = SlotRows(rows, page_table, ())
        tile = None if chunk_start is None else states.shape[1]
        batch = self._make_batch(slot_rows, tile, chunk_start, attends=False)
        flat = repeat_last(states.flatten(0, 1).T, len(batch.positions)).T.contiguous()
        self.model.store_context(flat, batch, self.cache.layers)

    def write_prompt_context_entries(self, part: PromptPart, states: Tensor) -> None:
        """Write the cache entries of a part of a prompt, as `write_context_entries` does of rows.

        states: [1, W, hidden], W at least the part's rows.
        """
        step = self.chunk if part.chunked else self.kernels.capabilities.tail_rows
        for begin in range(part.begin, part.end, step):
            end = min(begin + step, part.end)
            piece = part._replace(begin=begin, end=end)
            self.write_context_entries(
                states[:, begin - part.begin : end - part.begin],
                self.prompt_rows(piece),
                self.page_tables([piece]),
                begin if part.chunked else None,
            )
