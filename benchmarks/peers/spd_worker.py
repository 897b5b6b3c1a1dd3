"""The spd workers: the public engine, plain or with a draft model at fixed k, and the cost of rows.

`--rows R` serves the other measurement: two engines in this one process, the plain one (1 row a
round) and one at fixed k = R - 1 (R rows), generate in turn, and their traces give the time of one
verify.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any
from unittest import mock

import torch

import spd
from benchmarks.drafters import EngineOptions, engine_config
from benchmarks.peers.protocol import ChunkClock, Generation, Speculation, WorkerOptions, serve
from benchmarks.peers.stepped import SteppedEngine
from spd.kernels.native import build
from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from spd.runtime.lab.load import Pass, per_position


def open_engine(options: WorkerOptions, draft_max: int, slots: int = 1) -> Engine:
    """Open an engine at fixed k; k = 0 is speculation off."""
    if options.instructions is not None:
        features = build.FEATURES[options.instructions]
        mock.patch.object(build, "processor_features", lambda: features).start()
    speculation: EngineOptions = {"spec": "off"}
    if draft_max and options.eagle3 is not None:
        speculation = {
            "spec": "eagle3",
            "draft_model": options.eagle3,
            "draft_max": draft_max,
            "adaptive": False,
        }
    elif draft_max and (options.ngram or options.mtp):
        method = "ngram" if options.ngram else "mtp"
        speculation = {"spec": method, "draft_max": draft_max, "adaptive": False}
    elif draft_max:
        speculation = {
            "spec": "draft",
            "draft_model": options.draft,
            "draft_max": draft_max,
            "adaptive": False,
            "synthetic_acceptance": options.imposed,
        }
    return Engine(
        engine_config(
            speculation,
            model=options.model,
            device="cpu",
            dtype=options.dtype,
            threads=options.threads,
            ctx=options.ctx,
            slots=slots,
            prefix_sharing=False,
            quantize="int4" if options.int4 else "none",
            activations=options.activations,
        )
    )


def versions() -> Mapping[str, str]:
    """Return spd's and torch's versions."""
    return {"spd": spd.__version__, "torch": torch.__version__}


class SpdEngine(SteppedEngine):
    """One engine, opened anew where another number of requests runs together."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.slots = 1
        self.engine = self._open()

    def _open(self) -> Engine:
        options = self.options
        speculates = options.draft or options.ngram or options.mtp or options.eagle3
        return open_engine(options, options.draft_max if speculates else 0, self.slots)

    def versions(self) -> Mapping[str, str]:
        """Return the versions that matter."""
        return versions()

    def decoder(self, concurrency: int) -> Engine:
        """Return an engine with as many slots."""
        if concurrency != self.slots:
            self.engine.close()
            self.slots = concurrency
            self.engine = self._open()
        return self.engine

    def speculation(self, ran: Pass) -> Speculation | None:
        """Return sums over the requests.

        Drafts that matched count, as in vLLM, also where the text ended before.
        """
        drafted = [record for record in ran.records if record.draft]
        return Speculation(
            len(drafted),
            sum(len(record.draft) for record in drafted),
            sum(record.accepted for record in drafted),
            tuple(per_position(drafted)[1]),
        )


class RowsEngine:
    """Two engines in one process whose verify times are compared."""

    def __init__(self, options: WorkerOptions, rows: int) -> None:
        self.rows = rows
        self.single_row = open_engine(options, 0)
        self.several_rows = open_engine(options, rows - 1)
        self.requests = 0

    def versions(self) -> Mapping[str, str]:
        """Return the versions that matter."""
        return versions()

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate with each engine in turn; extra fields are medians of a verify in milliseconds.

        The first round of a request is left out (it follows the prefill), and so are rounds at its
        end that verified fewer rows.
        """
        self.requests += 1
        verify_times: dict[str, list[float]] = {}
        for name, engine, rows in (
            ("one", self.single_row, 1),
            ("many", self.several_rows, self.rows),
        ):
            records: list[RoundRecord] = []
            engine.trace = records.append
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            request = Request(f"{name}-{self.requests}", tuple(prompt_ids), params)
            clock = ChunkClock()
            for event in engine.stream([request]):
                clock.add(list(event.token_ids))
            engine.trace = None
            verify_times[name] = [
                r.ms["verify"] for r in records if r.round > 0 and len(r.draft) + 1 == rows
            ]
        single_row, several_rows = (
            median(verify_times[name]) if verify_times[name] else float("nan")
            for name in ("one", "many")
        )
        return clock.finish(
            rows=self.rows,
            verify_ms_1=single_row,
            verify_ms_rows=several_rows,
            rounds_1=len(verify_times["one"]),
            rounds_rows=len(verify_times["many"]),
        )


if __name__ == "__main__":
    if "--rows" in sys.argv:
        at = sys.argv.index("--rows")
        rows = int(sys.argv[at + 1])
        del sys.argv[at : at + 2]
        raise SystemExit(serve(lambda options: RowsEngine(options, rows)))
    raise SystemExit(serve(SpdEngine))
