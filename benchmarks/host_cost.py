"""What the host does for one round, beside the device program; and tokens a second at several concurrencies.

    python -m benchmarks.host_cost [--slots 32] [--tokens 200] [--model FOLDER] [--out FILE]

Host cost is the time of `Engine.step` less that of `Round.run`, in steps that prefill nothing and end nobody:
admission, pages, reading what a round emitted, detokenizing, events. On CPU the two follow each other, so the
difference is exact; on a GPU they overlap and only the device's own timer can say what is hidden.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from spd.formats.demo import demo_folder
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

PROMPT = tuple(range(300, 360))


def engine_of(model: Path, slots: int, **wishes: Any) -> Engine:
    """An engine whose slots all hold a few hundred positions."""
    return Engine(EngineConfig(model=model, slots=slots, ctx=512, threads=wishes.pop("threads", 1), **wishes))


def requests(count: int, tokens: int) -> list[Request]:
    """Sampled requests that run to their length."""
    return [
        Request(f"{i}", PROMPT, SamplingParams(max_tokens=tokens, temperature=0.8, seed=i, ignore_eos=True))
        for i in range(count)
    ]


def host_microseconds(model: Path, slots: int, tokens: int, **wishes: Any) -> dict[str, float]:
    """Percentiles of the host's share of a step with every slot decoding, in microseconds."""
    engine = engine_of(model, slots, **wishes)
    inside = 0.0
    honest = engine._parts.queue.round.run

    def timed(*args: Any) -> Any:
        nonlocal inside
        began = time.perf_counter()
        result = honest(*args)
        inside += time.perf_counter() - began
        return result

    engine._parts.queue.round.run = timed  # type: ignore[method-assign]
    for request in requests(slots, tokens):
        engine.add(request)
    costs = []
    while engine.has_work:
        steady = len(engine._scheduler.decoding()) == slots
        inside, began = 0.0, time.perf_counter()
        events = engine.step()
        spent = time.perf_counter() - began - inside
        if steady and not any(event.finish_reason for event in events):
            costs.append(1e6 * spent)
    ordered = sorted(costs[len(costs) // 5 :])
    return {
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * len(ordered))],
        "steps": len(ordered),
    }


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
    parser.add_argument("--tokens", type=int, default=120)
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
            options.model, options.slots, options.tokens, threads=options.threads, **wishes
        )
        print(f"host, {options.slots} slots, {name}: {found['host_us'][name]}", flush=True)
    for concurrency in (1, 4, 16):
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
