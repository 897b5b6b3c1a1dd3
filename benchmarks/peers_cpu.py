"""Compare spd with transformers and vLLM on a CPU: one checkpoint, one run, interleaved rounds.

Each engine is a persistent process in its own Python (they need different packages); in each round each
generates once, one after the other, on the same prompt: greedy, end tokens ignored. Plain, with a
draft model, and by n-gram lookup. From the repository:

    python tests/recipes/medium.py /tmp/medium
    python -m benchmarks.peers_cpu /tmp/medium --transformers-python ... --vllm-python ...
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, ForeignLoad, describe_commit, describe_machine
from benchmarks.peers.worker import Answer, Entry, Worker, WorkerError, read_answer
from spd.runtime.measuring.statistics import paired_ratio, summarize

REFERENCE = "spd-plain"
ROWS_ENTRY = "spd-rows"
RATIOS = (
    ("spd-plain", "vllm-plain"),
    ("spd-draft", "vllm-draft"),
    ("spd-plain", "transformers-plain"),
    ("spd-draft", "transformers-draft"),
    ("spd-draft", "transformers-plain"),
    ("spd-ngram", "vllm-ngram"),
    ("spd-ngram", "transformers-ngram"),
    ("spd-draft", "spd-plain"),
    ("spd-ngram", "spd-plain"),
    ("vllm-ngram", "vllm-plain"),
    ("transformers-ngram", "transformers-plain"),
    ("vllm-draft", "vllm-plain"),
    ("transformers-draft", "transformers-plain"),
)


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path
    draft: Path
    draft_max: int
    dtype: str
    tokens: int
    prompt_tokens: int
    rounds: int
    rows: int
    threads: int
    cpus: tuple[int, ...]
    ctx: int
    pythons: Mapping[str, str]
    only: tuple[str, ...]
    preload: str | None
    pause: float
    out: Path


@dataclass
class Tally:
    """What one entry has given so far."""

    ready: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; peers without a Python are left out."""
    parser = argparse.ArgumentParser(description="Compare spd with its peers on a CPU.")
    parser.add_argument("model", type=Path, help="checkpoint folder, e.g. of tests/recipes/medium.py")
    parser.add_argument("--draft", type=Path, help="draft folder (MODEL/draft)")
    parser.add_argument("--draft-max", type=int, default=4, metavar="K")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", type=int, default=8, help="rows of the verify/decode ratio; 0 leaves it out"
    )
    parser.add_argument("--threads", type=int, help="all the CPUs of this process unless given")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--spd-python", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--transformers-python", metavar="PYTHON")
    parser.add_argument("--vllm-python", metavar="PYTHON")
    parser.add_argument("--only", help="comma list of entries, such as spd-plain,vllm-plain")
    parser.add_argument("--vllm-preload", help="colon list of libraries (Intel OpenMP and tcmalloc if found)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_peers.json")
    given = parser.parse_args(arguments)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    threads = given.threads or len(cpus)
    if not 1 <= threads <= len(cpus):
        parser.error(f"--threads {threads}: this process may use {len(cpus)} CPUs")
    pythons = {"spd": given.spd_python, "transformers": given.transformers_python, "vllm": given.vllm_python}
    only = tuple(given.only.split(",")) if given.only else ()
    return Options(
        model=given.model.resolve(),
        draft=(given.draft or given.model / "draft").resolve(),
        draft_max=given.draft_max,
        dtype=given.dtype,
        tokens=given.tokens,
        prompt_tokens=given.prompt_tokens,
        rounds=given.rounds,
        rows=given.rows,
        threads=threads,
        cpus=cpus[:threads],
        ctx=given.ctx,
        # Absolute but not resolved: a virtual environment's python is a link, and its path is the point.
        pythons={name: os.path.abspath(path) for name, path in pythons.items() if path},
        only=only,
        preload=given.vllm_preload,
        pause=given.pause,
        out=given.out,
    )


def entries(options: Options) -> list[Entry]:
    """List the processes to compare, in the order of a round."""
    listed = []
    for peer, python in options.pythons.items():
        k = ["--draft-max", str(options.draft_max)]
        modes = {"plain": [], "draft": ["--draft", str(options.draft), *k], "ngram": ["--ngram", *k]}
        for mode, arguments in modes.items():
            listed.append(_entry(options, f"{peer}-{mode}", peer, python, arguments))
    if options.rows > 1 and "spd" in options.pythons:
        extra = ["--rows", str(options.rows), "--draft", str(options.draft)]
        listed.append(_entry(options, ROWS_ENTRY, "spd", options.pythons["spd"], extra))
    chosen = [entry for entry in listed if not options.only or entry.name in options.only]
    if not chosen:
        raise SystemExit(f"nothing to compare: the entries are {', '.join(entry.name for entry in listed)}")
    return chosen


