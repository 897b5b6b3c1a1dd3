"""Drafting by an assistant: its layers read the target's own cache, at one position in all of a round.

There is no cache to fill and nothing to catch up with. What a round has verified gave the target's state of
the last position that it read, of which the newest token was drawn: the first draft needs no other one.
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
    """Drafts with one runner, whose cache is the target's."""

    reads_target_states = True

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        """Hold the target's states [S, R, hidden] of a round's rows until it drafts."""
        self._states = states

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Do nothing."""

    def _draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        runner = self.runners[0]
        rows = self._window(1, 0, window.valid[:, 0].contiguous())
        read = (rows.positions - 1).clamp(min=0)  # what is drafted is never in the cache
        last = (read - window.positions[:, :1]).clamp(0, self._states.shape[1] - 1)
        states = self._states.take_along_dim(last[:, :, None], 1)
        for step in range(k):
            rows = replace(rows, positions=read)
            made = runner.forward(rows, self.state.page_table, views, HeadStates(states, 1))
            states = made.states
            drawn = self.sampler.draw_draft(runner, made.hidden, step, needs)
            rows = self.kernels.draft_step(self.state, drawn, step, k, self.paging)
