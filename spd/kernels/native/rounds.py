"""The operations of a round by the compiled C kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.native.calls import allocate_rows, round_structure
from spd.kernels.native.packed import pack_structure
from spd.kernels.native.products import NativeProducts
from spd.kernels.round.pool_lookup import FACTOR, SHIFT, TextPool
from spd.kernels.round.window import Paging, RoundTensors, RoundWindow, Rows


class NativeRounds(NativeProducts):
    """The operations of a round; see `spd.kernels.interface.Kernels` for the contracts."""

    def mark_time(self, times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
        self.call("mark_time", times, counter, *times.shape, column, advance)

    def round_window(
        self, state: RoundTensors, k: int, paging: Paging, usable_vocab: int
    ) -> RoundWindow:
        """Compute `Kernels.round_window` by C."""
        slots = state.length.shape[0]
        rows, rows_structure = allocate_rows(slots, k + 1, paging)
        draft = torch.empty(slots, k, dtype=torch.int64)
        count = torch.empty(slots, dtype=torch.int64)
        structure = round_structure(state)
        self.call("round_window", structure, rows_structure, draft, count, k, usable_vocab)
        return RoundWindow(rows.token_ids, rows.positions, rows.valid, rows.kv_slots, draft, count)

    def committed_window(
        self,
        state: RoundTensors,
        width: int,
        chosen: Tensor,
        paging: Paging,
        first: Tensor | None = None,
        ahead: int = 0,
    ) -> Rows:
        """Compute `Kernels.committed_window` by C."""
        rows, rows_structure = allocate_rows(state.length.shape[0], width + ahead, paging)
        structure = round_structure(state)
        self.call("committed_window", structure, rows_structure, chosen.contiguous(), first, ahead)
        return rows

    def draft_step(
        self, state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging
    ) -> Rows:
        """Compute `Kernels.draft_step` by C."""
        rows, rows_structure = allocate_rows(state.length.shape[0], 1, paging)
        structure = round_structure(state)
        self.call("draft_step", structure, rows_structure, sampled.contiguous(), step, k)
        return rows

    def keep_states(
        self, hidden: Tensor, rows: Rows, rings: Tensor, page_states: Tensor, page_size: int
    ) -> None:
        """Compute `Kernels.keep_states` by C; rings and page states are contiguous."""
        slots, width, size = hidden.shape
        element = hidden.element_size()
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        self.call(
            "keep_states",
            hidden,
            rows.positions.contiguous(),
            rows.valid.contiguous(),
            rows.kv_slots.contiguous(),
            rings,
            page_states,
            slots,
            width,
            size * element,
            hidden.stride(0) * element,
            hidden.stride(1) * element,
            rings.shape[1] - 1,
            page_size,
        )

    def round_commit(
        self,
        state: RoundTensors,
        window: RoundWindow,
        sampled: Tensor,
        finite: Tensor,
        accepted: Tensor | None = None,
        generated: Tensor | None = None,
    ) -> None:
        """Compute `Kernels.round_commit` by C."""
        self.call(
            "round_commit",
            round_structure(state),
            window.draft.contiguous(),
            window.num_drafts,
            sampled.contiguous(),
            finite.contiguous(),
            accepted,
            generated,
            window.draft.shape[1],
            0 if generated is None else generated.stride(0),
        )

    def ngram_lookup(
        self,
        state: RoundTensors,
        k: int,
        ngram_min: int,
        ngram_max: int,
        bound: int,
        keep_drafts: bool = False,
        behind: int = 0,
    ) -> None:
        """Compute `Kernels.ngram_lookup` by C; bound is not used."""
        self.call("lookup", round_structure(state), k, ngram_min, ngram_max, keep_drafts, behind)

    def pool_lookup(
        self,
        state: RoundTensors,
        pool: TextPool,
        k: int,
        ngram_min: int,
        ngram_max: int,
        behind: int = 0,
    ) -> None:
        """Compute `Kernels.pool_lookup` by C."""
        size = pool.tokens.shape[0]
        buckets, entries = pool.buckets.shape
        structure = pack_structure(
            "2P5l", pool.tokens, pool.buckets, size, buckets, entries, FACTOR, SHIFT
        )
        self.call("pool_lookup", round_structure(state), structure, k, ngram_min, ngram_max, behind)
