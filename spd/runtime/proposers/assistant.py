"""Drafting by an assistant, whose layers read the target's cache at one position in all steps of a
round.

An assistant has no cache to fill and needs no catch-up. For its first draft it needs one state of
the target: that of the position from which the newest token was sampled, which the round has just
verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from spd.kernels.round.window import RoundWindow
from spd.runtime.layers.base import HeadStates
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps


class AssistantProposer(ModelProposer):
    """Drafts by one runner, whose cache is the target's."""

    reads_target_states = True

    def store_target_states(self, window: RoundWindow, states: Tensor) -> None:
        """Store the target's states [S, R, hidden] of a round's rows until `draft` reads them."""
        self._states = states

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Do nothing: an assistant has no cache."""

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot by k passes."""
        runner = self.runners[0]
        rows = self._committed_rows(1, 0, window.valid[:, 0].contiguous())
        read = (rows.positions - 1).clamp(min=0)  # the cache has no entries of drafts
        last_row = (read - window.positions[:, :1]).clamp(0, self._states.shape[1] - 1)
        states = self._states.take_along_dim(last_row[:, :, None], 1)
        for step in range(k):
            rows = replace(rows, positions=read)
            output = runner.forward(rows, self.state.page_table, views, HeadStates(states, 1))
            states = output.states
            tokens = self.sampler.draw_draft(runner, output.hidden, step, needs)
            rows = self.kernels.draft_step(
                state=self.state, sampled=tokens, step=step, k=k, paging=self.paging
            )