def _entry(options: Options, name: str, peer: str, python: str, arguments: Sequence[str]) -> Entry:
    command = [python, "-m", f"benchmarks.peers.{peer}_worker", "--model", str(options.model)]
    command += ["--threads", str(options.threads), "--dtype", options.dtype, "--ctx", str(options.ctx)]
    threads = str(options.threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    if peer == "vllm":
        # As its CPU guide asks: threads bound by vLLM itself, Intel OpenMP and tcmalloc preloaded.
        del environment["OMP_NUM_THREADS"]
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        environment["VLLM_CPU_KVCACHE_SPACE"] = "2"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cpus))
        environment["VLLM_NO_USAGE_STATS"] = "1"
        preload = options.preload if options.preload is not None else find_preload(Path(python))
        if preload:
            environment["LD_PRELOAD"] = preload
    return Entry(name, (*command, *arguments), environment)


def find_preload(python: Path) -> str:
    """Find the libraries vLLM's CPU guide wants preloaded; what is not installed is left out."""
    patterns = (
        (python.parents[1] / "lib", "libiomp5.so"),
        (Path("/usr/lib"), "*-linux-gnu/libtcmalloc_minimal.so.4"),
    )
    found = [next(iter(sorted(folder.glob(pattern))), None) for folder, pattern in patterns]
    return ":".join(str(path) for path in found if path)


