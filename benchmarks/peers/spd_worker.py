"""The spd workers: the public engine, plain or with a draft model at fixed k, and the cost of rows.

`--rows R` serves the other measurement: two engines in this one process, the plain one (1 row a round)
and one at fixed k = R - 1 (R rows), generate in turn, and their traces give the time of one verify.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

import spd
from benchmarks.peers.protocol import ChunkClock, Generation, WorkerOptions, serve
from spd.runtime import Engine, EngineConfig, Request, RoundRecord, SamplingParams


def open_engine(options: WorkerOptions, draft_max: int) -> Engine:
    """Open an engine at fixed k; k = 0 is speculation off."""
    speculation: dict[str, Any] = {"spec": "off"}
    if draft_max and options.ngram:
        speculation = {"spec": "ngram", "draft_max": draft_max, "adaptive": False}
    elif draft_max:
        speculation = {
            "spec": "draft",
            "draft_model": options.draft,
            "draft_max": draft_max,
            "adaptive": False,
        }
    return Engine(
        EngineConfig(
            model=options.model,
            device="cpu",
            dtype=options.dtype,
            threads=options.threads,
            ctx=options.ctx,
            prefix_sharing=False,
            **speculation,
        )
    )


def generate_with(engine: Engine, request_id: str, prompt_ids: Sequence[int], tokens: int) -> Generation:
    """Run one greedy request to exactly `tokens` tokens, noting every event."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    clock = ChunkClock()
    for event in engine.stream([Request(id=request_id, prompt_ids=tuple(prompt_ids), params=params)]):
        clock.add(list(event.token_ids))
    return clock.finish(mean_acceptance_length=engine.metrics(request_id).mean_acceptance_length)


def versions() -> Mapping[str, str]:
    """Return spd's and torch's versions."""
    return {"spd": spd.__version__, "torch": torch.__version__}


class SpdEngine:
    """One engine that answers generation requests."""

    def __init__(self, options: WorkerOptions) -> None:
        self.engine = open_engine(options, options.draft_max if options.draft or options.ngram else 0)
        self.requests = 0

    def versions(self) -> Mapping[str, str]:
        """Return the versions that matter."""
        return versions()

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate greedily, ignoring end tokens."""
        self.requests += 1
        return generate_with(self.engine, str(self.requests), prompt_ids, tokens)


class RowsEngine:
    """Two engines in one process whose verify times are compared."""

    def __init__(self, options: WorkerOptions, rows: int) -> None:
        self.rows = rows
        self.one = open_engine(options, 0)
        self.many = open_engine(options, rows - 1)
        self.requests = 0

    def versions(self) -> Mapping[str, str]:
        """Return the versions that matter."""
        return versions()

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate with each engine in turn; the extra fields are medians of one verify in milliseconds.

        The first round of a request is left out (it follows the prefill), and so are rounds at its end
        that verified fewer rows.
        """
        self.requests += 1
        found: dict[str, list[float]] = {}
        for name, engine, rows in (("one", self.one, 1), ("many", self.many, self.rows)):
            records: list[RoundRecord] = []
            engine.trace = records.append
            result = generate_with(engine, f"{name}-{self.requests}", prompt_ids, tokens)
            engine.trace = None
            found[name] = [r.ms["verify"] for r in records if r.round > 0 and len(r.draft) + 1 == rows]
        one, many = (median(found[name]) if found[name] else float("nan") for name in ("one", "many"))
        return Generation(
            result.token_ids,
            result.chunks,
            {
                "rows": self.rows,
                "verify_ms_1": one,
                "verify_ms_rows": many,
                "rounds_1": len(found["one"]),
                "rounds_rows": len(found["many"]),
            },
        )


if __name__ == "__main__":
    if "--rows" in sys.argv:
        at = sys.argv.index("--rows")
        wanted = int(sys.argv[at + 1])
        del sys.argv[at : at + 2]
        raise SystemExit(serve(lambda options: RowsEngine(options, wanted)))
    raise SystemExit(serve(SpdEngine))
