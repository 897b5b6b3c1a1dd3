"""What the GPU lane shares: engines on the device, requests of every kind, what runs must agree
on."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spd.formats.demo import demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, SamplingParams
from tests.helpers import Run, make_engine, run_all
from tests.recipes.tiny_hybrid import write_tiny_hybrid

TEXT = Path(__file__).read_text(encoding="utf-8")
Work = list[tuple[tuple[int, ...], SamplingParams]]


@contextmanager
def gpu_engine(model: Path, **options: Any) -> Iterator[Engine]:
    """Yield an engine on the device; free its memory afterwards."""
    engine = make_engine(
        model, **{"device": "cuda", "ctx": 1024, "prefix_sharing": False, **options}
    )
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def demo_prompts() -> list[tuple[int, ...]]:
    """Return beginnings of this file, of lengths around a tail, an attention block and a prompt
    chunk."""
    ids = tuple(Tokenizer.open(demo_folder()).encode(TEXT))
    assert len(ids) > 700
    return [
        ids[start : start + length]
        for start, length in ((0, 5), (9, 64), (3, 257), (40, 600), (0, 130))
    ]


def every_kind(prompts: Sequence[tuple[int, ...]], stop: int, max_tokens: int = 20) -> Work:
    """Return a request of each kind over the prompts in turn.

    `stop` is a token that texts likely reach.
    """
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"stop_token_ids": (stop,)},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.7, "min_tokens": 9, "stop_token_ids": (stop,), "presence_penalty": 0.2},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 0.9, "logit_bias": ((stop, 2.0), (7, -100.0))},
    ]
    return [
        (
            prompts[i % len(prompts)],
            SamplingParams(**{"max_tokens": max_tokens + i % 3, "seed": i, **kind}),
        )
        for i, kind in enumerate(kinds)
    ]


def run_work(engine: Engine, work: Work, lag: int | None = None) -> list[Run]:
    """Run every request to its end, with the host `lag` rounds behind."""
    if lag is not None:
        engine.plan = dataclasses.replace(engine.plan, lag=lag)
    return run_all(engine, [prompt for prompt, _ in work], [params for _, params in work])


def story(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return each request's speculation counts, independent of graphs, lag and the batch."""
    return [
        {
            "drafts": run.drafts,
            "sampled": [record.sampled for record in run.rounds],
            "drafted": run.metrics.draft_n,
            "accepted": run.metrics.draft_n_accepted,
            "per position": run.metrics.accepted_per_position,
        }
        for run in runs
    ]


def write_hybrid(folder: Path, **overrides: Any) -> Path:
    """Write a tiny model with recurrent layers."""
    sizes = {"max_position_embeddings": 1024, "dtype": "bfloat16", **overrides}
    return write_tiny_hybrid(folder, agreeing=True, **sizes)


def likely_stop(model: Path, prompt: tuple[int, ...], **options: Any) -> int:
    """Return a token in the middle of the greedy text after a prompt."""
    with gpu_engine(model, **options) as engine:
        return run_work(engine, [(prompt, SamplingParams(max_tokens=12, ignore_eos=True))])[
            0
        ].tokens[8]


def method_options(method: str, k: int, draft: Path | None = None) -> dict[str, Any]:
    """Return engine options of a method with k drafts.

    The demo's own draft model unless another is given.
    """
    models = {"draft": draft or demo_draft_folder(), "eagle3": demo_eagle3_folder()}
    options = {
        "spec": method,
        "draft_model": models.get(method),
        "draft_max": None if method == "off" else k,
    }
    options["ngram_min"] = 1 if "ngram" in method else None
    return {name: value for name, value in options.items() if value is not None}
