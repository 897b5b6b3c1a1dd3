"""Rounds captured as CUDA graphs, or recorded on a CPU: one for each fixed shape that is asked for.

A graph holds the whole round: verification, draw, commit, emission and the drafting loop. Its inputs
and outputs are the state's tensors, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spd.kernels.native.library import NativeKernels
from spd.kernels.native.recording import POOL_BYTES, NotRecordable, record
from spd.runtime.round.round import Logprobs, Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import narrow_to_slots

MAX_RECORDED = (
    64  # rounds that are recorded at most: each holds the arguments of some hundred calls
)


@dataclass(frozen=True)
class RoundShape:
    """Everything that chooses a round's device program."""

    k: int
    next_k: int
    needs: SamplingSteps
    num_logprobs: int | None
    slots: int  # the first so many run
    threads: int = 0  # of C functions


class CapturedRounds:
    """Captures a round's program when its shape is first run, or before, and replays it from then on.

    `capture` takes a function of no arguments and returns a replay function and the function's result;
    it is `capture_cuda` but in tests.
    """

    def __init__(self, round_: Round, capture: Any = None) -> None:
        self.round = round_
        self.pool: Any = None
        self.captured: dict[RoundShape, tuple[Any, Logprobs | None]] = {}
        self.lazily = False  # nothing more is captured before it is run: memory ran out
        self._capture = capture or self.capture_cuda
        slots = round_.state.slots
        self.sizes: tuple[int, ...] = (
            *(4**i for i in range(slots.bit_length()) if 4**i < slots),
            slots,
        )
        """1, 4, 16 and so on up to all slots: a wider round costs more, and each number its own graphs."""

    def slots_for(self, views: Sequence[SlotView]) -> int:
        """How many slots a round runs: few enough that hardly any are empty, of few different numbers."""
        taken = max((slot for slot, view in enumerate(views, 1) if view.bound), default=1)
        return next(size for size in self.sizes if size >= taken)

    def likely_shapes(
        self,
        pairs: Callable[[bool], set[tuple[int, int]]],
        params: Collection[SamplingParams],
        least: int,
    ) -> list[RoundShape]:
        """What is not captured and such requests, at least so many, are nearly sure to run: largest first.

        pairs: of k and the next k that are nearly sure to come, for one slot alone or for all.
        """
        shapes = {
            RoundShape(k, next_k, SamplingSteps.from_params(each), each.logprobs, count)
            for count in (1, self.sizes[-1])  # numbers between are passed through, if at all
            if count >= least and not self.lazily
            for k, next_k in pairs(count == 1)
            for each in params
        }
        return sorted(
            shapes - self.captured.keys(), key=lambda s: (-s.slots * (s.k + 1), -s.next_k)
        )

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Logprobs | None:
        """Run one round of this shape; see `Round.run`. The next run reuses the log-probabilities' memory."""
        if shape not in self.captured:
            self.capture(shape, views)
        replay, logprobs = self.captured[shape]
        replay()
        return logprobs

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        """Run a shape once with every slot silent, so that all is compiled and loaded, then capture it."""
        state = self.round.state
        laws = self.round.sampler.draft_distributions
        written = [state.active, state.draft, state.num_drafts, state.counter]
        kept = [(t, t.clone()) for t in (*written, *([] if laws is None else [laws]))]
        state.active.fill_(False)
        program = self.program(shape, views)
        try:
            program()
            self.captured[shape] = self._capture(program)
        finally:
            for tensor, value in kept:
                tensor.copy_(value)

    def program(
        self, shape: RoundShape, views: Sequence[SlotView]
    ) -> Callable[[], Logprobs | None]:
        """The round of a shape."""
        count = shape.slots
        part = self.round if count == self.round.state.slots else narrow_to_slots(self.round, count)
        return lambda: part.run(
            shape.k, views[:count], shape.needs, shape.num_logprobs, shape.next_k
        )

    def capture_cuda(self, program: Any) -> tuple[Any, Any]:
        """Record the program's kernels; all graphs share one memory pool, since they run in turn."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = program()
        self.pool = self.pool or graph.pool()
        return graph.replay, result


class RecordedRounds(CapturedRounds):
    """On a CPU: rounds of C functions and torch's operations, recorded when they come a second time.

    Not recorded are rounds with an empty slot before the last taken one: C kernels leave such slots out.
    """

    def __init__(self, round_: Round, library: NativeKernels) -> None:
        super().__init__(round_)
        self.library = library
        self.met = set[RoundShape]()
        self.lazily = True
        self.pool = torch.empty(POOL_BYTES, dtype=torch.uint8)
        self.sizes = tuple(range(1, round_.state.slots + 1))

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Logprobs | None:
        """See `CapturedRounds.run`; the log-probabilities have their own memory."""
        shape = replace(shape, threads=self.library.threads)
        replay = None
        logprobs = None
        if all(view.bound for view in views[: shape.slots]):
            if (
                shape in self.met
                and shape not in self.captured
                and len(self.captured) < MAX_RECORDED
            ):
                self.capture(shape, views)
            self.met.add(shape)
            replay, logprobs = self.captured.get(shape, (None, None))
        if replay is None:
            return self.round.run(shape.k, views, shape.needs, shape.num_logprobs, shape.next_k)
        replay()
        return logprobs and (logprobs[0].clone(), logprobs[1].clone(), logprobs[2].clone())

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        """Record a shape, which changes nothing."""
        try:
            self.captured[shape] = record(self.program(shape, views), self.library, self.pool)
        except NotRecordable:
            self.captured[shape] = None, None
