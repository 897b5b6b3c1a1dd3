"""Runs one model over its paged cache: windows of a few rows, and prefill by spans.

Owns the model, its pools and how rows are padded. Knows slots as rows of a page table, not requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from spd.kernels.round.window import Rows, kv_slots
from spd.runtime.layers.base import ForwardBatch, HeadShape, HeadStates, ModelOutput
from spd.runtime.layers.skinny_linear import SkinnyLinear
from spd.runtime.layers.torch_linear import Linear
from spd.runtime.models.decoder import Decoder
from spd.runtime.round import arithmetic_probe as probe
from spd.runtime.round.arithmetic_probe import CANDIDATES, WIDEST
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import NUM_RESERVED, TRASH_PAGE, ZERO_PAGE
from spd.runtime.round.rows import MERGED_WIDTH, PromptPart, SlotRows, SlotView, columns
from spd.runtime.round.transfer import to_device


def _spread(rows: Tensor, present: Tensor, slots: int) -> Tensor:
    """Rows [P, ...] of the slots int64 [P] among zeros: [slots, ...]."""
    return rows.new_zeros(slots, *rows.shape[1:]).index_copy_(0, present, rows)


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest padded number of rows: a bucket, or whole tiles of the widest and a bucket."""
    whole, rest = divmod(rows, WIDEST)
    return whole * WIDEST + (next(b for b in buckets if b >= rest) if rest else 0)


