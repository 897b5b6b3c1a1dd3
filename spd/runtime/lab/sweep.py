"""A sweep: every way of decoding on every workload, interleaved, so that slow minutes even out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import (
    Difference,
    Load,
    Pass,
    Sample,
    Workload,
    compare_texts,
    run_pass,
    take_sample,
)
from spd.runtime.lab.prompt_set import EncodedPrompt
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams

MIN_REPETITIONS = 3
"""The least repetitions where their number follows from the time."""
MAX_REPETITIONS = 20
"""The most repetitions where their number follows from the time."""
BATCH_REQUESTS = 16
"""The least requests of a pass at a rate."""


@dataclass(frozen=True)
class Settings:
    """The extent of a sweep. `repetitions` None: as many as fit into `seconds`, three at least.

    loads: the arrivals of requests to measure, one after another.
    """

    temperatures: tuple[float, ...] = (0.0, 0.8)
    loads: tuple[Load, ...] = (Load(),)
    max_tokens: int = 64
    repetitions: int | None = None
    seconds: float = 80.0
    ignore_eos: bool = False
    waves: int = 1
    """A pass of concurrent requests has at least so many times as many as run together."""


class SweepDifference(Difference):
    """A difference from plain decoding, and the number of the configuration that gave it."""

    config: int


class Sweep:
    """A sweep of engines; `samples` holds all that was measured so far, also after an interrupt."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        prompts: Sequence[Sequence[EncodedPrompt]],
        settings: Settings,
    ) -> None:
        """Take a list of prompts for each configuration: the same texts in its model's tokens."""
        self.configs = tuple(configs)
        self.prompts = tuple(prompts)
        self.settings = settings
        self.report: Callable[[str, int, int], object] = lambda phase, done, total: None
        """Called with the phase and the passes done and to do."""
        self.watch: Callable[[int], object] = lambda ended: None
        """Called each round with the requests that have ended; may raise."""
        self.samples: list[Sample] = []
        self.plans: list[dict[str, Any]] = []  # one a configuration; of the first load
        self.compared = 0  # tokens that were compared with those of plain decoding
        self.differences: list[SweepDifference] = []

    def run(self) -> None:
        """Measure everything. Raises what `watch` raises, and what an engine refuses."""
        for load in self.settings.loads:
            engines = [Engine(replace(config, slots=load.concurrency)) for config in self.configs]
            self.plans = self.plans or [engine.plan.as_dict() for engine in engines]
            for engine in engines:
                params = [
                    SamplingParams(temperature=temperature)
                    for temperature in self.settings.temperatures
                ]
                engine.capture_ahead(params, concurrency=1 if load.rate else load.concurrency)
            self._measure_load(load, engines)
            for engine in engines:
                engine.close()

    def _measure_load(self, load: Load, engines: Sequence[Engine]) -> None:
        """Warm every engine up, then measure all passes of a load, interleaved, until its time is
        over.
        """
        units = list(self._prompt_units(load))
        for index, engine in enumerate(engines):
            work, numbers = units[0]
            requests = self._make_requests(index, work, numbers, "warming up")
            run_pass(engine, requests, watch=self.watch)
            self.report("warming up", index + 1, len(engines))
        start = time.perf_counter()
        done = 0
        passes_per_repetition = len(units) * len(engines)
        planned = self.settings.repetitions
        repetition = 0
        while planned is None or repetition < planned:
            for number, (work, numbers) in enumerate(units):
                passes: dict[int, Pass] = {}
                for turn in range(len(engines)):
                    index = (repetition + number + turn) % len(engines)
                    passes[index] = self._measure_pass(
                        index, engines[index], work, numbers, repetition
                    )
                    done += 1
                    self.report(
                        "measuring", done, (planned or MIN_REPETITIONS) * passes_per_repetition
                    )
                self._compare_texts(work, numbers, passes)
            repetition += 1
            if planned is None:
                share = self.settings.seconds / len(self.settings.loads)
                planned = max(
                    MIN_REPETITIONS,
                    min(MAX_REPETITIONS, int(share / (time.perf_counter() - start))),
                )

    def _prompt_units(self, load: Load) -> Iterator[tuple[Workload, list[int]]]:
        """Yield the prompts of one pass, by number: a single one, or all of a category together."""
        groups: dict[tuple[int | None, str], list[int]] = {}
        for number, prompt in enumerate(self.prompts[0]):
            groups.setdefault((prompt.requested_length, prompt.prompt.category), []).append(number)
        for (length, category), numbers in groups.items():
            for temperature in self.settings.temperatures:
                work = Workload(
                    category=category,
                    temperature=temperature,
                    prompt_tokens_asked=length,
                    **vars(load),
                )
                if load == Load():
                    yield from ((work, [number]) for number in numbers)
                else:
                    together = self.settings.waves * load.concurrency
                    count = max(len(numbers), together, BATCH_REQUESTS if load.rate else 0)
                    yield work, list(islice(cycle(numbers), count))

    def _make_requests(
        self, index: int, work: Workload, numbers: Sequence[int], tag: str
    ) -> list[Request]:
        """Return requests of a configuration, with the same seeds for every engine."""
        return [
            self.prompts[index][prompt_number].request(
                f"{tag}.{number}",
                number,
                temperature=work.temperature,
                max_tokens=self.settings.max_tokens,
                ignore_eos=self.settings.ignore_eos,
            )
            for number, prompt_number in enumerate(numbers)
        ]

    def _measure_pass(
        self, index: int, engine: Engine, work: Workload, numbers: Sequence[int], repetition: int
    ) -> Pass:
        """Run a workload's requests once on an engine, record the sample, and return the pass."""
        requests = self._make_requests(index, work, numbers, f"{index}.{len(self.samples)}")
        arrivals = work.arrivals(len(requests), repetition)
        measured_pass = run_pass(
            engine, requests, concurrency=work.concurrency, arrivals=arrivals, watch=self.watch
        )
        self.samples.append(
            take_sample(
                measured_pass=measured_pass,
                config=index,
                work=work,
                repetition=repetition,
                prompts=self._prompt_names(numbers),
            )
        )
        return measured_pass

    def _prompt_names(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of prompts, which are the same for every configuration."""
        return [self.prompts[0][number].prompt.name for number in numbers]

    def _compare_texts(
        self, work: Workload, numbers: Sequence[int], passes: Mapping[int, Pass]
    ) -> None:
        """Compare the texts of a unit with plain decoding of the model on as many ranks.

        Only where equality is promised. More ranks add in another order, which was seen to decide
        near ties in bfloat16.
        """
        plain = {
            (self.configs[i].model, self.configs[i].tp): i
            for i in sorted(passes, reverse=True)
            if self.configs[i].spec == "off"
        }
        for index, candidate in sorted(passes.items()):
            config = self.configs[index]
            sampled_otherwise = config.verify != "coupled" and work.temperature
            if config.spec == "off" or config.synthetic_acceptance is not None or sampled_otherwise:
                continue
            expected = passes[plain[config.model, config.tp]]
            tokens, differences = compare_texts(self._prompt_names(numbers), expected, candidate)
            self.compared += tokens
            self.differences += [{"config": index, **difference} for difference in differences]
