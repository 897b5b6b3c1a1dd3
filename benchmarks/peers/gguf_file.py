"""Compare spd with llama.cpp on one GGUF file, which both open as it is, in interleaved pairs.

    python -m benchmarks.peers.gguf_file MODEL.gguf --llama-cpp DIR [--pairs 15] [--out FILE]

DIR is llama.cpp's source with `build/bin/llama-server`. In each pair every engine runs each task
once, one after the other, greedy and with end tokens ignored; in every second pair llama.cpp begins.
A worker that does not run is stopped. Tasks: a text after a short prompt (its first token, then
tokens a second), prompts of 512 and 2,048 tokens (tokens a second until the first token), and a text
after a prompt that repeats itself, with and without n-gram lookup. Prompts are the standard library's
source, by the file's tokenizer. Then each engine is started anew, from its process to its readiness,
while the file is in the page cache. Memory is the peak of resident pages, those of a mapped file
included.

Ratios are spd's speed over llama.cpp's (of times and memory: llama.cpp's over spd's), so that more
than 1 is spd's advantage: the median of the pairs with the 95 % interval of the median.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import ROOT, ForeignLoad, describe_commit, describe_machine
from benchmarks.peers import options as peer_options
from benchmarks.peers.entries import entries
from benchmarks.peers.worker import Answer, Worker, exiting_on_terminate, peak_memory, read_answer
from benchmarks.summaries import median_interval
from spd.formats.folder import ModelFolder
from spd.kernels.native.build import FEATURES

SCHEMA = "spd.benchmarks.gguf_peers/1"
CTX = 4096
FRAGMENT = 48
"""Tokens that a repeating prompt repeats."""
WARM_UP_TOKENS = 16
TIMEOUT = 900.0


@dataclass(frozen=True)
class Task:
    """A request that some of the engines run in every pair."""

    name: str
    prompt_tokens: int
    tokens: int
    modes: tuple[str, ...] = ("plain",)
    """Engines: each peer in these modes."""
    repeating: bool = False


PLAIN = "plain"
REPEATING = "repeating"
TASKS = (
    Task(PLAIN, 64, 128),
    Task("prompt of 512", 512, 2),
    Task("prompt of 2048", 2048, 2),
    Task(REPEATING, 6 * FRAGMENT, 128, ("plain", "ngram"), repeating=True),
)


@dataclass(frozen=True)
class Figure:
    """A figure of a report: what it is of, and how one answer gives it."""

    name: str
    task: str
    spd: str
    """The mode of spd's engine."""
    llama: str
    of_answer: Callable[[Task, Answer], float]
    is_time: bool = False
    """True if less is better."""


def _decode_speed(task: Task, answer: Answer) -> float:
    return answer.decode_tokens_per_second


def _prompt_speed(task: Task, answer: Answer) -> float:
    return task.prompt_tokens / answer.ttft_seconds


def _first_token_ms(task: Task, answer: Answer) -> float:
    return 1000 * answer.ttft_seconds


FIGURES = (
    Figure("plain, tokens/s", PLAIN, "plain", "plain", _decode_speed),
    Figure("first token, ms", PLAIN, "plain", "plain", _first_token_ms, is_time=True),
    Figure("prompt of 512, tokens/s", "prompt of 512", "plain", "plain", _prompt_speed),
    Figure("prompt of 2048, tokens/s", "prompt of 2048", "plain", "plain", _prompt_speed),
    Figure("repeating text, plain, tokens/s", REPEATING, "plain", "plain", _decode_speed),
    Figure("repeating text, n-gram, tokens/s", REPEATING, "ngram", "ngram", _decode_speed),
    Figure("the same over its plain", REPEATING, "ngram", "plain", _decode_speed),
)