def joined(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Return outputs [1, rows, hidden] of neighbouring rows as one."""
    hidden = torch.cat([output.hidden for output in outputs], 1)
    if all(output.states is output.hidden for output in outputs):
        return ModelOutput.of(hidden)
    return ModelOutput(hidden, torch.cat([output.states for output in outputs], 1))


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
        alone: bool = True,
    ) -> None:
        """alone: whether no other rank has to run passes of the same shapes."""
        self.model = model
        self.cache = cache
        self.chunk = chunk
        self.device = device
        self.draws = isinstance(model.head, SkinnyLinear) and model.logit_softcap is None
        """Whether tokens can be drawn without whole logits; capped ones are left to the sampler."""
        self.kernels = kernels
        self.dtype = cache.dtype
        self.merges_prompts = kernels.capabilities.row_independent
        """Whether prompts of several slots may go through one pass: any rows beside a row leave its bits."""
        self.pages_per_block = (
            KV_BLOCK // cache.page_size
        )  # pages of a whole block of an attended context
        self.trash_slot = TRASH_PAGE * cache.page_size
        self.buckets: tuple[int, ...] | None = None
        """Row counts that give the same bits; None where every number does by construction."""
        self.tile = (
            sys.maxsize if kernels.capabilities.row_independent else WIDEST
        )  # rows of a product at most
        if kernels.capabilities.probes_row_counts:
            self._try_arithmetic(alone)

    def _try_arithmetic(self, alone: bool) -> None:
        """Run one fixed text through the first layers in windows of every shape; see `arithmetic_probe`."""
        model = self.model
        self.buckets = (WIDEST,)
        end = min(KV_BLOCK, model.max_positions)
        if end < WIDEST:
            return
        self.buckets = (*CANDIDATES, WIDEST)  # none is rounded while they are tried
        generator = torch.Generator().manual_seed(0)
        start = end - WIDEST
        pages = list(range(NUM_RESERVED, NUM_RESERVED + 2 * self.pages_per_block))
        layers = model.caches[: max(probe.PROBED_LAYERS, model.varied_layers)]
        room = (pages[-1] + 1, self.cache.page_size, self.dtype, self.device)
        cache = KvCache(layers, *room, slots=1, depth=2 * WIDEST)
        for pool in (pool for layer in cache.layers for pool in layer.pools):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        ids = torch.randint(model.vocab_size, (1, end), generator=generator).to(self.device)
        ring = torch.randn(1, WIDEST, model.state_size, generator=generator)
        states = HeadStates(ring.to(self.device, self.dtype), WIDEST)

        def window(first: int, rows: int, blocks: int) -> probe.Pass:
            place = start + first
            part = PromptPart(
                0, ids, place, place + rows, SlotView(blocks * KV_BLOCK, pages), False
            )
            given = SlotRows(self.prompt_rows(part), self.page_tables([part]), [part.view], states)
            if (
                cache.recurrent
            ):  # a state as of the text's first row, from where tokens are applied again
                run = torch.tensor([[0], [0], [rows], [place], [start]], device=self.device)
                given = given._replace(segments=Segments(run, cache.applied.fill_(start)))
            hidden = model.forward(self._batch(given), cache.layers).hidden
            return hidden, model.logits(hidden, WIDEST)

        self.buckets = probe.admitted_buckets(window)
        if alone:
            products = {p.weight.shape: p for p in model.products if isinstance(p, Linear)}
            for product in products.values():  # one of each shape
                self.buckets = probe.summed_alike(product, self.buckets)

    def page_row(self, pages: Sequence[int], width: int) -> Tensor:
        """A page-table row int64 [width], unused entries pointing at the zero page."""
        return to_device([*pages, *[ZERO_PAGE] * (width - len(pages))], torch.long, self.device)

    def forward(
        self,
        rows: Rows,
        page_table: Tensor,
        views: Sequence[SlotView],
        states: HeadStates | None = None,
        *,
        keeps: bool = True,
    ) -> ModelOutput:
        """Hidden states [S, Q, hidden] of windows, writing the KV of valid rows; one view a slot.

        states: of S slots, for models that read some. Slots without rows give zeros in torch's form.
        keeps: whether all before the rows is committed, which recurrent layers may then write down.
        """
        given = SlotRows(rows, page_table, views, states)
        present = self._present(views)
        if present is not None:
            given = given.of(present)
        slots, width = given.rows.token_ids.shape
        if self.cache.recurrent:
            own = torch.arange(slots, device=self.device) if present is None else present
            given = given.windows(own, self.cache.applied, keeps=keeps)
        made = self._run(self._batch(given)).each(
            lambda t: t[: slots * width].view(slots, width, -1)
        )
        return made if present is None else made.each(lambda t: _spread(t, present, len(views)))

    def _of_prompts(
        self,
        parts: Sequence[PromptPart],
        states: Sequence[HeadStates | None],
        width: int | None = None,
    ) -> SlotRows:
        """The rows of parts of prompts, see `prompt_rows`, and all that one pass over them reads.

        states: of each part's slot. Every layer writes all rows before any reads.
        """
        own = [self.prompt_rows(part, width) for part in parts]
        tables = self.page_tables(parts)
        rows = Rows(*map(torch.cat, zip(*map(columns, own), strict=True)))
        counts = [len(each.valid) for each in own]
        held = None
        segments = None
        if states[0] is not None:
            rings = [
                each.rings.expand(n, -1, -1) for each, n in zip(states, counts, strict=True) if each
            ]
            held = HeadStates(torch.cat(rings), states[0].depth)
        if self.cache.recurrent:  # all of their rows stay
            firsts = accumulate((rows.valid.numel() for rows in own[:-1]), initial=0)
            segments = self._segments(
                [
                    SegmentRow(
                        slot=part.slot,
                        first=first,
                        rows=part.end - part.begin,
                        start=part.begin,
                        keep=part.end,
                    )
                    for part, first in zip(parts, firsts, strict=True)
                ]
            )
        table = torch.cat([one.expand(n, -1) for one, n in zip(tables, counts, strict=True)])
        views = [part.view for part, n in zip(parts, counts, strict=True) for _ in range(n)]
        return SlotRows(rows, table, views, held, segments)

    def _segments(self, runs: Sequence[SegmentRow]) -> Segments:
        """Upload runs as the columns of a table; see `Segments`."""
        table = [value for column in zip(*runs, strict=True) for value in column]
        return Segments(to_device(table, torch.long, self.device).view(5, -1), self.cache.applied)

    def _present(self, views: Sequence[SlotView]) -> Tensor | None:
        """The slots that have rows, int64; None where all are to be run: that all have some, or a GPU's."""
        if self.kernels.capabilities.reads_no_lengths:
            return None
        present = [slot for slot, view in enumerate(views) if view.bound]
        return (
            to_device(present, torch.long, self.device) if 0 < len(present) < len(views) else None
        )

    def _batch(
        self, own: SlotRows, tile: int | None = None, chunk_start: int | None = None
    ) -> ForwardBatch:
        rows = own.rows
        tile = tile or self.tile
        slots, width = rows.token_ids.shape
        ids, positions, places = (
            t.reshape(-1) for t in (rows.token_ids, rows.positions, rows.kv_slots)
        )
        if self.buckets is not None and chunk_start is None:
            extra = bucket_for(slots * width, self.buckets) - slots * width
            if extra:
                # The last row again, which touches no expert that is not touched; it keeps nothing.
                ids, positions = (torch.cat((t, t[-1:].expand(extra))) for t in (ids, positions))
                places = pad(places, (0, extra), value=self.trash_slot)
        return ForwardBatch(
            token_ids=ids,
            positions=positions,
            kv_slots=places,
            page_table=own.page_table,
            plan=self._attention_plan(own, chunk_start),
            num_slots=slots,
            width=width,
            tile=tile,
            chunk_start=chunk_start,
            states=own.states,
            segments=own.segments,
        )

    def _run(self, batch: ForwardBatch) -> ModelOutput:
        """The model's pass over its cache; then the states of the slots that had rows are as of `keep`."""
        made = self.model.forward(batch, self.cache.layers)
        if batch.segments is not None:
            segments = batch.segments
            slots = segments.slots
            before = segments.applied[slots]
            after = torch.where(segments.counts > 0, segments.keeps, before)
            segments.applied.scatter_(0, slots, after)
        return made

    def _attention_plan(
        self, given: SlotRows, chunk_start: int | None
    ) -> dict[HeadShape, AttentionPlan]:
        """Plan the attention of all layers over the slots' rows, for each shape of heads."""
        positions = given.rows.positions
        bounds: list[int] = []
        first_pages: list[int | None] = []
        if self.buckets is not None:  # only the torch form asks the host
            if chunk_start is None:
                extra = bucket_for(positions.shape[1], self.buckets) - positions.shape[1]
                positions = torch.cat((positions, positions[:, -1:].expand(-1, extra)), 1)
            for view in given.views:
                bounds.append(-(-view.bound // KV_BLOCK) * KV_BLOCK)
                count = bounds[-1] // self.cache.page_size
                pages = list(view.pages[:count])
                in_order = bool(pages) and pages == list(range(pages[0], pages[0] + count))
                first_pages.append(pages[0] if in_order else None)
        windows = Windows(
            positions, given.rows.valid, given.page_table, bounds, first_pages, chunk_start
        )
        shapes = {(h.num_heads, h.num_kv_heads, h.head_dim): h for h in self.model.heads}
        return {
            shape: self.kernels.plan_attention(windows, heads, self.cache.page_size, self.dtype)
            for shape, heads in shapes.items()
        }

    def logits(self, hidden: Tensor, views: Sequence[SlotView] = ()) -> Tensor:
        """Float32 logits [..., V] of hidden [..., hidden].

        views: one for each of the first dimension, where some may have no rows; see `forward`.
        """
        if (present := self._present(views)) is not None:
            hidden = hidden.index_select(0, present)
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        rows = flat.shape[0]
        extra = 0 if self.buckets is None else bucket_for(rows, self.buckets) - rows
        if extra:
            flat = torch.cat((flat, flat.new_zeros(extra, flat.shape[1])))
        scores = self.model.logits(flat, self.tile)[:rows].view(*hidden.shape[:-1], -1)
        return scores if present is None else _spread(scores, present, len(views))

    def sample(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor] | None:
        """Tokens [S, R] of hidden [S, R, hidden] and whether each is finite; None where no head draws."""
        if not self.draws:
            return None
        slots, rows = hidden.shape[:2]
        # The last row of every window reshapes to a view with gaps, which kernels do not read.
        tokens, finite = self.model.sample(hidden.reshape(slots * rows, -1).contiguous(), draw)
        return tokens.view(slots, rows), finite.view(slots, rows)

    def admit(self, slot: int, start: int) -> None:
        """A slot begins: of its text nothing is known but pages, and states as of `start`."""
        if self.cache.recurrent:
            self.cache.applied[slot].fill_(start)

    def settle(self, slot: int, end: int) -> None:
        """Apply a slot's ring rows below position `end`, all committed: its states are as of there then."""
        if self.cache.recurrent:
            end = min(end, self.model.max_positions)
            run = SegmentRow(slot, first=0, rows=1, start=end, keep=end)
            self.model.settle(self._segments([run]), self.cache.layers)
            self.cache.applied[slot].fill_(end)

    def prompt_rows(self, part: PromptPart, width: int | None = None) -> Rows:
        """The rows of a part of a prompt, as one window or as windows of `width`.

        The last is filled up with rows that keep nothing: the last row again, which touches no expert that
        is not touched.
        """
        width = width or part.end - part.begin
        count = -(-(part.end - part.begin) // width)
        own = part.begin + torch.arange(count * width, device=self.device).view(count, width)
        valid = own < part.end
        positions = own.clamp(max=part.end - 1)
        table = self.page_tables([part]).expand(count, -1)
        slots = kv_slots(table, positions, valid, self.cache.page_size, self.trash_slot)
        return Rows(part.token_ids[0][positions], positions, valid, slots)

    def page_tables(self, parts: Sequence[PromptPart]) -> Tensor:
        """A page table int64 [N, pages], in whole blocks of context, of each part's slot."""
        blocks = max(1, *(-(-len(part.view.pages) // self.pages_per_block) for part in parts))
        width = blocks * self.pages_per_block
        return torch.stack([self.page_row(part.view.pages, width) for part in parts])

    def write(
        self, parts: Sequence[PromptPart], states: Sequence[HeadStates] = ()
    ) -> list[ModelOutput]:
        """Write the KV of parts of prompts; return each part's output [1, end - begin, hidden].

        states: of each part's slot, for models that read some.
        """
        rings: Sequence[HeadStates | None] = states or [None] * len(parts)
        if self.merges_prompts and parts:
            return self._write_together(parts, rings)
        return [self._write_alone(*each) for each in zip(parts, rings, strict=True)]

    def _write_alone(self, part: PromptPart, ring: HeadStates | None) -> ModelOutput:
        """Run one pass over a chunk, or one for each few rows."""
        step = self.chunk if part.chunked else self.kernels.capabilities.tail_rows
        outputs: list[ModelOutput] = []
        for begin in range(part.begin, part.end, step):
            end = min(begin + step, part.end)
            piece = part._replace(begin=begin, end=end, view=part.view._replace(bound=end))
            outputs.append(self.forward_prompt(piece, ring))
        return outputs[0] if len(outputs) == 1 else joined(outputs)

    def _write_together(
        self, parts: Sequence[PromptPart], held: Sequence[HeadStates | None]
    ) -> list[ModelOutput]:
        """One pass: every layer writes all rows before any reads, so a part may rest on another's pages."""
        output = self._run(self._batch(self._of_prompts(parts, held, MERGED_WIDTH)))
        outputs: list[ModelOutput] = []
        begin = 0
        for part in parts:
            own = slice(begin, begin + part.end - part.begin)
            outputs.append(output.each(itemgetter((None, own))))
            begin += part.filled
        return outputs

    def forward_prompt(self, part: PromptPart, states: HeadStates | None = None) -> ModelOutput:
        """Hidden states [1, end - begin, hidden] of a part of a prompt in one pass, writing its KV.

        states: of its slot, for models that read some.
        """
        given = self._of_prompts([part], [states])
        count = part.end - part.begin
        batch = (
            self._batch(given, count, chunk_start=part.begin)
            if part.chunked
            else self._batch(given)
        )
        return self._run(batch).each(lambda tensor: tensor[None, :count])
