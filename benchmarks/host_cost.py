"""What the host does for one round, beside the device program; and tokens a second at several concurrencies.

    python -m benchmarks.host_cost [--slots 32] [--steps 100] [--tokens 120] [--model FOLDER] [--out FILE]

Host cost is the time of `Engine.step` less that of `Round.run`, in steps that prefill nothing and end nobody:
admission, pages, reading what a round emitted, detokenizing, events. On CPU the two follow each other, so the
difference is exact; on a GPU they overlap and only the device's own timer can say what is hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spd.formats.demo import demo_folder
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

PROMPT = tuple(range(300, 360))
CTX = 1024
"""Room for who decodes first until the prompts of all others are written and the steps have run."""


WARM_UP = 10
"""Steps left out at the beginning."""


@dataclass
class Clocks:
    """Seconds by the wall and by this process's processor time."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Clocks:
        """Both clocks' readings."""
        return cls(time.perf_counter(), time.process_time())

    def add(self, began: Clocks) -> None:
        """Add what has passed since a reading."""
        now = Clocks.now()
        self.wall += now.wall - began.wall
        self.cpu += now.cpu - began.cpu


def engine_of(model: Path, slots: int, **wishes: Any) -> Engine:
    """An engine whose slots all hold a few hundred positions."""
    return Engine(EngineConfig(model=model, slots=slots, ctx=CTX, threads=wishes.pop("threads", 1), **wishes))


def requests(count: int, tokens: int) -> list[Request]:
    """Sampled requests that run to their length."""
    return [
        Request(f"{i}", PROMPT, SamplingParams(max_tokens=tokens, temperature=0.8, seed=i, ignore_eos=True))
        for i in range(count)
    ]


def host_microseconds(model: Path, slots: int, steps: int, **wishes: Any) -> dict[str, float]:
    """The host's share of a step with every slot decoding, over at most `steps` of them, in microseconds.

    By the wall and by the processor: the latter leaves out what other processes took. Raises SystemExit
    where requests end before every slot decodes.
    """
    engine = engine_of(model, slots, **wishes)
    inside = Clocks()
    honest = engine._parts.queue.round.run

    def timed(*args: Any) -> Any:
        began = Clocks.now()
        result = honest(*args)
        inside.add(began)
        return result

    engine._parts.queue.round.run = timed  # type: ignore[method-assign]
    for request in requests(slots, CTX - len(PROMPT)):
        engine.add(request)
    costs: list[Clocks] = []
    while engine.has_work and len(costs) < steps + WARM_UP:
        steady = len(engine._scheduler.decoding()) == slots
        inside.wall = inside.cpu = 0.0
        began, spent = Clocks.now(), Clocks()
        events = engine.step()
        spent.add(began)
        if steady and not any(event.finish_reason for event in events):
            costs.append(Clocks(spent.wall - inside.wall, spent.cpu - inside.cpu))
    engine.close()
    if len(costs) <= WARM_UP:
        raise SystemExit(f"{slots} slots never decoded together: fewer --slots")
    found: dict[str, float] = {"steps": len(costs) - WARM_UP}
    for clock in ("wall", "cpu"):
        ordered = sorted(1e6 * getattr(cost, clock) for cost in costs[WARM_UP:])
        found |= {clock: statistics.median(ordered), f"{clock}_p90": ordered[int(0.9 * len(ordered))]}
    return found


def tokens_per_second(model: Path, concurrency: int, tokens: int, **wishes: Any) -> float:
    """All tokens of three requests a slot over the wall time from first to last, prefill included."""
    engine = engine_of(model, concurrency, **wishes)
    engine.generate(requests(concurrency, 8))
    asked = requests(3 * concurrency, tokens)
    began = time.perf_counter()
    done = engine.generate(asked)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - began)


def main() -> None:
    """Measure, print, and write a JSON file if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="of the host's cost")
    parser.add_argument(
        "--tokens", type=int, default=120, help="a request, of the throughput; 0 leaves it out"
    )
    parser.add_argument("--model", type=Path, default=demo_folder())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "model": str(options.model),
        "torch": torch.__version__,
        "threads": options.threads,
    }
    found["host_us"], found["tokens_per_second"] = {}, {}
    for name, wishes in (
        ("off", {"spec": "off"}),
        ("ngram k=4", {"spec": "ngram", "draft_max": 4, "adaptive": False}),
    ):
        found["host_us"][name] = host_microseconds(
            options.model, options.slots, options.steps, threads=options.threads, **wishes
        )
        print(f"host, {options.slots} slots, {name}: {found['host_us'][name]}", flush=True)
    for concurrency in (1, 4, 16) if options.tokens else ():
        for spec in ("off", "auto"):
            rate = tokens_per_second(
                options.model, concurrency, options.tokens, spec=spec, threads=options.threads
            )
            found["tokens_per_second"][f"{spec} at {concurrency}"] = round(rate, 1)
            print(f"{concurrency} together, --spec {spec}: {rate:.1f} tok/s", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
