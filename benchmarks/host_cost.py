"""What the host does for one round, beside the device program.

    python -m benchmarks.host_cost [--slots 32] [--steps 200] [--model FOLDER] [--out FILE]

Host cost is the time of `Engine.step` less that of `Round.run`, in steps without a prefill or an end:
admission, pages, reading what a round emitted, detokenizing, events. On CPU the two follow each other, so the
difference is exact; on a GPU they overlap and only the device's own timer can say what is hidden.

It is measured twice. Behind a device program that runs on this CPU, which leaves nothing of the host's in its
caches; and behind one that does not: the same requests again, where each round only writes into the ring what
the same round wrote there before, so that the host reads, decides and says the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.drafters import EngineOptions, engine_config
from benchmarks.environment import describe_commit, describe_machine
from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.round.local_queue import LocalRoundQueue

PROMPT = tuple(range(300, 360))
CTX = 1024
"""Room for who decodes first until the prompts of all others are written and the steps have run."""


SCHEMA = "spd.benchmarks.host_cost/1"
ROUNDS: dict[str, EngineOptions] = {
    "plain": {"spec": "off"},
    "n-gram, k = 4": {"spec": "ngram", "draft_max": 4, "adaptive": False},
}
WARM_UP = 10
"""Steps left out at the beginning."""


@dataclass
class Clocks:
    """Seconds by the wall and by this process's processor time."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Clocks:
        """Return both clocks' readings."""
        return cls(time.perf_counter(), time.process_time())

    def add(self, began: Clocks) -> None:
        """Add the time since a reading."""
        now = Clocks.now()
        self.wall += now.wall - began.wall
        self.cpu += now.cpu - began.cpu


def engine_of(model: Path, slots: int, engine_options: EngineOptions) -> Engine:
    """Return an engine whose slots all hold a few hundred positions."""
    # Without graphs: a recorded round never calls `Round.run`.
    options: EngineOptions = {"threads": 1, "graphs": False, **engine_options}
    return Engine(engine_config(options, model=model, slots=slots, ctx=CTX))


def requests(count: int) -> list[Request]:
    """Return sampled requests that run to the context's end."""
    return [
        Request(
            f"{i}",
            PROMPT,
            SamplingParams(max_tokens=CTX - len(PROMPT), temperature=0.8, seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


Run = Callable[..., Any]
Written = list[tuple[Tensor, Tensor]]
"""What rounds wrote, in order: a row of the ring and its times."""


def recording(queue: LocalRoundQueue, written: Written) -> Run:
    """Return `Round.run`, recording also what it writes."""
    original = queue.round.run

    def run(*args: Any) -> Any:
        """Run a round, and record what it writes."""
        result = original(*args)
        ring, times = queue.rows[queue.launched % len(queue.rows)]
        written.append((ring.clone(), times.clone()))
        return result

    return run


def replaying(queue: LocalRoundQueue, written: Written) -> Run:
    """Return a stand-in for `Round.run` that writes again what was written before."""
    source = iter(written)

    def run(*args: Any) -> None:
        """Write what the same round wrote before."""
        ring, times = queue.rows[queue.launched % len(queue.rows)]
        old_ring, old_times = next(source)
        ring.copy_(old_ring)
        times.copy_(old_times)

    return run


def host_microseconds(
    model: Path, slots: int, steps: int, engine_options: EngineOptions
) -> dict[str, dict[str, float]]:
    """Return `host_share` behind the device program, and behind what it wrote."""
    written: Written = []
    return {
        "behind the device program": host_share(
            model=model,
            slots=slots,
            steps=steps,
            device=recording,
            written=written,
            engine_options=engine_options,
        ),
        "behind what it wrote": host_share(
            model=model,
            slots=slots,
            steps=steps,
            device=replaying,
            written=written,
            engine_options=engine_options,
        ),
    }


def host_share(
    model: Path,
    slots: int,
    steps: int,
    device: Callable[[LocalRoundQueue, Written], Run],
    written: Written,
    engine_options: EngineOptions,
) -> dict[str, float]:
    """Return the host's share of a step with every slot decoding, in microseconds.

    Over at most `steps` steps, by the wall and by the processor: the latter leaves out what other
    processes took. Raises SystemExit where requests end before every slot decodes.
    """
    engine = engine_of(model, slots, engine_options)
    inside = Clocks()
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    run = device(queue, written)

    def timed(*args: Any) -> Any:
        """Run a round, and add its time."""
        began = Clocks.now()
        result = run(*args)
        inside.add(began)
        return result

    vars(queue.round)["run"] = timed  # is found before the method of the class
    for request in requests(slots):
        engine.add(request)
    costs: list[Clocks] = []
    while engine.has_work and len(costs) < steps + WARM_UP:
        steady = len(engine.scheduler.decoding()) == slots
        inside.wall = inside.cpu = 0.0
        began = Clocks.now()
        spent = Clocks()
        events = engine.step()
        spent.add(began)
        if steady and not any(event.finish_reason for event in events):
            costs.append(Clocks(spent.wall - inside.wall, spent.cpu - inside.cpu))
    engine.close()
    if len(costs) <= WARM_UP:
        raise SystemExit(f"{slots} slots never decoded together: fewer --slots")
    shares: dict[str, float] = {"steps": len(costs) - WARM_UP}
    for clock in ("wall", "cpu"):
        ordered = sorted(1e6 * getattr(cost, clock) for cost in costs[WARM_UP:])
        shares |= {
            clock: statistics.median(ordered),
            f"{clock}_p90": ordered[int(0.9 * len(ordered))],
        }
    return shares


def main() -> None:
    """Measure, print, and write a JSON file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", type=Path, default=demo_folder())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": {"slots": options.slots, "steps": options.steps, "threads": options.threads},
        "model": options.model.name,
        "machine": describe_machine(),
        **describe_commit(),
        "host_us": {},
    }
    for name, engine_options in ROUNDS.items():
        round_options: EngineOptions = {"threads": options.threads, **engine_options}
        costs = host_microseconds(options.model, options.slots, options.steps, round_options)
        result["host_us"][name] = costs
        for place, cost in costs.items():
            print(
                f"host, {options.slots} slots, {name}, {place}: {cost['wall']:.0f} us", flush=True
            )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