@dataclass
class Measured:
    """The answers of one run, by task and engine, and the seconds of each start, by engine."""

    answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    start_seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def make_prompts(ids: Sequence[int], task: Task, pairs: int) -> list[list[int]]:
    """Return a prompt for each pair, cut from a long text at different places."""
    length = FRAGMENT if task.repeating else task.prompt_tokens
    last = len(ids) - length
    firsts = [number * last // max(1, pairs) for number in range(pairs)]
    cut_ids = [list(ids[first : first + length]) for first in firsts]
    return [(cut * -(-task.prompt_tokens // length))[: task.prompt_tokens] for cut in cut_ids]


def measure(settings: Namespace, say: Callable[[str], None]) -> Measured:
    """Start every engine, run the pairs, and start each engine anew some times."""
    tokenizer = ModelFolder(settings.model).tokenizer
    if tokenizer is None:
        raise SystemExit(f"{settings.model.name} has no vocabulary: its prompts need one")
    ids = tokenizer.encode(inspect.getsource(argparse))
    options = _peer_options(settings)
    measured = Measured()
    logs = Path(tempfile.mkdtemp(prefix="spd-gguf-peers-"))
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for entry in entries(options):
            say(f"loading {entry.name}")
            worker = Worker(entry, logs / f"{entry.name}.log", options.cpus)
            stack.callback(worker.close)
            measured.versions |= worker.wait_ready(TIMEOUT)["versions"]
            worker.generate(ids[: TASKS[0].prompt_tokens], WARM_UP_TOKENS, TIMEOUT)
            worker.pause()
            workers[entry.name] = worker
        prompts = {task.name: make_prompts(ids, task, settings.pairs) for task in TASKS}
        for number in range(settings.pairs):
            say(f"pair {number + 1} of {settings.pairs}")
            _run_pair(
                measured=measured,
                workers=workers,
                prompts={name: listed[number] for name, listed in prompts.items()},
                is_reversed=number % 2 == 1,
                pause=settings.pause,
            )
        for name, worker in workers.items():
            measured.peak_mib[name] = peak_memory(worker.group) / 2**20
    plain = [entry for entry in entries(options) if entry.name.endswith("plain")]
    for number in range(settings.starts):
        say(f"start {number + 1} of {settings.starts}")
        for entry in plain[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            worker = Worker(entry, logs / f"{entry.name}-start.log", options.cpus)
            try:
                worker.wait_ready(TIMEOUT)
                seconds = time.perf_counter() - began
            finally:
                worker.close()
            measured.start_seconds.setdefault(entry.name, []).append(seconds)
    return measured


def _run_pair(
    measured: Measured,
    workers: Mapping[str, Worker],
    prompts: Mapping[str, list[int]],
    is_reversed: bool,
    pause: float,
) -> None:
    """Let the engines run every task once, llama.cpp first if reversed."""
    for task in TASKS:
        names = [f"{peer}-{mode}" for mode in task.modes for peer in ("spd", "llama")]
        for name in names[::-1] if is_reversed else names:
            worker = workers[name]
            worker.resume()
            try:
                time.sleep(pause)
                load = ForeignLoad(worker.group)
                value = worker.generate(prompts[task.name], task.tokens, TIMEOUT)
                foreign_cpus, cpu_seconds = load.read()
            finally:
                worker.pause()
            answer = read_answer(value, foreign_cpus, cpu_seconds)
            measured.answers.setdefault((task.name, name), []).append(answer)


def ratio_report(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median of the pairs' ratios, with its 95 % interval where there are six or more."""
    interval = median_interval(ratios)
    return {"median": median(ratios), "interval": interval, "values": list(ratios)}


def figure_report(
    spd: Sequence[float], llama: Sequence[float], *, is_time: bool = False
) -> dict[str, Any]:
    """Return medians of both engines, and the ratio in which more than 1 is spd's advantage."""
    pairs = zip(spd, llama, strict=True)
    ratios = [
        llama_value / spd_value if is_time else spd_value / llama_value
        for spd_value, llama_value in pairs
    ]
    return {"spd": median(spd), "llama": median(llama), "ratio": ratio_report(ratios)}


def make_report(settings: Namespace, measured: Measured) -> dict[str, Any]:
    """Return every figure of a run, and its conditions."""
    tasks = {task.name: task for task in TASKS}
    figures: dict[str, Any] = {}
    for figure in FIGURES:
        spd, llama = (
            [
                figure.of_answer(tasks[figure.task], answer)
                for answer in measured.answers[figure.task, f"{peer}-{mode}"]
            ]
            for peer, mode in (("spd", figure.spd), ("llama", figure.llama))
        )
        figures[figure.name] = figure_report(spd, llama, is_time=figure.is_time)
    starts = measured.start_seconds
    if starts:
        report = figure_report(starts["spd-plain"], starts["llama-plain"], is_time=True)
        figures["start, s"] = report
    peaks = measured.peak_mib
    figures["peak memory, MiB"] = figure_report(
        [peaks["spd-plain"]], [peaks["llama-plain"]], is_time=True
    )
    repeated = {
        mode: [answer.token_ids for answer in measured.answers[REPEATING, f"spd-{mode}"]]
        for mode in ("plain", "ngram")
    }
    answers = [answer for listed in measured.answers.values() for answer in listed]
    return {
        "schema": SCHEMA,
        "settings": {
            "model": settings.model.name,
            "bytes": settings.model.stat().st_size,
            "dtype": settings.dtype,
            "activations": settings.activations,
            "instructions": settings.instructions,
            "draft_max": settings.draft_max,
            "pairs": settings.pairs,
            "starts": settings.starts,
            "threads": settings.threads,
        },
        "machine": describe_machine(),
        **describe_commit(),
        "versions": measured.versions,
        "figures": figures,
        "tokens_per_step": {
            name: median([answer.tokens_per_step for answer in measured.answers[REPEATING, name]])
            for name in ("spd-ngram", "llama-ngram")
        },
        "foreign_cpus": median([answer.foreign_cpus for answer in answers]),
        "texts_changed_by_lookup": sum(map(list[int].__ne__, repeated["plain"], repeated["ngram"])),
    }


def render(report: Mapping[str, Any]) -> str:
    """Return the report as a table."""
    lines = [f"{report['settings']['model']:<34}{'spd':>10}{'llama.cpp':>11}  ratio"]
    for name, figure in report["figures"].items():
        ratio = figure["ratio"]
        interval = ratio["interval"]
        words = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        lines.append(
            f"{name:<34}{figure['spd']:>10.1f}{figure['llama']:>11.1f}  {ratio['median']:.2f} x{words}"
        )
    steps = report["tokens_per_step"]
    lines.append(
        f"n-gram: {steps['spd-ngram']:.2f} tokens a step in spd, {steps['llama-ngram']:.2f} in llama.cpp"
    )
    lines.append(f"others kept {report['foreign_cpus']:.2f} CPUs busy (median)")
    return "\n".join(lines)


def _peer_options(settings: Namespace) -> peer_options.Options:
    """Return the comparison's options that start the four engines of this one."""
    words = [str(settings.model), "--llama-cpp", str(settings.llama_cpp), "--rows", "0"]
    words += ["--only", "spd-plain,llama-plain,spd-ngram,llama-ngram"]
    words += ["--dtype", settings.dtype, "--draft-max", str(settings.draft_max)]
    words += ["--activations", settings.activations]
    if settings.instructions is not None:
        words += ["--instructions", settings.instructions]
    words += ["--ctx", str(CTX), "--threads", str(settings.threads)]
    return peer_options.parse_options(words)


def parse_settings(arguments: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.gguf_file",
        description="Compare spd with llama.cpp on one GGUF file.",
    )
    parser.add_argument("model", type=Path, metavar="FILE", help="a GGUF file with a vocabulary")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--starts", type=int, default=7, help="starts of each engine; 0 for none")
    parser.add_argument("--draft-max", type=int, default=8, metavar="K", help="of n-gram lookup")
    parser.add_argument("--dtype", default="auto", help="of spd; llama.cpp has its own")
    parser.add_argument("--activations", default="whole", help="of spd: whole or int8")
    parser.add_argument(
        "--instructions", choices=[*FEATURES], help="of spd's kernels; the best unless given"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each run")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gguf_peers.json"
    )
    settings = parser.parse_args(arguments)
    settings.model = settings.model.resolve()
    if settings.pairs < 1:
        parser.error("--pairs: at least 1")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and write the JSON; status 1 if lookup changed a text of spd."""
    settings = parse_settings(arguments)
    with exiting_on_terminate():
        measured = measure(settings, lambda line: print(line, file=sys.stderr, flush=True))
    report = make_report(settings, measured)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(render(report))
    if report["texts_changed_by_lookup"]:
        print("spd's n-gram lookup changed a text", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