def prompts(options: Options, vocab: int) -> list[list[int]]:
    """Draw one prompt a round; the ids 0..258 of a recipe are bytes and special tokens, so start above."""
    draws = random.Random(0)
    low = min(300, vocab // 2)
    return [
        [draws.randrange(low, vocab) for _ in range(options.prompt_tokens)] for _ in range(options.rounds)
    ]


def measure(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Start every worker, run the rounds, and return the report; a worker that fails to load is left out."""
    vocab = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    failures: dict[str, str] = {}
    workers: dict[str, Worker] = {}
    tallies: dict[str, Tally] = {}
    with ExitStack() as stack:
        logs = Path(tempfile.mkdtemp(prefix="spd-peers-"))
        for entry in entries(options):
            say(f"loading {entry.name}")
            worker = Worker(entry, logs / f"{entry.name}.log", options.cpus)
            stack.callback(worker.close)
            try:
                tallies[entry.name] = Tally(worker.wait_ready(timeout=900))
                worker.generate(prompts(options, vocab)[0], min(16, options.tokens), timeout=300)
                workers[entry.name] = worker
            except WorkerError as error:
                failures[entry.name] = str(error)
                tallies.pop(entry.name, None)
                say(f"left out: {error}")
            worker.pause()
        say("rounds begin")
        for number, prompt in enumerate(prompts(options, vocab)):
            _round(options, workers, tallies, failures, prompt, say, f"{number + 1}/{options.rounds}")
        say("rounds end")
    return report(options, tallies, failures)


def _round(
    options: Options,
    workers: dict[str, Worker],
    tallies: dict[str, Tally],
    failures: dict[str, str],
    prompt: Sequence[int],
    say: Callable[[str], None],
    label: str,
) -> None:
    for name, worker in list(workers.items()):
        worker.resume()
        time.sleep(options.pause)
        load = ForeignLoad(worker.group)
        try:
            value = worker.generate(prompt, options.tokens, timeout=600)
            answer = read_answer(value, *load.read())
        except WorkerError as error:
            failures[name] = str(error)
            del workers[name], tallies[name]
            say(f"left out: {error}")
            continue
        finally:
            worker.pause()
        tallies[name].answers.append(answer)
        noise = f" (others kept {answer.foreign_cpus:.2f} CPUs busy)" if answer.foreign_cpus > 0.1 else ""
        say(f"round {label} {name}: {answer.decode_tokens_per_second:.1f} tokens/s{noise}")


def report(options: Options, tallies: Mapping[str, Tally], failures: Mapping[str, str]) -> dict[str, Any]:
    """Gather the figures: medians, equality with spd's plain text, paired ratios, verify against decode."""
    rows = tallies.get(ROWS_ENTRY)
    compared = {name: tally for name, tally in tallies.items() if name != ROWS_ENTRY and tally.answers}
    speeds = {name: [a.decode_tokens_per_second for a in t.answers] for name, t in compared.items()}
    reference = compared.get(REFERENCE)
    result: dict[str, Any] = {
        "schema": "spd.benchmarks.cpu_peers/1",
        "settings": {
            "checkpoint": options.model.name,
            "draft_max": options.draft_max,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "prompt_tokens": options.prompt_tokens,
            "rounds": options.rounds,
            "threads": options.threads,
            "sampling": "greedy, end tokens ignored, batch 1",
            "acceptance": "natural",
        },
        "machine": describe_machine(),
        **describe_commit(),
        "entries": {},
        "ratios": {},
        "failures": dict(failures),
    }
    for name, tally in compared.items():
        result["entries"][name] = {
            "decode_tokens_per_second": summarize(speeds[name]).as_dict(),
            "ttft_ms": summarize([1000 * a.ttft_seconds for a in tally.answers]).as_dict(),
            "tokens_per_step": summarize([a.tokens_per_step for a in tally.answers]).as_dict(),
            # The prompt included. With one thread this stands up to other load; waiting threads spin in it.
            "cpu_ms_per_token": summarize(
                [1000 * a.cpu_seconds / options.tokens for a in tally.answers]
            ).as_dict(),
            "foreign_cpus": summarize([a.foreign_cpus for a in tally.answers]).as_dict(),
            "load_seconds": tally.ready["load_seconds"],
            "versions": tally.ready["versions"],
            "equal_to_spd_plain": _equality(tally.answers, reference.answers) if reference else None,
        }
    for over, under in RATIOS:
        if over in speeds and under in speeds:
            result["ratios"][f"{over} / {under}"] = paired_ratio(speeds[over], speeds[under]).as_dict()
    if rows and rows.answers:
        pairs = [(a.extra["verify_ms_rows"], a.extra["verify_ms_1"]) for a in rows.answers]
        result["verify_over_decode"] = {
            "rows": options.rows,
            "verify_ms": summarize([many for many, _ in pairs]).as_dict(),
            "decode_ms": summarize([one for _, one in pairs]).as_dict(),
            "ratio": paired_ratio(*zip(*pairs, strict=True)).as_dict(),
        }
    return result


def _equality(answers: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, Any]:
    firsts: list[int | None] = []
    for answer, other in zip(answers, reference, strict=True):
        pairs = zip(answer.token_ids, other.token_ids, strict=True)
        firsts.append(next((at for at, (mine, its) in enumerate(pairs) if mine != its), None))
    return {"equal_texts": firsts.count(None), "texts": len(firsts), "first_difference": firsts}


def render(result: Mapping[str, Any]) -> str:
    """Return the report as a short table."""
    lines = [f"{'':<22}{'tokens/s':>9}{'ttft ms':>9}{'per step':>9}{'cpu ms':>8}  equal to spd plain"]
    for name, entry in result["entries"].items():
        equal = entry["equal_to_spd_plain"]
        words = f"{equal['equal_texts']}/{equal['texts']}" if equal else "-"
        keys = ("decode_tokens_per_second", "ttft_ms", "tokens_per_step", "cpu_ms_per_token")
        figures = [entry[key]["median"] for key in keys]
        lines.append(
            f"{name:<22}{figures[0]:>9.2f}{figures[1]:>9.0f}{figures[2]:>9.2f}{figures[3]:>8.1f}  {words}"
        )
    for name, ratio in result["ratios"].items():
        lines.append(f"{name:<42}{ratio['median']:>7.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    if "verify_over_decode" in result:
        verify = result["verify_over_decode"]
        lines.append(
            f"verify({verify['rows']} rows) / decode(1 row){'':<15}{verify['ratio']['median']:>7.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and write the JSON; status 1 when an entry failed, or spd's own text differed."""
    options = parse_options(arguments)
    # A stopped worker would outlive its parent, so a polite kill must pass through the end of `measure`.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = measure(options, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(render(result))
    changed = False
    for name in ("spd-draft", "spd-ngram"):
        own = result["entries"].get(name)
        equal = own["equal_to_spd_plain"] if own else None
        if equal is not None and equal["equal_texts"] != equal["texts"]:
            print(f"{name} differs from spd-plain: speculation changed tokens", file=sys.stderr)
            changed = True
    return 1 if changed or result["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
