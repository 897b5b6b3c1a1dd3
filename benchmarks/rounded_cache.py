"""What a cache in eight bits does to the likelihood of a text, beside a cache in the run's dtype.

    python -m benchmarks.rounded_cache MODEL... [--context 2048] [--tokens 8192] [--out FILE]

MODEL is a folder, a GGUF file, "demo" or "demo-hybrid". The text is Python of the standard library,
cut into prompts of `context` tokens, each written from its beginning; every token but a prompt's
first is scored. Both caches read the same prompts by the same kernels. Printed are perplexities,
their ratio with its standard error, taken of pairs of tokens, and the share of tokens whose
likeliest successor is another one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import describe_commit, describe_machine
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.folder import ModelFolder
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

SCHEMA = "spd.benchmarks.rounded_cache/1"
MODULES = ("argparse", "textwrap", "heapq", "csv", "bisect", "shlex", "string", "calendar")
"""Modules of the standard library whose sources are the text."""


class Scores(NamedTuple):
    """Log-probabilities of the tokens of all prompts, and the likeliest token in place of each."""

    logprobs: list[float]
    likeliest: list[int]


def cut_text(folder: ModelFolder, context: int, tokens: int) -> list[tuple[int, ...]]:
    """Return prompts of `context` tokens, as many as `tokens` hold."""
    tokenizer = folder.tokenizer
    assert tokenizer is not None
    text = "\n".join(inspect.getsource(import_module(name)) for name in MODULES)
    ids = tokenizer.encode(text)
    borders = range(0, min(tokens, len(ids)) + 1, context)
    return [tuple(ids[first:end]) for first, end in pairwise(borders)]


def score(
    folder: ModelFolder, prompts: list[tuple[int, ...]], context: int, **options: Any
) -> Scores:
    """Return the scores of prompts by an engine with these options."""
    config = EngineConfig(model=folder, spec="off", slots=1, ctx=context + 1, **options)
    engine = Engine(config)
    one = SamplingParams(max_tokens=1)
    requests = [
        Request(str(number), prompt, one, prompt_logprobs=1)
        for number, prompt in enumerate(prompts)
    ]
    scores = Scores([], [])
    for event in engine.stream(requests):
        for entry in event.prompt_logprobs:
            scores.logprobs.append(entry.logprob)
            scores.likeliest.append(max(entry.top, key=lambda pair: pair[1])[0])
    engine.close()
    return scores


def compare(reference: Scores, rounded: Scores) -> dict[str, Any]:
    """Return the perplexities by both caches, and how they differ."""
    count = len(reference.logprobs)
    losses = [
        before - after for before, after in zip(reference.logprobs, rounded.logprobs, strict=True)
    ]
    changed = [
        before != after
        for before, after in zip(reference.likeliest, rounded.likeliest, strict=True)
    ]
    return {
        "tokens": count,
        "perplexity": math.exp(-statistics.fmean(reference.logprobs)),
        "perplexity_int8": math.exp(-statistics.fmean(rounded.logprobs)),
        "ratio": math.exp(statistics.fmean(losses)),
        "ratio_error": statistics.stdev(losses) / math.sqrt(count),
        "likeliest_changed": sum(changed) / count,
    }


def measure(model: str, context: int, tokens: int, dtype: str) -> dict[str, Any]:
    """Return a model's comparison."""
    place = demo_folder(model) if model in DEMOS else Path(model)
    folder = ModelFolder(place)
    prompts = cut_text(folder, context, tokens)
    reference, rounded = (
        score(folder, prompts, context, kv=kv, dtype=dtype) for kv in ("auto", "int8")
    )
    return {"model": Path(model).name, "context": context, "dtype": dtype} | compare(
        reference, rounded
    )


def main() -> None:
    """Print a line for each model, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for model in arguments.models:
        result = measure(model, arguments.context, arguments.tokens, arguments.dtype)
        results.append(result)
        print(
            f"{result['model']}: {result['tokens']} tokens at {result['context']}, perplexity "
            f"{result['perplexity']:.4f}, int8 {result['perplexity_int8']:.4f}, ratio "
            f"{result['ratio']:.5f} ± {result['ratio_error']:.5f}, likeliest token changed "
            f"{result['likeliest_changed']:.2%}",
            flush=True,
        )
    if arguments.out is not None:
        report = {
            "schema": SCHEMA,
            **describe_commit(),
            "machine": describe_machine(),
            "results": results,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
