"""Acceptance of every drafter under every rule: tokens a round, and each position's share, with errors.

    python -m benchmarks.acceptance [--threads 1] [--only mtp,draft] [--out FILE]

Natural acceptance of the demo on spd's own prompts, each at several lengths. Nothing is timed, so a
busy machine will do. At temperature 0 the three rules are one program, which is measured once.
Rounds that begin too near the limit for k drafts are left out; one that its request ends in counts
in full. So the number of rounds is a stopping time, and the mean stays true. Errors take requests
as independent, not rounds. A run that was cut short goes on where it ended, as long as weights and
settings are those of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from benchmarks.drafters import drafters, engine_config
from benchmarks.environment import ROOT, describe_commit, describe_machine
from benchmarks.summaries import ratio_of_sums
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from spd.runtime.engine.request import derived_seed
from spd.runtime.lab.load import Pass, per_position, run_pass
from spd.runtime.lab.prompt_set import (
    BUILTIN_PROMPTS,
    EncodedPrompt,
    encode_prompts,
    read_prompts,
    select_prompts,
)
from spd.runtime.plan.config import VERIFY_RULES

SCHEMA = "spd.benchmarks.acceptance/1"
SELF = "self"
"""The demo as its own draft: every draft is right."""
DRAFTERS = ("mtp", "draft", "ngram", SELF)
ENDS_ONLY = ("ngram", SELF)


@dataclass(frozen=True)
class Options:
    """The command line."""

    drafters: tuple[str, ...]
    rules: tuple[str, ...]
    max_drafts: int
    temperatures: tuple[float, ...]
    lengths: tuple[int | None, ...]
    prompts_per_category: int | None
    tokens: int
    slots: int
    threads: int
    seed: int
    out: Path


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure acceptance of the demo's drafters.")
    parser.add_argument("--only", default=",".join(DRAFTERS), help="comma list of drafters")
    parser.add_argument("--verify", default=",".join(VERIFY_RULES), help="comma list of rules")
    parser.add_argument("--draft-max", type=int, default=6, metavar="K", help="k = 1 to K")
    parser.add_argument("--temperature", default="0,0.5,0.8,1")
    parser.add_argument("--prompt-tokens", default="0,128,256", help="0 is a prompt's own length")
    parser.add_argument("--each", type=int, help="prompts of each category (all)")
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "acceptance.json"
    )
    parsed = parser.parse_args(arguments)
    drafters = tuple(parsed.only.split(","))
    if unknown := set(drafters) - set(DRAFTERS):
        parser.error(f"--only {min(unknown)}: the drafters are {', '.join(DRAFTERS)}")
    rules = tuple(parsed.verify.split(","))
    if unknown := set(rules) - set(VERIFY_RULES):
        parser.error(f"--verify {min(unknown)}: the rules are {', '.join(VERIFY_RULES)}")
    return Options(
        drafters=drafters,
        rules=rules,
        max_drafts=parsed.draft_max,
        temperatures=tuple(float(word) for word in parsed.temperature.split(",")),
        lengths=tuple(int(word) or None for word in parsed.prompt_tokens.split(",")),
        prompts_per_category=parsed.each,
        tokens=parsed.tokens,
        slots=parsed.slots,
        threads=parsed.threads,
        seed=parsed.seed,
        out=parsed.out,
    )


def encode_benchmark_prompts(options: Options) -> list[EncodedPrompt]:
    """Return the prompts that every drafter, rule, temperature and k gets alike."""
    selected = select_prompts(read_prompts(BUILTIN_PROMPTS), None, options.prompts_per_category)
    return encode_prompts(demo_folder(), selected, options.lengths, options.tokens)


def make_requests(
    prompts: Sequence[EncodedPrompt], options: Options, temperature: float, tag: str
) -> list[Request]:
    """Return one request a prompt; its seed depends on nothing but prompt and number."""
    return [
        Request(
            f"{tag}.{number}",
            prompt.ids,
            SamplingParams(
                temperature=temperature,
                max_tokens=options.tokens,
                seed=derived_seed(options.seed, prompt.prompt.name, number),
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def full_rounds(measured: Pass, k: int) -> list[RoundRecord]:
    """Return the rounds with room for k drafts, by request; a request's first holds none."""
    last = {}
    for timeline in measured.timelines:
        request = timeline.request
        assert request.params.max_tokens is not None
        last[request.id] = len(request.prompt_ids) + request.params.max_tokens
    chosen = [r for r in measured.records if r.round > 0 and r.position + k + 1 <= last[r.request]]
    return sorted(chosen, key=lambda record: record.request)


def tried_at(rounds: Sequence[RoundRecord]) -> list[int]:
    """Return how often a draft stood at each position behind none that was rejected."""
    longest = max(len(r.draft) for r in rounds)
    return [sum(at <= r.accepted and at < len(r.draft) for r in rounds) for at in range(longest)]


