"""A sweep: every way of decoding on every kind of work, interleaved, so that a slow minute hits all alike.

One engine a way of decoding lives for as long as its load is measured. Plain decoding is always among
them; the same request has the same seed everywhere, so its tokens must be the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch

from spd.formats.model_config import ModelConfig
from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request, derived_seed
from spd.runtime.lab.load import Pass, Sample, poisson_arrivals, run_pass, take_sample
from spd.runtime.lab.prompt_set import Question
from spd.runtime.models.weight_form import WeightForm
from spd.runtime.models.weights import streamed_tables
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.memory import page_bytes, rank_layout, state_bytes
from spd.runtime.round.limits import PAGE_SIZE
from spd.runtime.round.sampling_params import SamplingParams

READ_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Well beyond the caches of either."""
PASSES = 5


@dataclass(frozen=True)
class Floor:
    """What a pass moves: weights once, states twice (read and written), each position of the context."""

    weight_bytes: int
    position_bytes: int

    def seconds(self, context: float, rate: float) -> float:
        """With `context` positions in the cache, at `rate` bytes a second."""
        return (self.weight_bytes + context * self.position_bytes) / rate


def floor_of(config: ModelConfig, dtype: str, form: WeightForm, ranks: int = 1) -> Floor | None:
    """The floor of a model on one of `ranks`; None where routing decides reads."""
    if config.experts is not None:
        return None
    once = _streamed(config, dtype, form, ranks) + 2 * state_bytes(config, ranks)
    return Floor(once, page_bytes(config, dtype, ranks) // PAGE_SIZE)


def _streamed(config: ModelConfig, dtype: str, form: WeightForm, ranks: int) -> int:
    """Weights that every pass reads: the layers' and those that make logits; embeddings are looked up.

    What a head makes of its target's streams it makes once a round, not in every pass.
    """
    layout = rank_layout(config, ranks)
    inside = sum(
        form.bytes_of(destination, layout.prefix.format(index), dtype)
        for index, layer in enumerate(layout.layers)
        for destination in layer.destinations()
    )
    outside = streamed_tables(config, layout)
    return inside + sum(form.bytes_of(table, "", dtype, table=True) for table in outside)


@torch.inference_mode()
def measure_read_rate(device: str) -> float:
    """Bytes a second of summing a large tensor, the fastest of a few passes."""
    kind = torch.device(device).type
    values = torch.ones(READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(PASSES):
        _wait(kind)
        began = time.perf_counter()
        values.sum()
        _wait(kind)
        best = min(best, time.perf_counter() - began)
    return values.nbytes / best


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


LEAST, MOST = 3, 20
"""Repetitions where their number follows from the time."""
BATCH_REQUESTS = 16
"""Requests of a pass at a rate, at least."""


@dataclass(frozen=True)
class Load:
    """How requests come: so many at a time, or at a rate (requests a second) into that many slots."""

    concurrency: int = 1
    rate: float | None = None


@dataclass(frozen=True)
class Work:
    """What is asked of every engine alike."""

    category: str
    temperature: float
    prompt_tokens: int | None
    load: Load


@dataclass(frozen=True)
class Settings:
    """How much is measured. `repetitions` None: as many as fit into `seconds`, three at least."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    loads: tuple[Load, ...] = (Load(),)
    max_tokens: int = 64
    repetitions: int | None = None
    seconds: float = 80.0
    warmup: int = 1
    ignore_eos: bool = False
    seed: int = 0
    waves: int = 1
    """Requests of a pass where several are together, at least, as a multiple of those that are."""


@dataclass(frozen=True)
class Progress:
    """How far a sweep has come: passes done and to do, and the seconds that are left, once known."""

    done: int
    total: int
    left: float | None
    label: str


class Sweep:
    """Runs it; `samples` holds what has been measured so far, also after an interrupt."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        questions: Sequence[Question],
        settings: Settings,
        *,
        check: Callable[[], None] = lambda: None,
        report: Callable[[Progress], None] = lambda progress: None,
        open_engine: Callable[[EngineConfig], Engine] = Engine,
    ) -> None:
        self.configs, self.questions, self.settings = tuple(configs), tuple(questions), settings
        self.check, self.report, self.open_engine = check, report, open_engine
        self.samples: list[Sample] = []
        self.plans: dict[int, dict[str, Any]] = {}
        """Plans by the index of their configuration; of the first load."""
        self.read_rate: float | None = None
        """Bytes a second of reading, measured before the first pass."""
        self.floors: dict[int, tuple[Floor | None, Floor | None]] = {}
        """Of the target and the draft model, by the index of a configuration."""
        self.compared = 0
        """Tokens that were held against those of plain decoding."""
        self.differences: list[dict[str, Any]] = []
        self._texts: dict[Any, tuple[int, ...]] = {}
        """Plain ones, by the prompt's ids, the parameters with their seed, and the ranks."""
        self._unheld: dict[Any, list[tuple[dict[str, Any], tuple[int, ...]]]] = {}

    def run(self) -> None:
        """Measure everything. Raises what `check` raises, and what an engine refuses."""
        for load in self.settings.loads:
            engines = [self.open_engine(replace(config, slots=load.concurrency)) for config in self.configs]
            for index, engine in enumerate(engines):
                self.plans.setdefault(index, engine.plan.as_dict())
                params = [SamplingParams(temperature=each) for each in self.settings.temperatures]
                engine.capture_ahead(params, together=1 if load.rate else load.concurrency)
            self._weigh(engines)
            self._measure(load, engines)
            for engine in engines:
                engine.close()

    def _weigh(self, engines: Sequence[Engine]) -> None:
        """What reading alone takes of a round: the rate once, the bytes of every plan's models."""
        if self.read_rate is None:
            self.read_rate = measure_read_rate(engines[0].plan.device)
        for index, engine in enumerate(engines):
            shape = engine.plan.shape
            tp, draft_tp = (
                (1, 1) if shape.on_cpu else (shape.tp, shape.draft_tp)
            )  # a CPU's ranks share a memory
            draft = floor_of(shape.draft, shape.dtype, shape.draft_form, draft_tp) if shape.draft else None
            self.floors.setdefault(index, (floor_of(shape.target, shape.dtype, shape.form, tp), draft))

    def _measure(self, load: Load, engines: Sequence[Engine]) -> None:
        units = list(self._units(load))
        for index, engine in enumerate(engines):
            for number in range(self.settings.warmup):
                work, asked = units[number % len(units)]
                run_pass(engine, self._requests(work, asked, f"w{number}"), check=self.check)
                self.report(Progress(0, 0, None, f"warming up {index + 1} of {len(engines)}"))
        began, done, each = time.perf_counter(), 0, len(units) * len(engines)
        planned, repetition = self.settings.repetitions, 0
        while planned is None or repetition < planned:
            for number, (work, asked) in enumerate(units):
                order = range(len(engines))
                turn = (repetition + number) % len(engines)
                for index in (*order[turn:], *order[:turn]):
                    self._unit(index, engines[index], work, asked, repetition)
                    done += 1
                    left = (time.perf_counter() - began) / done * ((planned or LEAST) * each - done)
                    self.report(Progress(done, (planned or LEAST) * each, left, work.category))
            repetition += 1
            if planned is None:
                share = self.settings.seconds / len(self.settings.loads)
                planned = max(LEAST, min(MOST, int(share / (time.perf_counter() - began))))

    def _units(self, load: Load) -> Iterator[tuple[Work, list[Question]]]:
        """What is run in one go: a prompt alone, or all prompts of a category together."""
        lengths = list(dict.fromkeys(question.prompt_tokens for question in self.questions))
        categories = list(dict.fromkeys(question.prompt.category for question in self.questions))
        for length in lengths:
            for category in categories:
                asked = [
                    q for q in self.questions if q.prompt.category == category and q.prompt_tokens == length
                ]
                for temperature in self.settings.temperatures:
                    work = Work(category, temperature, length, load)
                    if load.concurrency == 1 and load.rate is None:
                        yield from ((work, [question]) for question in asked)
                    else:
                        together = self.settings.waves * load.concurrency
                        least = max(len(asked), together, BATCH_REQUESTS if load.rate else 0)
                        yield work, list(islice(cycle(asked), least))

    def _requests(self, work: Work, asked: Sequence[Question], tag: str) -> list[Request]:
        settings = self.settings
        return [
            Request(
                f"{tag}.{number}",
                question.ids,
                SamplingParams(
                    temperature=work.temperature,
                    max_tokens=settings.max_tokens,
                    ignore_eos=settings.ignore_eos,
                    seed=derived_seed(settings.seed, question.prompt.name, number),
                ),
            )
            for number, question in enumerate(asked)
        ]

    def _unit(
        self, index: int, engine: Engine, work: Work, asked: Sequence[Question], repetition: int
    ) -> None:
        requests = self._requests(work, asked, f"{index}.{len(self.samples)}")
        arrivals = None
        if work.load.rate is not None:
            arrivals = poisson_arrivals(len(requests), work.load.rate, self.settings.seed + repetition)
        ran = run_pass(
            engine, requests, concurrency=work.load.concurrency, arrivals=arrivals, check=self.check
        )
        self.samples.append(take_sample(ran, index, work, repetition, [q.prompt.name for q in asked]))
        if not (engine.plan.wishes.verify != "coupled" and work.temperature) and (
            engine.plan.wishes.synthetic_acceptance is None
        ):
            self._compare(index, work, asked, ran)

    def _compare(self, index: int, work: Work, asked: Sequence[Question], ran: Pass) -> None:
        """Hold each text against the first plain one of the same request on as many ranks; it may come later.

        More ranks add in another order, which was seen to decide near ties in bfloat16.
        """
        for question, timeline in zip(asked, ran.timelines, strict=True):
            key = (timeline.request.prompt_ids, timeline.request.params, self.configs[index].tp)
            where = {"config": index, "prompt": question.prompt.name, "temperature": work.temperature}
            self._unheld.setdefault(key, []).append((where, tuple(timeline.token_ids)))
            if key not in self._texts and self.configs[index].spec == "off":
                self._texts[key] = tuple(timeline.token_ids)
            if key in self._texts:
                for other, tokens in self._unheld.pop(key):
                    self._hold(self._texts[key], tokens, other)

    def _hold(self, plain: tuple[int, ...], tokens: tuple[int, ...], where: dict[str, Any]) -> None:
        if self.configs[where["config"]].spec != "off":  # plain texts repeat themselves
            self.compared += max(len(plain), len(tokens))
        if plain == tokens:
            return
        pairs = zip(plain, tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(tokens)))
        found = {
            "position": at,
            "plain": plain[at] if at < len(plain) else None,
            "speculated": tokens[at] if at < len(tokens) else None,
        }
        self.differences.append({**where, **found})
