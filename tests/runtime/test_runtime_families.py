"""The dense families beyond Llama and Qwen3: golden against `transformers`, and speculation unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import SamplingParams
from spd.runtime.round.rows import SlotView
from tests.helpers import Damped, make_engine, random_prompts, run_all, run_one
from tests.recipes.tiny_dense import FAMILIES, LONG_ORIGINAL, write_dense

Shelf = Callable[..., Path]

damped = Damped(loud=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    made: dict[str, Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = f"{family}-{len(options)}-{options.get('layers', 4)}"
        if key not in made:
            made[key] = write_dense(tmp_path_factory.mktemp(key), family, **options)
        return made[key]

    return get


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_greedy_text_equal_transformers(dense: Shelf, family: str) -> None:
    """A prompt several windows long, and for one family so long that whole blocks are left behind."""
    transformers = pytest.importorskip("transformers")
    folder = dense(family, max_positions=2048)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = 700 if family == "mistral" else 90
    prompt = random_prompts(1, length, 256, seed=len(family))[0]
    ids, mask = torch.tensor([prompt]), torch.ones(1, length, dtype=torch.long)
    engine = make_engine(folder, ctx=LONG_ORIGINAL if family == "phi3_long" else 1024)
    runner, found = engine._device.runner, []
    view = SlotView(length, list(range(2, 18)))  # whole blocks of 512
    table = runner.page_row(view.pages, len(view.pages))[None]
    chunks = length // 64 * 64
    with torch.inference_mode():
        expected = reference(ids).logits[0]
        for start in range(0, length, 64):  # whole chunks of prefill, then a tile
            stop = min(start + 64, length)
            made = runner.forward_prompt(ids, start, stop, table, view.pages, chunked=start < chunks)
            found.append(runner.logits(made.hidden)[0])
        assert (torch.cat(found) - expected).abs().max() < 1e-4
        whole = reference.generate(
            ids, attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0
        )
    run = run_all(engine, [prompt], [SamplingParams(max_tokens=64)])[0]
    assert run.tokens == whole[0, length:].tolist()


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_interrupted_texts_are_the_same_under_windows(dense: Shelf, method: str) -> None:
    """Too few pages for all: who waits is replayed, window and all."""
    target = dense("gemma3", residual_gain=damped, seed=3, max_positions=1024)
    prompts = [random_prompts(1, 490 + n, 256, seed=n)[0] for n in range(4)]
    params = [SamplingParams(max_tokens=60, temperature=0.7, seed=i, ignore_eos=True) for i in range(4)]
    alone = [run_one(target, p, q, ctx=1024) for p, q in zip(prompts, params, strict=True)]
    wishes: dict[str, Any] = {"spec": method, "draft_max": 3, "slots": 4, "lag": 1, "ctx": 1024}
    wishes["cache_pages"] = 40
    if method == "draft":
        wishes["draft_model"] = dense("gemma3", residual_gain=damped, seed=3, max_positions=1024, layers=2)
    runs = run_all(make_engine(target, **wishes), prompts, params)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert sum(run.metrics.preemptions for run in runs) > 0