def row_of(later: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return tokens a round, accepted drafts over all, and each position's share, with errors."""
    rounds_by_request = [list(rounds) for _, rounds in groupby(later, key=lambda r: r.request)]
    counted = [(*per_position(rounds), tried_at(rounds)) for rounds in rounds_by_request]
    longest = max(len(drafted) for drafted, _, _ in counted)
    accepted = [sum(r.accepted for r in rounds) for rounds in rounds_by_request]

    def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float | None] | None:
        """Return a ratio of sums with its standard error."""
        if not sum(under):
            return None
        value, error = ratio_of_sums(over, under)
        return {"value": round(value, 5), "error": None if error is None else round(error, 5)}

    def at(position: int, part: int) -> list[float]:
        return [
            float(lists[part][position]) if position < len(lists[part]) else 0.0
            for lists in counted
        ]

    rounds = [float(len(request_rounds)) for request_rounds in rounds_by_request]
    return {
        "requests": len(rounds_by_request),
        "rounds": len(later),
        "drafts": sum(len(r.draft) for r in later),
        "length": ratio([n + a for n, a in zip(rounds, accepted, strict=True)], rounds),
        "rate": ratio(
            accepted,
            [
                float(sum(len(r.draft) for r in request_rounds))
                for request_rounds in rounds_by_request
            ],
        ),
        "per_position": [ratio(at(i, 1), at(i, 0)) for i in range(longest)],
        "conditional": [ratio(at(i, 1), at(i, 2)) for i in range(longest)],
    }


def temperatures(drafter: str, rule: str, options: Options) -> tuple[float, ...]:
    """Return the measured ones: the ends only where nothing learned drafts, 0 under one rule."""
    chosen = options.temperatures
    if drafter in ENDS_ONLY:
        chosen = tuple(dict.fromkeys((chosen[0], chosen[-1])))
    return chosen if rule == VERIFY_RULES[0] else tuple(t for t in chosen if t > 0)


def measure(
    drafter: str, rule: str, k: int, prompts: Sequence[EncodedPrompt], options: Options
) -> list[dict[str, Any]]:
    """Return one row a temperature, of one engine."""
    longest = max(len(question.ids) for question in prompts)
    methods = drafters(demo_folder())
    methods[SELF] = {"spec": "draft", "draft_model": demo_folder()}
    engine = Engine(
        engine_config(
            methods[drafter],
            model=demo_folder(),
            device="cpu",
            threads=options.threads,
            slots=options.slots,
            ctx=longest + options.tokens + k + 1,  # drafts never meet the end of the context
            draft_max=k,
            adaptive=False,
            verify=rule,
        )
    )
    rows = []
    for temperature in temperatures(drafter, rule, options):
        asked_now = make_requests(prompts, options, temperature, f"{temperature}")
        measured_pass = run_pass(engine, asked_now, concurrency=options.slots)
        key = {"drafter": drafter, "verify": rule, "temperature": temperature, "k": k}
        rows.append(
            {**key, **row_of(full_rounds(measured_pass, k)), "dtype": engine.plan.shape.dtype}
        )
    engine.close()
    return rows


def weights_digest() -> str:
    """Return the SHA-256 of the demo's weights: other weights have other acceptance."""
    digest = hashlib.sha256()
    for folder in (demo_folder(), demo_draft_folder()):
        digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()


def settings_of(options: Options, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
    """Return the settings that the rows of one file share."""
    return {
        "model": "demo",
        "weights_sha256": weights_digest(),
        "prompts": len(prompts),
        "prompt_tokens": list(options.lengths),
        "tokens": options.tokens,
        "seed": options.seed,
    }


def measured_before(options: Options, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the file that are of these settings."""
    if not options.out.exists():
        return []
    before = json.loads(options.out.read_text(encoding="utf-8"))
    return list(before["rows"]) if before["settings"] == settings else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the file lacks, print a line a row, and write the file after each engine."""
    options = parse_options(arguments)
    prompts = encode_benchmark_prompts(options)
    settings = settings_of(options, prompts)
    rows = measured_before(options, settings)
    done = {(row["drafter"], row["verify"], row["k"], row["temperature"]) for row in rows}
    for drafter, rule, k in product(
        options.drafters, options.rules, range(1, options.max_drafts + 1)
    ):
        combinations = {
            (drafter, rule, k, temperature) for temperature in temperatures(drafter, rule, options)
        }
        if not combinations - done:
            continue
        measured = measure(drafter, rule, k, prompts, options)
        if weights_digest() != settings["weights_sha256"]:
            print(
                "the demo's weights are others than at the start: run this again", file=sys.stderr
            )
            return 1
        for row in measured:
            length = row["length"]
            label = f"{drafter} {rule} T={row['temperature']:g} k={k}"
            print(f"{label}: {length['value']:.3f} ± {length['error'] or 0:.3f}", flush=True)
            rows.append(row)
        result = {
            "schema": SCHEMA,
            "acceptance": "natural",
            "settings": settings,
            "machine": describe_machine(),
            **describe_commit(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
