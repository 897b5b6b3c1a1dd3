"""A stand-in for CUDA graphs: it captures by running once and recording, and replays by running
again.

The assumptions of a graph are checked at every replay: the same operations with the same host
values and shapes, and every persistent tensor at its address. No new tensor may persist from one
replay to the next.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionPlan, Windows
from spd.kernels.interface import OPERATION_NAMES, Kernels
from spd.runtime import Engine
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.round import Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState
from tests.helpers import get_local_queue, replace_operations


def tensors_in(
    container: Any, path: str = "parts", visited: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that an object reaches, with its path, except those in oneDNN's layout."""
    visited = set() if visited is None else visited
    if isinstance(container, Tensor) and not container.is_mkldnn:
        yield path, container
    elif id(container) not in visited:
        visited.add(id(container))
        inner: Iterable[tuple[object, Any]] = ()
        if isinstance(container, Mapping):
            inner = container.items()
        elif isinstance(container, list | tuple):
            inner = enumerate(container)
        elif type(container).__module__.startswith("spd.") and not isinstance(
            container, Kernels | CapturedRounds
        ):
            inner = getattr(container, "__dict__", {}).items()  # what has slots holds no tensors
        names = "[{}]" if isinstance(container, Mapping | list | tuple) else ".{}"
        for name, value in inner:
            yield from tensors_in(value, path + names.format(name), visited)


def young_tensors() -> list[Tensor]:
    """Return every tensor of the process that was created after `gc.freeze`, wherever it is referenced."""
    return [tracked for tracked in gc.get_objects() if issubclass(type(tracked), Tensor)]


