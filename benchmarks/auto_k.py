"""Adaptive k against plain decoding and against the best fixed k, at every number of requests together.

    python -m benchmarks.auto_k [-m demo] [-m FOLDER] [--spec mtp] [--concurrency 1,4,16] [--repetitions 30]

Every way of decoding runs once a repetition, interleaved by `spd.runtime.lab.sweep`; ratios are of
the same repetition, and the interval holds their median with 95 % (order statistics). The best
fixed k is chosen by the same measurements, which favours it. A pass has several times as many
requests as are together, so that its end, where fewer and fewer are left, counts for little.
`--keep` leaves what OUT says of other models.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.drafters import EngineOptions, drafters, model_folder
from benchmarks.environment import ROOT, describe_commit, describe_machine
from benchmarks.summaries import median_interval, paired_ratio
from spd.runtime import EngineConfig
from spd.runtime.lab.load import Load
from spd.runtime.lab.prompt_set import BUILTIN_PROMPTS, encode_prompts, read_prompts, select_prompts
from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Settings, Sweep

SCHEMA = "spd.benchmarks.auto_k/2"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Adaptive k against plain decoding and the best fixed k."
    )
    parser.add_argument("-m", "--model", action="append", help="demo, or a folder; again for more")
    parser.add_argument(
        "--spec", help="the drafter (the first of mtp, draft, ngram that a model has)"
    )
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument(
        "--draft-max", default="1,2,3,4", help="the fixed k, and the most of adaptive k"
    )
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--each", type=int, default=1, help="prompts of each category")
    parser.add_argument(
        "--waves", type=int, default=4, help="requests of a pass, times those together"
    )
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--keep", action="store_true", help="keep what OUT says of other models")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "auto_k.json")
    return parser.parse_args(arguments)


def sweep_of(model: Path, drafting_options: EngineOptions, options: argparse.Namespace) -> Sweep:
    """Return a sweep of plain decoding, every fixed k, and adaptive k, on one mix of prompts."""
    prompts = [
        replace(prompt, category="mixed")
        for prompt in select_prompts(read_prompts(BUILTIN_PROMPTS), None, options.each)
    ]
    encoded = encode_prompts(model, prompts, [None], options.tokens)
    fixed = [int(word) for word in options.draft_max.split(",")]
    plain = EngineConfig(
        model=model,
        device="cpu",
        threads=options.threads,
        ctx=max(len(prompt.ids) for prompt in encoded) + options.tokens,
        prefix_sharing=False,
        spec="off",
    )
    adapting: EngineOptions = {**drafting_options, "draft_max": max(fixed), "adaptive": True}
    speculating = replace(plain, **adapting)
    configs = [
        plain,
        *(replace(speculating, draft_max=k, adaptive=False) for k in fixed),
        speculating,
    ]
    settings = Settings(
        temperatures=(0.0,),
        loads=tuple(Load(int(word)) for word in options.concurrency.split(",")),
        max_tokens=options.tokens,
        repetitions=options.repetitions,
        ignore_eos=True,
        waves=options.waves,
    )
    return Sweep(configs, [encoded] * len(configs), settings)


def case_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the best fixed k of one load, and adaptive k against it and against plain."""

    def values(row: Mapping[str, Any]) -> list[float]:
        return list(row["tokens_per_second"]["values"])

    plain = next(row for row in rows if row["method"] == "plain")
    auto = next(row for row in rows if row["adaptive"])
    fixed = [row for row in rows if row["method"] != "plain" and not row["adaptive"]]
    best = max(fixed, key=lambda row: median(values(row)))
    drafted = auto["drafted_per_position"]
    return {
        "concurrency": plain["concurrency"],
        "plain_tokens_per_second": median(values(plain)),
        "fixed_over_plain": {
            str(row["draft_max"]): _ratio(values(row), values(plain)) for row in fixed
        },
        "best_k": best["draft_max"],
        "auto_over_plain": _ratio(values(auto), values(plain)),
        "auto_over_best": _ratio(values(auto), values(best)),
        "rounds_with_drafts": drafted[0] / auto["rounds"] if drafted else 0.0,
    }


def _ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    pairs = paired_ratio(over, under)
    interval = median_interval(pairs.values)
    return {"median": pairs.median, "interval": interval, "pairs": len(pairs.values)}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a case of one model for each number of requests together."""
    folder = model_folder(name)
    methods = drafters(folder)
    method = options.spec or next(iter(methods))
    sweep = sweep_of(folder, methods[method], options)
    sweep.report = lambda phase, done, total: print(
        f"\r{name}: {phase}, {done} of {total}   ", end="", file=sys.stderr
    )
    sweep.run()
    rows = make_rows(sweep.samples, sweep.plans)
    cases = [
        case_of([row for row in rows if row["concurrency"] == load.concurrency])
        for load in sweep.settings.loads
    ]
    return {
        "model": folder.name,
        "method": method,
        "settings": {
            "tokens": options.tokens,
            "repetitions": options.repetitions,
            "waves": options.waves,
            "temperature": 0.0,
        },
        "machine": describe_machine(),
        **describe_commit(),
        "cases": cases,
        "differences": len(sweep.differences),
    }


def earlier_models(path: Path, measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of a result file for models and methods that were not measured now."""
    names = {(model["model"], model["method"]) for model in measured}
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    models = before["models"] if before.get("schema") == SCHEMA else []
    return [model for model in models if (model["model"], model["method"]) not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a case, and write the file; status 1 if a text changed."""
    options = parse_options(arguments)
    models = []
    for name in options.model or ["demo"]:
        models.append(measure(name, options))
        for case in models[-1]["cases"]:
            words = ", ".join(
                f"{case[key]['median']:.3f} {case[key]['interval']} of {against}"
                for key, against in (
                    ("auto_over_plain", "plain"),
                    ("auto_over_best", f"k = {case['best_k']}"),
                )
            )
            print(f"\n{models[-1]['model']}, {case['concurrency']} together: adaptive k is {words}")
    result = {
        "schema": SCHEMA,
        "acceptance": "natural",
        "models": [*(earlier_models(options.out, models) if options.keep else []), *models],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(model["differences"] for model in models) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
