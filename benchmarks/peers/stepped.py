"""Engines that go on step by step, by one clock: the same definitions of load and latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.protocol import Chunk, Generation, PassResult, Speculation
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import Pass, run_pass
from spd.runtime.round.sampling_params import SamplingParams


class SteppedEngine:
    """Runs greedy requests to exactly so many tokens; subclasses provide the engine."""

    requests = 0

    def decoder(self, concurrency: int) -> Any:
        """Return the engine, ready for so many requests together."""
        raise NotImplementedError

    def speculation(self, ran: Pass) -> Speculation | None:
        """Return the drafted and accepted counts of a pass that has just ended."""
        raise NotImplementedError

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        concurrency: int,
        arrivals: list[float] | None,
    ) -> PassResult:
        """Run requests `concurrency` at a time, or each at its second in `arrivals`."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.requests += 1
        requests = [
            Request(f"{self.requests}.{number}", tuple(ids), params)
            for number, ids in enumerate(prompts)
        ]
        ran = run_pass(
            self.decoder(concurrency), requests, concurrency=concurrency, arrivals=arrivals
        )
        generations = [
            Generation(
                line.token_ids, [Chunk(at - line.arrived, count) for at, count in line.chunks], {}
            )
            for line in ran.timelines
        ]
        return PassResult(ran.seconds, generations, self.speculation(ran))

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate one request alone."""
        result = self.run([prompt_ids], tokens, 1, None)
        (generation,) = result.requests
        counted = {} if result.speculation is None else {"speculation": asdict(result.speculation)}
        return Generation(generation.token_ids, generation.chunks, counted)
