"""Whether `spd explain` foresees a k that it has not seen: each in turn is left out of its fit.

    python -m benchmarks.explain_check [-m demo] [-m FOLDER] [--draft-max 0,1,2,3,4,6,8] [--repetitions 5]

All k run interleaved, one request at a time. What is predicted is held against the tokens a second
of the rounds that really ran at that k, by the same clock; and the best k by prediction against the
measured best.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drafters import EngineOptions, drafters, engine_config, model_folder
from benchmarks.environment import ROOT, describe_commit, describe_machine
from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from spd.runtime.lab.explain import Trace, explain_traces
from spd.runtime.lab.load import run_pass
from spd.runtime.lab.prompt_set import BUILTIN_PROMPTS, encode_prompts, read_prompts, select_prompts

SCHEMA = "spd.benchmarks.explain_check/1"
WITHIN = 0.10
SHARE = 0.90
BEST_WITHIN = 0.03
"""A prediction is right within so much, so many must be; the chosen k may be so much slower than the best."""

Records = Mapping[int, Sequence[RoundRecord]]
"""Rounds by the k that they ran at."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Hold explain's predictions against what was measured."
    )
    parser.add_argument("-m", "--model", action="append", help="demo, or a folder; again for more")
    parser.add_argument("--spec", help="comma list of drafters (all that a model has)")
    parser.add_argument("--draft-max", default="0,1,2,3,4,6,8")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--each", type=int, default=1, help="prompts of each category")
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "explain_check.json"
    )
    options = parser.parse_args(arguments)
    if sum(int(word) > 0 for word in options.draft_max.split(",")) < 2:
        parser.error(
            f"--draft-max {options.draft_max}: a k can only be left out where another is left"
        )
    return options


def run_rounds(
    model: Path, drafting_options: EngineOptions, options: argparse.Namespace
) -> Records:
    """Return the rounds of every k, each k once a repetition; the first repetition warms up."""
    prompts = select_prompts(read_prompts(BUILTIN_PROMPTS), None, options.each)
    encoded = encode_prompts(model, prompts, [None], options.tokens)
    longest = max(len(prompt.ids) for prompt in encoded)
    base: EngineOptions = {
        "model": model,
        "device": "cpu",
        "threads": options.threads,
        "ctx": longest + options.tokens,
    }
    engines = {}
    for word in options.draft_max.split(","):
        k = int(word)
        drafting: EngineOptions = {"spec": "off"}
        if k:
            drafting = {**drafting_options, "draft_max": k, "adaptive": False}
        engines[k] = Engine(engine_config(base, **drafting))
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    records_by_k: dict[int, list[RoundRecord]] = {k: [] for k in engines}
    for repetition in range(options.repetitions + 1):
        for k, engine in engines.items():
            requests = [
                Request(f"{k}.{repetition}.{number}", prompt.ids, params)
                for number, prompt in enumerate(encoded)
            ]
            records = run_pass(engine, requests).records
            if repetition:
                records_by_k[k] += [record for record in records if record.round > 0]
    for engine in engines.values():
        engine.close()
    return records_by_k


def predictions(records: Records) -> list[dict[str, Any]]:
    """Return for each k above 0 the measured and predicted tokens a second.

    The prediction is from the rounds of all other k.
    """
    rows = []
    for k in records:
        if k:
            other_traces = [Trace(list(rounds)) for other, rounds in records.items() if other != k]
            predicted = explain_traces(other_traces).prospects[k].tokens_per_second
            measured = explain_traces([Trace(list(records[k]))]).tokens_per_second
            rows.append(
                {
                    "k": k,
                    "measured": measured,
                    "predicted": predicted,
                    "error": predicted / measured - 1,
                }
            )
    return rows


def judge(method: str, records: Records) -> dict[str, Any]:
    """Return a method's predictions, and how good the k is that explain would choose."""
    pairs = predictions(records)
    speeds = {
        k: explain_traces([Trace(list(rounds))]).tokens_per_second for k, rounds in records.items()
    }
    explanation = explain_traces([Trace(list(rounds)) for rounds in records.values()])
    chosen = max(records, key=lambda k: explanation.prospects[k].tokens_per_second)
    best = max(speeds, key=lambda k: speeds[k])
    return {
        "method": method,
        "pairs": pairs,
        "chosen_k": chosen,
        "best_k": best,
        "chosen_over_best": speeds[chosen] / speeds[best],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the file; status 1 where explain is wrong too often."""
    options = parse_options(arguments)
    cases: list[dict[str, Any]] = []
    for name in options.model or ["demo"]:
        folder = model_folder(name)
        methods = drafters(folder)
        for method in options.spec.split(",") if options.spec else methods:
            cases.append(
                {
                    "model": folder.name,
                    **judge(method, run_rounds(folder, methods[method], options)),
                }
            )
            for pair in cases[-1]["pairs"]:
                print(
                    f"{folder.name} {method} k={pair['k']}: {pair['measured']:.1f} tokens/s, "
                    f"predicted {pair['predicted']:.1f} ({pair['error']:+.1%})",
                    flush=True,
                )
    errors = [abs(pair["error"]) for case in cases for pair in case["pairs"]]
    right = sum(error <= WITHIN for error in errors) / len(errors)
    worst = min(case["chosen_over_best"] for case in cases)
    print(
        f"{right:.0%} of {len(errors)} within {WITHIN:.0%}; the chosen k gives {worst:.3f} of the best"
    )
    result = {
        "schema": SCHEMA,
        "settings": {
            "tokens": options.tokens,
            "repetitions": options.repetitions,
            "temperature": 0.0,
        },
        "machine": describe_machine(),
        **describe_commit(),
        "cases": cases,
        "within": WITHIN,
        "share_within": right,
        "chosen_over_best": worst,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if right >= SHARE and worst >= 1 - BEST_WITHIN else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