class Tape:
    """Records the calls of operations, in a form that must be the same at every replay."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.calls = list[tuple[str, list[object]]]()
        self.lasting: dict[int, str] | None = None
        """The path of each persistent tensor by its address; None while nothing is recorded."""

    def listen(self, lasting: Mapping[str, Tensor]) -> None:
        """Begin a new recording."""
        self.lasting = {
            tensor.untyped_storage().data_ptr(): path for path, tensor in lasting.items()
        }
        self.calls = []

    def wrap(self, kernels: Kernels) -> Kernels:
        """Return the operations, each of which records its calls."""
        proxies = {name: self._proxy(name, getattr(kernels, name)) for name in OPERATION_NAMES}
        return replace_operations(kernels, **proxies)

    def _proxy(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.lasting is not None:
                # A length's upper bound, which the host computes, differs between runs.
                skipped = "bound" if (name, self.form) == ("ngram_lookup", "torch") else None
                words = [self._words(value) for value in args]
                words += [(key, self._words(v)) for key, v in kwargs.items() if key != skipped]
                self.calls.append((name, words))
            return operation(*args, **kwargs)

        return call

    def _words(self, value: object) -> object:
        assert self.lasting is not None
        if isinstance(value, Tensor):
            path = self.lasting.get(value.untyped_storage().data_ptr(), "passing")
            offset = value.storage_offset() if path != "passing" else 0
            return path, offset, tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, RoundState):
            return [self._words(inner) for inner in vars(value).values()]
        if isinstance(value, Windows) and self.form == "torch":  # the host's upper bounds, as above
            value = dataclasses.replace(value, bounds=(), first_pages=())
        if isinstance(value, AttentionPlan):
            return type(value).__name__
        if dataclasses.is_dataclass(value) and not isinstance(value, SamplingSteps):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        if isinstance(value, list | tuple | dict):
            return [
                self._words(inner)
                for inner in (value.values() if isinstance(value, dict) else value)
            ]
        plain = bool | int | float | str | torch.dtype | SamplingSteps | None
        assert isinstance(value, plain), value
        return value


class RoundOfNow(Round):
    """A round that reads the views of the current run, not of the capture."""

    stand_in: StandIn

    def run(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: Any,
        num_logprobs: int | None,
        next_k: int,
        chained: int = 0,
    ) -> Any:
        current_views = self.stand_in.views[: len(views)]
        return super().run(k, current_views, needs, num_logprobs, next_k, chained)


class StandIn(CapturedRounds):
    """Captures by running once and recording the calls; replays by running again and comparing."""

    def __init__(self, engine: Engine, tape: Tape) -> None:
        queue = get_local_queue(engine)
        super().__init__(queue.round, capture=self.capture_by_watching)
        self.parts = (vars(queue.round), queue.snapshots)
        self.tape = tape
        self.views: Sequence[SlotView] = ()
        self.rounds = self.replays = self.counted = 0
        self.engine = engine
        self.order = list[RoundShape]()
        # What the last launches had in common (their shape, and who holds the slots), and how many they were.
        self.stretch = tuple[object, ...]()
        self.alike = 0
        # The tensors that lasted after a round of theirs, and their bytes.
        self.living = set[int]()
        self.living_bytes = -1
        gc.freeze()  # what there is by now is most of a process, and would make each count slow
        if (
            tape.form == "torch"
        ):  # a graph never looks at the views, so it may keep those of its capture
            self.round.__class__ = RoundOfNow
            self.round.stand_in = self  # type: ignore[attr-defined]
            drafters = getattr(self.round.proposer, "runners", [])
            for runner in filter(None, (self.round.runner, *drafters)):
                runner._occupied_slots = lambda views: None  # nor leaves a slot out

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Any:
        self.views = views
        self.rounds += 1
        assert self.rounds < 300, "the texts do not end"
        stretch_key = (shape, *(sequence.epoch for sequence in self.engine.scheduler.running()))
        if shape not in self.captured or stretch_key != self.stretch:
            self.stretch = stretch_key
            self.alike = 0
            self.living_bytes = -1
        result = super().run(shape, views)
        self.alike += 1
        if self.alike > self.engine.plan.lag == len(self.engine.scheduler.in_flight):
            self.count_tensors()  # what is on its way is as much as it was
        return result

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        self.views = views
        self.order.append(shape)
        super().capture(shape, views)

    def count_tensors(self) -> None:
        """Assert that no more tensors persist than before in the same stretch of rounds."""
        living = young_tensors()
        has_baseline = self.living_bytes >= 0
        if not has_baseline or len(living) > len(self.living):
            gc.collect()  # what only a cycle holds does not last
            living = young_tensors()
        storages = [tensor.untyped_storage() for tensor in living if not tensor.is_mkldnn]
        living_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        if has_baseline:
            new_shapes = [tuple(tensor.shape) for tensor in living if id(tensor) not in self.living]
            assert len(living) <= len(self.living), (
                f"more tensors last than before, of these: {new_shapes}"
            )
            assert living_bytes <= self.living_bytes, (
                f"{living_bytes - self.living_bytes} more bytes last than before"
            )
            self.counted += 1
        self.living = {id(tensor) for tensor in living}
        self.living_bytes = living_bytes

    def capture_by_watching(self, program: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        captured_tensors = dict(tensors_in(self.parts))
        layouts = {
            path: (tensor.data_ptr(), tensor.shape, tensor.stride())
            for path, tensor in captured_tensors.items()
        }

        def watched() -> tuple[Any, list[tuple[str, list[object]]]]:
            self.tape.listen(captured_tensors)
            result = program()
            calls = self.tape.calls
            self.tape.lasting = None
            return result, calls

        result, calls = watched()
        assert calls, "no operation was seen"

        def replay() -> None:
            new_result, new_calls = watched()
            assert new_calls == calls, next(
                (a, b) for a, b in zip(calls, new_calls, strict=False) if a != b
            )
            current = dict(tensors_in(self.parts))
            for path, tensor in captured_tensors.items():
                assert current[path] is tensor, f"{path} was replaced"
                assert (tensor.data_ptr(), tensor.shape, tensor.stride()) == layouts[path], (
                    f"{path} has moved"
                )
            with torch.inference_mode():
                for old, new in zip(result or (), new_result or (), strict=True):
                    old.copy_(new)
            self.replays += 1

        return replay, result
