"""What other programs on the machine cost: threads 1, all, and spd's own choice, under several loads.

    python -m benchmarks.busy [--model FOLDER] [--dtype bfloat16,float32] [--together 1,16] [--repetitions 5]
                              [--tokens 120] [--out FILE]

Engines stand side by side, each in its own process, and run in turn within each load: nothing else ("idle"),
one process that keeps a CPU busy ("one"), six ("six"), and another engine with the same threads ("two": the
speed of one of them). Ratios are own choice over the better of 1 and all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, describe_commit, describe_machine

SCHEMA = "spd.benchmarks.busy/1"
LOADS = {"idle": 0, "one": 1, "six": 6, "two": 0}
PROMPT = tuple(range(300, 330))


def work(options: dict[str, Any]) -> None:
    """Print, for each line "TOGETHER TOKENS" on stdin, this worker's tokens a second."""
    from spd import Engine, EngineConfig, Request, SamplingParams, demo_folder

    model = Path(options["model"]) if options["model"] else demo_folder()
    engine_options = {
        "dtype": options["dtype"],
        "threads": options["threads"],
        "spec": options["spec"],
    }
    engine = Engine(
        EngineConfig(model=model, slots=16, ctx=1024, prefix_sharing=False, **engine_options)
    )
    print(engine.plan.shape.kernels, engine.plan.threads, flush=True)
    for line in sys.stdin:
        together, tokens = map(int, line.split())
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [Request(f"{time.monotonic_ns()}-{i}", PROMPT, params) for i in range(together)]
        began = time.perf_counter()
        generated = sum(len(done.token_ids) for done in engine.generate(requests))
        print(generated / (time.perf_counter() - began), flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.busy", "--work", json.dumps(options)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, cwd=ROOT, **pipes)

    def ask(self, together: int, tokens: int) -> None:
        assert self.process.stdin is not None
        print(together, tokens, file=self.process.stdin, flush=True)

    def read(self) -> str:
        """Return the worker's next line; raises SystemExit where it has ended."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a worker ended with status {self.process.wait()}")
        return line.strip()


def measure(arguments: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Return the rows of one dtype: median tokens a second by threads, load and number together."""
    shared = {"model": arguments.model, "dtype": dtype, "spec": arguments.spec}
    names = {"1": 1, "all": len(os.sched_getaffinity(0)), "own": None}
    pairs = {
        name: [Worker(threads=count, **shared) for _ in range(2)] for name, count in names.items()
    }
    kernels = {worker.read().split()[0] for pair in pairs.values() for worker in pair}
    rows = []
    try:
        for together in arguments.together:
            for load, programs in LOADS.items():
                tokens = (
                    arguments.tokens // (1 if together == 1 else 4) // (4 if load == "six" else 1)
                )
                busy = [
                    subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    for _ in range(programs)
                ]
                time.sleep(1)
                speeds: dict[str, list[float]] = {name: [] for name in names}
                for repetition in range(arguments.repetitions + 1):  # the first is not counted
                    for name, pair in pairs.items():
                        busy_workers = pair if load == "two" else pair[:1]
                        for worker in busy_workers:
                            worker.ask(together, tokens)
                        token_counts = [float(worker.read()) for worker in busy_workers]
                        speeds[name] += token_counts[:1] if repetition else []
                for program in busy:
                    program.kill()
                    program.wait()
                middle = {name: statistics.median(values) for name, values in speeds.items()}
                ratio = middle["own"] / max(middle["1"], middle["all"])
                rows.append(
                    {"dtype": dtype, "kernels": sorted(kernels), "together": together, "load": load,
                     "tokens_per_second": middle, "ratio": ratio, "every": speeds}
                )  # fmt: skip
                figures_text = "  ".join(f"{name} {value:7.1f}" for name, value in middle.items())
                print(
                    f"{dtype:9} {together:3} together  {load:5} {figures_text}   own / best {ratio:.3f}",
                    flush=True,
                )
    finally:
        for pair in pairs.values():
            for worker in pair:
                worker.process.kill()
    return rows


def main() -> None:
    """Measure every load, print, and write the file if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a model folder; the demo otherwise")
    parser.add_argument("--spec", default="off")
    parser.add_argument(
        "--dtype", type=lambda text: text.split(","), default=["bfloat16", "float32"]
    )
    parser.add_argument(
        "--together", type=lambda text: [*map(int, text.split(","))], default=[1, 16]
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.work:
        return work(json.loads(arguments.work))
    rows = [row for dtype in arguments.dtype for row in measure(arguments, dtype)]
    if arguments.out:
        head = {
            "schema": SCHEMA,
            **describe_commit(),
            "machine": describe_machine(),
            "model": arguments.model,
        }
        arguments.out.write_text(
            json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return None


if __name__ == "__main__":
    main()
