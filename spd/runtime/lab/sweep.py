"""A sweep: every way of decoding on every kind of work, interleaved, so that a slow minute hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import Load, Pass, Sample, Workload, compare_texts, run_pass, take_sample
from spd.runtime.lab.prompt_set import EncodedPrompt
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams

# repetitions where their number follows from the time
LEAST = 3
MOST = 20
BATCH_REQUESTS = 16  # requests of a pass at a rate, at least


@dataclass(frozen=True)
class Settings:
    """How much is measured. `repetitions` None: as many as fit into `seconds`, three at least."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    loads: tuple[Load, ...] = (Load(),)
    max_tokens: int = 64
    repetitions: int | None = None
    seconds: float = 80.0
    ignore_eos: bool = False
    waves: int = 1  # requests of a pass where several are together, at least, as a multiple of those that are


class Sweep:
    """Runs it; `samples` holds what has been measured so far, also after an interrupt."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        questions: Sequence[Sequence[EncodedPrompt]],
        settings: Settings,
    ) -> None:
        """Take a list of questions for each configuration: the same prompts in its model's own tokens."""
        self.configs = tuple(configs)
        self.questions = tuple(questions)
        self.settings = settings
        self.report: Callable[[str, int, int], object] = lambda what, done, total: None
        self.watch: Callable[[int], object] = lambda ended: None
        """What hears how far it has come, passes done and to do; what is called each round, and may raise."""
        self.samples: list[Sample] = []
        self.plans: list[dict[str, Any]] = []  # one a configuration; of the first load
        self.compared = 0  # tokens that were held against those of plain decoding
        self.differences: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure everything. Raises what `watch` raises, and what an engine refuses."""
        for load in self.settings.loads:
            engines = [Engine(replace(config, slots=load.concurrency)) for config in self.configs]
            self.plans = self.plans or [engine.plan.as_dict() for engine in engines]
            for engine in engines:
                params = [SamplingParams(temperature=each) for each in self.settings.temperatures]
                engine.capture_ahead(params, concurrency=1 if load.rate else load.concurrency)
            self._measure(load, engines)
            for engine in engines:
                engine.close()

    def _measure(self, load: Load, engines: Sequence[Engine]) -> None:
        units = list(self._units(load))
        for index, engine in enumerate(engines):
            requests = self._requests(index, *units[0], "warming up")
            run_pass(engine, requests, watch=self.watch)
            self.report("warming up", index + 1, len(engines))
        began = time.perf_counter()
        done = 0
        each = len(units) * len(engines)
        planned = self.settings.repetitions
        repetition = 0
        while planned is None or repetition < planned:
            for number, (work, asked) in enumerate(units):
                ran: dict[int, Pass] = {}
                for turn in range(len(engines)):
                    index = (repetition + number + turn) % len(engines)
                    ran[index] = self._pass(index, engines[index], work, asked, repetition)
                    done += 1
                    self.report("measuring", done, (planned or LEAST) * each)
                self._compare(work, asked, ran)
            repetition += 1
            if planned is None:
                share = self.settings.seconds / len(self.settings.loads)
                planned = max(LEAST, min(MOST, int(share / (time.perf_counter() - began))))

    def _units(self, load: Load) -> Iterator[tuple[Workload, list[int]]]:
        """Yield what is run in one go, by numbers of questions: a prompt, or all of a category together."""
        groups: dict[tuple[int | None, str], list[int]] = {}
        for number, question in enumerate(self.questions[0]):
            groups.setdefault((question.prompt_tokens, question.prompt.category), []).append(number)
        for (length, category), asked in groups.items():
            for heat in self.settings.temperatures:
                work = Workload(
                    category=category, temperature=heat, prompt_tokens_asked=length, **vars(load)
                )
                if load == Load():
                    yield from ((work, [number]) for number in asked)
                else:
                    together = self.settings.waves * load.concurrency
                    least = max(len(asked), together, BATCH_REQUESTS if load.rate else 0)
                    yield work, list(islice(cycle(asked), least))

    def _requests(
        self, index: int, work: Workload, asked: Sequence[int], tag: str
    ) -> list[Request]:
        """Return requests of a configuration, with the same seeds for every engine and repetition."""
        settings = self.settings
        params = {"max_tokens": settings.max_tokens, "ignore_eos": settings.ignore_eos}
        return [
            self.questions[index][each].request(
                f"{tag}.{number}", number, temperature=work.temperature, **params
            )
            for number, each in enumerate(asked)
        ]

    def _pass(
        self, index: int, engine: Engine, work: Workload, asked: Sequence[int], turn: int
    ) -> Pass:
        requests = self._requests(index, work, asked, f"{index}.{len(self.samples)}")
        arrivals = work.arrivals(len(requests), turn)
        ran = run_pass(
            engine, requests, concurrency=work.concurrency, arrivals=arrivals, watch=self.watch
        )
        self.samples.append(take_sample(ran, index, work, turn, self._names(asked)))
        return ran

    def _names(self, asked: Sequence[int]) -> list[str]:
        """Return the names of prompts, which are the same for every configuration."""
        return [self.questions[0][number].prompt.name for number in asked]

    def _compare(self, work: Workload, asked: Sequence[int], ran: Mapping[int, Pass]) -> None:
        """Compare the texts of a unit with plain decoding of the model on as many ranks, where promised.

        More ranks add in another order, which was seen to decide near ties in bfloat16.
        """
        plain = {
            (self.configs[i].model, self.configs[i].tp): i
            for i in sorted(ran, reverse=True)
            if self.configs[i].spec == "off"
        }
        for index, its in sorted(ran.items()):
            config = self.configs[index]
            sampled_otherwise = config.verify != "coupled" and work.temperature
            if config.spec == "off" or config.synthetic_acceptance is not None or sampled_otherwise:
                continue
            expected = ran[plain[config.model, config.tp]]
            tokens, differences = compare_texts(self._names(asked), expected, its)
            self.compared += tokens
            self.differences += [{"config": index, **each} for each in differences]
