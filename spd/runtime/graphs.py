"""Rounds captured as CUDA graphs, one for each fixed shape that is asked for, and replayed.

A graph holds the whole round: verification, draw, commit, emission and the drafting loop. Its inputs
and outputs are the state's tensors, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spd.runtime.out_of_memory import memory_phase
from spd.runtime.round import Logprobs, Round
from spd.runtime.rows import SlotView
from spd.runtime.sampler_class import SamplerClass


@dataclass(frozen=True)
class RoundShape:
    """Everything that chooses a round's device program."""

    k: int
    next_k: int
    needs: SamplerClass
    num_logprobs: int | None


class CapturedRounds:
    """Captures a round's program when its shape is first run, and replays it from then on.

    `capture` takes a function of no arguments and returns a replay function and the function's result;
    it is `capture_cuda` but in tests.
    """

    def __init__(self, round_: Round, capture: Any = None) -> None:
        self.round = round_
        self.pool: Any = None
        self.captured: dict[RoundShape, tuple[Any, Logprobs | None]] = {}
        self._capture = capture or self.capture_cuda

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Logprobs | None:
        """Run one round of this shape; see `Round.run`. The next run reuses the log-probabilities' memory."""
        if shape not in self.captured:
            with memory_phase("capturing a round"):
                self.captured[shape] = self._prepare(shape, views)
        replay, logprobs = self.captured[shape]
        replay()
        return logprobs

    def _prepare(self, shape: RoundShape, views: Sequence[SlotView]) -> tuple[Any, Logprobs | None]:
        """Run once with every slot silent, so that all is compiled and loaded, then capture."""
        state, laws = self.round.state, self.round.sampler.draft_laws
        written = [state.active, state.draft, state.num_drafts, state.counter]
        kept = [(t, t.clone()) for t in (*written, *([] if laws is None else [laws]))]
        state.active.fill_(False)

        def program() -> Logprobs | None:
            return self.round.run(shape.k, views, shape.needs, shape.num_logprobs, shape.next_k)

        try:
            program()
            captured: tuple[Any, Logprobs | None] = self._capture(program)
        finally:
            for tensor, value in kept:
                tensor.copy_(value)
        return captured

    def capture_cuda(self, program: Any) -> tuple[Any, Any]:
        """Record the program's kernels; all graphs share one memory pool, since they run in turn."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = program()
        self.pool = self.pool or graph.pool()
        return graph.replay, result
