"""Interleaved rounds over loaded workers, one request at a time, and the report of them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import ForeignLoad, describe_commit, describe_machine
from benchmarks.peers.agreement import agreement, figures, total
from benchmarks.peers.entries import IMPOSED, ROWS_ENTRY, entries
from benchmarks.peers.loads import LoadTally, measure_loads, report_loads
from benchmarks.peers.options import Options
from benchmarks.peers.pairs import AGREEING, PAIRS, REFERENCE
from benchmarks.peers.prompts import prompts
from benchmarks.peers.worker import Answer, Worker, WorkerError, read_answer
from benchmarks.summaries import paired_ratio, summarize


@dataclass
class Tally:
    """The measurements of one entry so far."""

    ready: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)


def measure(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Start every worker, run the rounds, and return the report.

    A worker that fails to load is left out.
    """
    vocab = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    round_prompts = prompts(options, options.rounds, vocab)
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
                worker.generate(round_prompts[0], min(16, options.tokens), timeout=300)
                workers[entry.name] = worker
            except WorkerError as error:
                failures[entry.name] = str(error)
                tallies.pop(entry.name, None)
                say(f"left out: {error}")
            worker.pause()
        say("rounds begin")
        for number, prompt in enumerate(round_prompts):
            label = f"{number + 1}/{options.rounds}"
            answers, errors = _run_round(
                options=options, workers=workers, prompt=prompt, say=say, label=label
            )
            for name, answer in answers.items():
                tallies[name].answers.append(answer)
            for name, error_text in errors.items():
                failures[name] = error_text
                del workers[name], tallies[name]
        loads = measure_loads(
            options=options, workers=workers, failures=failures, vocab=vocab, say=say
        )
        say("rounds end")
    return report(options, tallies, failures, loads)


def _run_round(
    options: Options,
    workers: Mapping[str, Worker],
    prompt: Sequence[int],
    say: Callable[[str], None],
    label: str,
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Return the answers of one prompt, and the errors of the workers that gave none, by name."""
    answers: dict[str, Answer] = {}
    errors: dict[str, str] = {}
    for name, worker in workers.items():
        worker.resume()
        time.sleep(options.pause)
        load = ForeignLoad(worker.group)
        try:
            value = worker.generate(prompt, options.tokens, timeout=600)
            foreign_cpus, cpu_seconds = load.read()
            answer = read_answer(value, foreign_cpus, cpu_seconds)
        except WorkerError as error:
            errors[name] = str(error)
            say(f"left out: {error}")
            continue
        finally:
            worker.pause()
        answers[name] = answer
        noise = (
            f" (others kept {answer.foreign_cpus:.2f} CPUs busy)"
            if answer.foreign_cpus > 0.1
            else ""
        )
        say(f"round {label} {name}: {answer.decode_tokens_per_second:.1f} tokens/s{noise}")
    return answers, errors


def report(
    options: Options,
    tallies: Mapping[str, Tally],
    failures: Mapping[str, str],
    loads: Mapping[str, Mapping[str, LoadTally]],
) -> dict[str, Any]:
    """Return the figures: medians, equality with spd's plain text, paired ratios, verify times."""
    rows = tallies.get(ROWS_ENTRY)
    compared = {
        name: tally for name, tally in tallies.items() if name != ROWS_ENTRY and tally.answers
    }
    speeds = {name: [a.decode_tokens_per_second for a in t.answers] for name, t in compared.items()}
    reference = compared.get(REFERENCE)
    result: dict[str, Any] = {
        "schema": "spd.benchmarks.cpu_peers/2",
        "settings": {
            "checkpoint": options.model.name,
            "draft_max": options.draft_max,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "prompt_tokens": options.prompt_tokens,
            "prompts": "spd's own" if options.text else "random ids",
            "rounds": options.rounds,
            "threads": options.threads,
            "sampling": "greedy, end tokens ignored, batch 1",
            "acceptance": "natural",
            "imposed_length": options.imposed,
            "load_tokens": options.load_tokens,
        },
        "machine": describe_machine(),
        **describe_commit(),
        "entries": {},
        "ratios": {},
        "agreement": {},
        "loads": report_loads(loads),
        "failures": dict(failures),
    }
    for name, tally in compared.items():
        result["entries"][name] = _entry_report(options, name, tally, reference)
    for over, under in PAIRS:
        if over in speeds and under in speeds:
            result["ratios"][f"{over} / {under}"] = paired_ratio(
                speeds[over], speeds[under]
            ).as_dict()
    if rows and rows.answers:
        pairs = [(a.extra["verify_ms_rows"], a.extra["verify_ms_1"]) for a in rows.answers]
        verify_ms = [verify for verify, _ in pairs]
        decode_ms = [decode for _, decode in pairs]
        result["verify_over_decode"] = {
            "rows": options.rows,
            "verify_ms": summarize(verify_ms).as_dict(),
            "decode_ms": summarize(decode_ms).as_dict(),
            "ratio": paired_ratio(verify_ms, decode_ms).as_dict(),
        }
    for first, second in AGREEING:
        first_acceptance = result["entries"].get(first, {}).get("acceptance")
        second_acceptance = result["entries"].get(second, {}).get("acceptance")
        if first_acceptance and second_acceptance:
            pair = f"{first} / {second}"
            result["agreement"][pair] = agreement(first_acceptance, second_acceptance)
    return result


def _entry_report(
    options: Options, name: str, tally: Tally, reference: Tally | None
) -> dict[str, Any]:
    answers = tally.answers
    counted = total(answer.extra.get("speculation") for answer in answers)
    comparable = reference is not None and not name.endswith(IMPOSED)
    return {
        "decode_tokens_per_second": summarize(
            [a.decode_tokens_per_second for a in answers]
        ).as_dict(),
        "ttft_ms": summarize([1000 * a.ttft_seconds for a in answers]).as_dict(),
        "tokens_per_step": summarize([a.tokens_per_step for a in answers]).as_dict(),
        # The prompt included. With one thread this stands up to other load; waiting threads spin in it.
        "cpu_ms_per_token": summarize(
            [1000 * a.cpu_seconds / options.tokens for a in answers]
        ).as_dict(),
        "foreign_cpus": summarize([a.foreign_cpus for a in answers]).as_dict(),
        "load_seconds": tally.ready["load_seconds"],
        "versions": tally.ready["versions"],
        "acceptance": None if counted is None else figures(counted),
        "equal_to_spd_plain": _equality(answers, reference.answers)
        if comparable and reference
        else None,
    }


def _equality(answers: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, Any]:
    firsts: list[int | None] = []
    for answer, other in zip(answers, reference, strict=True):
        pairs = zip(answer.token_ids, other.token_ids, strict=True)
        firsts.append(
            next(
                (
                    at
                    for at, (token, reference_token) in enumerate(pairs)
                    if token != reference_token
                ),
                None,
            )
        )
    return {"equal_texts": firsts.count(None), "texts": len(firsts), "first_difference": firsts}
