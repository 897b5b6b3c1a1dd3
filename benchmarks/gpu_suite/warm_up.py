"""Probe: fill the compilers' caches on disk from many processes at once, so that later probes only
measure.

Every process runs what some probe will run, once and small: the same matrices in fewer layers
compile the same kernels. It reports how long each took and what failed; its figures mean nothing
else.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.batches import CASES as BATCH_CASES
from benchmarks.gpu_suite.end_to_end import (
    FILTERED,
    LENGTHS_OF_K,
    SAMPLED_PARAMS,
    config_of,
    fix_draft_length,
)
from benchmarks.gpu_suite.round_settings import USUAL_K, Setting
from benchmarks.gpu_suite.round_times import GREEDY, random_prompt, start, stop, with_engine
from benchmarks.gpu_suite.shapes import EAGLE_SIZE, QWEN3_8B, SHAPES, shortened
from benchmarks.gpu_suite.spd_rounds import compare, demo_prompts
from benchmarks.gpu_suite.speculation import reference_length
from benchmarks.gpu_suite.suite import PACKAGE, child_command
from benchmarks.gpu_suite.together import watch_together
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.runtime import Engine

KERNEL_PARTS = 4
PROMPT = 300
"""Tokens of a prompt: a whole chunk and a rest."""
LIMIT = 72.0
"""Seconds for all tasks: less than the probe is given, so that it ends by itself."""
TASKS = {
    **{
        f"kernels {part}": f"{PACKAGE}.kernel_table:warm_part:{part}:{KERNEL_PARTS}"
        for part in range(KERNEL_PARTS)
    },
    **{shape.name: f"{PACKAGE}.warm_up:dry_run:{shape.name}" for shape in SHAPES},
    "speculation": f"{PACKAGE}.warm_up:dry_speculation",
    "demo": f"{PACKAGE}.warm_up:dry_demo",
    "compiled loop": f"{PACKAGE}.peers_gpu:warm_loop",
}


def dry_run(name: str) -> dict[str, Any]:
    """Run a few plain rounds of a shape, with every kind of sampling that is measured."""
    [shape] = [shape for shape in SHAPES if shape.name == name]

    def work(engine: Engine) -> dict[str, Any]:
        for params in (GREEDY, SAMPLED_PARAMS, FILTERED):
            start(engine, [random_prompt(PROMPT, shape.vocab, 0)], params, 3)
            stop(engine, 1)
        return {}

    with tempfile.TemporaryDirectory() as place:
        return with_engine(config_of(Path(place), shortened(shape), ctx=1024), work)


def dry_speculation() -> dict[str, Any]:
    """Run a few rounds at every k, and at every number of slots that is measured."""
    max_k = max(LENGTHS_OF_K)

    def work(engine: Engine) -> dict[str, Any]:
        slots = engine.plan.shape.slots
        for k in (0, *LENGTHS_OF_K) if slots == 1 else (0, 4):
            fix_draft_length(engine, k)
            start(
                engine, [random_prompt(PROMPT, QWEN3_8B.vocab, i) for i in range(slots)], GREEDY, 3
            )
            stop(engine, slots)
        return {}

    with tempfile.TemporaryDirectory() as place:
        target = shortened(QWEN3_8B)
        length = reference_length(max_k)
        for slots in sorted({case[0] for case in BATCH_CASES}):
            config = config_of(
                Path(place), target, EAGLE_SIZE, max_k, length, ctx=1024, slots=slots
            )
            with_engine(config, work)
    return {}


def dry_demo() -> dict[str, Any]:
    """Run a few rounds of the demo with every draft method, alone and in a batch."""
    settings = [Setting(method, 7, slots=slots) for slots in (1, 16) for method in USUAL_K]
    reports = compare(
        demo_folder(), demo_draft_folder(), demo_prompts()[-3:], tokens=12, settings=settings
    )
    for report in reports:
        errors = {name: row["error"] for name, row in report["settings"].items() if "error" in row}
    return errors


def run(tasks: dict[str, str] = TASKS, limit: float = LIMIT) -> Iterator[dict[str, Any]]:
    """Run every task in a process of its own, all at once; yields after each that ends.

    What still runs after `limit` seconds is killed: it compiles again where it is measured.
    """
    began = time.perf_counter()
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        results = {name: Path(place) / f"{index}.json" for index, name in enumerate(tasks)}
        commands = {
            name: child_command(reference, results[name], float("inf"))
            for name, reference in tasks.items()
        }
        with closing(watch_together(commands)) as ends:
            for ended in ends:
                seconds = round(time.perf_counter() - began, 1)
                if ended is not None:
                    name, status = ended
                    answers[name] = {"seconds": seconds, **_errors(status, results[name])}
                    yield answers
                elif seconds > limit:
                    break
    left = {
        name: {"seconds": limit, "error": "did not end in time"}
        for name in tasks
        if name not in answers
    }
    yield {**answers, **left}


def _errors(status: int, result: Path) -> dict[str, Any]:
    """Yield the errors of a task's answer."""
    answer = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "error" in answer:
        return {"error": answer["error"].splitlines()[-1]}
    if status or "result" not in answer:
        return {"error": f"ended with status {status}"}
    return {"errors": answer["result"]} if answer["result"] else {}
