"""What a cache in eight bits does to the likelihood of a text, beside a cache in the run's dtype.

    python -m benchmarks.rounded_cache MODEL... [--context 2048] [--tokens 8192] [--out FILE]
    python -m benchmarks.rounded_cache MODEL --spec eagle3 --draft-model FOLDER [--drafts 20000]

MODEL is a folder, a GGUF file, "demo" or "demo-hybrid". The text is Python of the standard library,
cut into prompts of `context` tokens, each written from its beginning; every token but a prompt's
first is scored. Both caches read the same prompts by the same kernels. Printed are perplexities,
their ratio with its standard error, taken of pairs of tokens, and the share of tokens whose
likeliest successor is another one.

With `--spec` it is the acceptance that is compared: of a fixed number of drafts in each round for the
same text, which is forced upon the target of both runs, with the standard error of the difference,
taken of pairs of prompts.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.environment import describe_commit, describe_machine
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.folder import ModelFolder
from spd.kernels.round.window import RoundWindow
from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.round import Round
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps

SCHEMA = "spd.benchmarks.rounded_cache/1"
MODULES = ("argparse", "textwrap", "heapq", "csv", "bisect", "shlex", "string", "calendar")
"""Modules of the standard library whose sources are the text."""
PROMPT = 64
"""Tokens of a text that are its prompt where the others are forced."""
DRAFTS = 3
"""Drafts in each round."""
SLOTS = 8


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


class ForcedText:
    """Replaces the samples of a round by the tokens of the texts that its slots began with."""

    def __init__(self, round_: Round, texts: Tensor) -> None:
        """texts: [N, L], which differ in their first PROMPT tokens."""
        self.state = round_.state
        self.sample = round_._sample_rows
        self.texts = texts

    def __call__(
        self,
        hidden: Tensor,
        window: RoundWindow,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
    ) -> tuple[Tensor, Tensor, None, None]:
        """Return the texts' tokens [S, R] behind a window's rows, all of them finite."""
        sampled = self.sample(hidden, window, views, needs, num_logprobs)[0]
        prompts = self.state.tokens[:, None, :PROMPT] == self.texts[None, :, :PROMPT]
        slot_texts = self.texts[prompts.all(-1).int().argmax(1)]
        following = (window.positions.view_as(sampled) + 1).clamp(max=self.texts.shape[1] - 1)
        forced = slot_texts.gather(1, following).to(sampled.dtype)
        return forced, torch.ones_like(forced, dtype=torch.bool), None, None


def count_accepted(
    folder: ModelFolder, texts: list[tuple[int, ...]], **options: Any
) -> list[tuple[int, int]]:
    """Return the drafts and the accepted ones for each text, its first PROMPT tokens a prompt."""
    context = len(texts[0])
    engine = Engine(
        EngineConfig(
            model=folder,
            slots=SLOTS,
            ctx=context,
            draft_max=DRAFTS,
            adaptive=False,
            graphs=False,
            prefix_sharing=False,
            **options,
        )
    )
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    forced = ForcedText(queue.round, torch.tensor(texts))
    queue.round._sample_rows = forced  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=context - PROMPT - DRAFTS - 1, ignore_eos=True)
    requests = [Request(str(i), text[:PROMPT], params) for i, text in enumerate(texts)]
    counts: dict[str, tuple[int, int]] = {}
    for event in engine.stream(requests):
        if event.finish_reason is not None:
            metrics = engine.metrics(event.request_id)
            counts[event.request_id] = metrics.draft_n, metrics.draft_n_accepted
    engine.close()
    return [counts[request.id] for request in requests]


def measure_acceptance(
    model: str, context: int, drafts: int, dtype: str, **options: Any
) -> dict[str, Any]:
    """Return the acceptance of a drafter's drafts by both caches, of at least so many drafts."""
    folder = ModelFolder(demo_folder(model) if model in DEMOS else Path(model))
    texts = cut_text(folder, context, context * math.ceil(2 * drafts / DRAFTS / context))
    counts = {}
    for kv in ("auto", "int8"):
        counts[kv] = count_accepted(folder, texts, kv=kv, dtype=dtype, **options)
    shares = {
        kv: sum(accepted for _, accepted in pairs) / sum(drafted for drafted, _ in pairs)
        for kv, pairs in counts.items()
    }
    differences = [
        accepted_int8 / drafted_int8 - accepted / drafted
        for (drafted, accepted), (drafted_int8, accepted_int8) in zip(
            counts["auto"], counts["int8"], strict=True
        )
    ]
    return {
        "drafts": min(sum(drafted for drafted, _ in pairs) for pairs in counts.values()),
        "acceptance": shares["auto"],
        "acceptance_int8": shares["int8"],
        "difference_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def main() -> None:
    """Print a line for each model, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--spec")
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--drafts", type=int, default=20000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for model in arguments.models:
        if arguments.spec is not None:
            result = measure_acceptance(
                model,
                arguments.context,
                arguments.drafts,
                arguments.dtype,
                spec=arguments.spec,
                draft_model=arguments.draft_model,
            )
            results.append({"model": Path(model).name, "spec": arguments.spec} | result)
            print(
                f"{Path(model).name}, {arguments.spec}: {result['drafts']} drafts, accepted "
                f"{result['acceptance']:.4f}, int8 {result['acceptance_int8']:.4f} ± "
                f"{result['difference_error']:.4f}",
                flush=True,
            )
            continue
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
