"""Drafting by a block drafter, which drafts all tokens of a round in one pass.

Its cache has an entry for each position that the target has read, made of the target's states
there. A round writes those of the rows that it verifies before it commits them; the rejected ones
lie beyond the committed tokens. A pass runs a block of rows behind that text, whose own entries are
overwritten by the next round's. So all entries that stay are of the target's states, in rounds
without drafts too, and nothing has to be caught up. The block has always the number of rows that
the drafter was made for, whatever k is.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from spd.kernels.round.window import RoundWindow, Rows
from spd.runtime.models.block_model import BlockModel
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import BlockEnds, PromptPart, SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingSteps


class BlockProposer(ModelProposer):
    """Drafts by one pass of one runner."""

    reads_target_states = True
    drafts_at_once = True
    slot_attributes = (*ModelProposer.slot_attributes, "block_state")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        *,
        has_lookup: bool = False,
    ) -> None:
        super().__init__(sampler, runners, limit, has_lookup=has_lookup)
        (self.runner,) = runners
        model = self.runner.model
        assert isinstance(model, BlockModel)
        self.block = model.block
        self.refiner = model.refiner
        self.block_state = copy(self.state)
        """The state with mask tokens in place of its drafts."""
        self.block_state.draft = torch.full(
            (self.state.slots, self.block.block_size - 1),
            self.block.mask_token_id,
            dtype=torch.long,
            device=self.state.device,
        )

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the cache entries of parts of prompts, up to the drafter's limit."""
        limit = self.paging.limit
        for part, part_states in zip(parts, states, strict=True):
            if part.begin < limit:
                self.runner.write_prompt_context_entries(part.below(limit), part_states)

    def store_target_states(self, window: RoundWindow, states: Tensor) -> None:
        """Write the cache entries of a round's rows, of the target's states [S, R, hidden]."""
        rows: Rows = window
        limit = self.paging.limit
        if limit < self.state.max_len:
            is_inside = window.positions < limit
            rows = replace(
                window,
                positions=window.positions.clamp(max=limit - 1),
                kv_slots=torch.where(is_inside, window.kv_slots, self.paging.trash_slot),
            )
        self.runner.write_context_entries(states, rows, self.state.page_table)

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Do nothing: every round writes its entries."""

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot by one pass."""
        rows = self.kernels.committed_window(
            state=self.block_state,
            width=1,
            chosen=window.valid[:, 0].contiguous(),
            paging=self.paging,
            first=None,
            ahead=self.block.block_size - 1,
        )
        output = self.runner.forward(
            rows, self.state.page_table, views, block_ends=self._block_ends(rows)
        )
        first = int(not self.block.drafts_from_anchor)
        hidden = output.hidden[:, : first + k]
        refine = None
        if self.refiner is not None:
            refine = partial(self.refiner.draft, hidden=hidden, anchor=rows.token_ids[:, :1])
        tokens = self.sampler.draw_block_drafts(self.runner, hidden[:, first:], needs, refine)
        if k > 1:
            self.state.draft[:, : k - 1] = tokens[:, : k - 1]
        self.kernels.draft_step(
            state=self.state, sampled=tokens[:, k - 1 :], step=k - 1, k=k, paging=self.paging
        )

    def _block_ends(self, rows: Rows) -> BlockEnds:
        """Return what the rows of blocks attend to: up to the last one within the limit."""
        positions = rows.positions
        last = positions[:, -1:].expand_as(positions).contiguous()
        if not self.block.window_precedes_block:
            return BlockEnds(last)
        before = (positions[:, :1] - 1).clamp(min=0).expand_as(positions).contiguous()
        return BlockEnds(last, before)
