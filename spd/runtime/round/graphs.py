"""Rounds captured as CUDA graphs, or recorded on a CPU: one for each fixed shape.

A graph contains the complete round: verification, sampling, commit, emission and the drafting loop.
Its inputs and outputs are the state's tensors, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch

from spd.kernels.native.library import NativeKernels
from spd.kernels.native.recording import POOL_BYTES, NotRecordable, record
from spd.runtime.round.round import Logprobs, Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import narrow_to_slots

MAX_RECORDED = 64  # shapes
"""Recorded rounds at most: each holds the arguments of some hundred calls."""
Result = TypeVar("Result")
Program = Callable[[], Logprobs | None]
"""Runs a round of one shape."""
Replay = Callable[[], None]
"""Runs a captured round again."""
Capture = Callable[[Program], tuple[Replay, Logprobs | None]]
"""Captures a program; returns its replay and its result, which every replay overwrites."""


class RoundShape(NamedTuple):
    """Everything that determines a round's device program.

    A tuple, for one is made and looked up in every round.
    """

    k: int
    """Drafts of a slot that the round verifies."""
    next_k: int
    """Drafts of a slot that it makes for the next round."""
    needs: SamplingSteps
    num_logprobs: int | None
    """Likeliest tokens whose log-probabilities it returns; None: it returns none at all."""
    slots: int
    """The round runs the first so many slots."""
    chained: int = 0
    """Drafts of a model that lookup continues; see `Round.run`."""
    threads: int = 0
    """Threads of C functions."""


class CapturedRounds:
    """Runs rounds on a GPU: captures a round's program as a CUDA graph when its shape is first run,
    or before, and replays it from then on.

    capture: captures a program; `capture_cuda`, except in tests.
    """

    def __init__(self, round_: Round, capture: Capture | None = None) -> None:
        self.round = round_
        self.pool_graph: torch.cuda.CUDAGraph | None = None
        """The first captured graph, whose memory pool all graphs share."""
        self.captured: dict[RoundShape, tuple[Replay | None, Logprobs | None]] = {}
        """The replay and the result of each shape.

        No replay for a shape that cannot be recorded.
        """
        self.only_on_demand = False
        """True once memory ran out: no shape is captured before it is run."""
        self._capture = capture or self.capture_cuda
        slots = round_.state.slots
        powers = [4**i for i in range(slots.bit_length()) if 4**i < slots]
        self.slot_counts: tuple[int, ...] = (*powers, slots)
        """1, 4, 16 and so on up to all slots: a wider round costs more, and each count its own graphs."""

    def slots_to_run(self, views: Sequence[SlotView]) -> int:
        """Return how many slots a round runs: the least of `slot_counts` that holds all occupied
        ones.
        """
        occupied = max((slot for slot, view in enumerate(views, 1) if view.bound), default=1)
        return next(count for count in self.slot_counts if count >= occupied)

    def likely_shapes(
        self,
        pairs: Callable[[bool], set[tuple[int, int]]],
        params: Collection[SamplingParams],
        concurrency: int,
    ) -> list[RoundShape]:
        """Return the shapes that requests will almost certainly run and that are not captured yet.

        The largest come first; none where `only_on_demand`. params: the sampling parameters of the
        requests. pairs: returns the likely pairs of k and the next k, for one slot alone if True,
        else for all slots. concurrency: how many requests at least will run together.
        """
        shapes = set[RoundShape]()
        if self.only_on_demand:
            return []
        for count in (1, self.slot_counts[-1]):  # counts between them are rare
            if count < concurrency:
                continue
            for k, next_k in pairs(count == 1):
                for request_params in params:
                    needs = SamplingSteps.from_params(request_params)
                    shapes.add(
                        RoundShape(
                            k=k,
                            next_k=next_k,
                            needs=needs,
                            num_logprobs=request_params.logprobs,
                            slots=count,
                        )
                    )
        return sorted(
            shapes - self.captured.keys(),
            key=lambda shape: (-shape.slots * (shape.k + 1), -shape.next_k),
        )

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Logprobs | None:
        """Run one round of this shape, which is captured first where it is not yet.

        Returns the log-probabilities as `Round.run` does. The next run overwrites them.
        """
        if shape not in self.captured:
            self.capture(shape, views)
        replay, logprobs = self.captured[shape]
        assert replay is not None
        replay()
        return logprobs

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        """Run a shape once with every slot inactive, which compiles its kernels, then capture it.

        Stores its replay in `captured`. The state's tensors are as before afterwards.
        """
        state = self.round.state
        written = [state.active, state.draft, state.num_drafts, state.counter]
        draft_distributions = self.round.sampler.draft_distributions
        if draft_distributions is not None:
            written.append(draft_distributions)
        saved = [(tensor, tensor.clone()) for tensor in written]
        state.active.fill_(False)
        program = self.program_for(shape, views)
        try:
            program()
            self.captured[shape] = self._capture(program)
        finally:
            for tensor, value in saved:
                tensor.copy_(value)

    def program_for(self, shape: RoundShape, views: Sequence[SlotView]) -> Program:
        """Return a function that runs a round of this shape eagerly over the round's static
        tensors.
        """
        count = shape.slots
        round_ = self.round
        if count != round_.state.slots:
            round_ = narrow_to_slots(round_, count)
        return lambda: round_.run(
            shape.k, views[:count], shape.needs, shape.num_logprobs, shape.next_k, shape.chained
        )

    def capture_cuda(self, program: Callable[[], Result]) -> tuple[Replay, Result]:
        """Capture the program's kernels as a CUDA graph; return its replay and the captured result.

        All graphs share one memory pool, since they run in turn.
        """
        graph = torch.cuda.CUDAGraph()
        pool = None if self.pool_graph is None else self.pool_graph.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = program()
        self.pool_graph = self.pool_graph or graph
        return graph.replay, result


class RecordedRounds(CapturedRounds):
    """Rounds on a CPU of C functions and torch's operations, recorded when a shape is run again.

    Rounds with an empty slot before the last occupied one are not recorded: C kernels skip such
    slots.
    """

    def __init__(self, round_: Round, library: NativeKernels) -> None:
        super().__init__(round_)
        self.library = library
        round_.sampler.call_host = library.call_host
        self.run_shapes = set[RoundShape]()
        """Shapes that have been run."""
        self.only_on_demand = True
        self.buffer = torch.empty(POOL_BYTES, dtype=torch.uint8)
        self.slot_counts = tuple(range(1, round_.state.slots + 1))

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Logprobs | None:
        """Run one round of this shape: a record where there is one, else eagerly.

        It is recorded when it is run for the second time, up to `MAX_RECORDED` shapes. The returned
        log-probabilities have memory of their own.
        """
        shape = shape._replace(threads=self.library.threads)
        replay = None
        logprobs = None
        if all(view.bound for view in views[: shape.slots]):
            if (
                shape in self.run_shapes
                and shape not in self.captured
                and len(self.captured) < MAX_RECORDED
            ):
                self.capture(shape, views)
            self.run_shapes.add(shape)
            replay, logprobs = self.captured.get(shape, (None, None))
        if replay is None:
            return self.round.run(
                shape.k, views, shape.needs, shape.num_logprobs, shape.next_k, shape.chained
            )
        replay()
        return logprobs and (logprobs[0].clone(), logprobs[1].clone(), logprobs[2].clone())

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        """Record a shape without running it; where that is impossible, note that it has no
        record.
        """
        try:
            self.captured[shape] = record(self.program_for(shape, views), self.library, self.buffer)
        except NotRecordable:
            self.captured[shape] = (None, None)
