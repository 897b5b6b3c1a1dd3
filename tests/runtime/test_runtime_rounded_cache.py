"""A cache in eight bits: its bytes, the plan's advice, shared prefixes, and what stays as it is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.runtime import EngineConfig, SamplingParams, make_plan
from spd.runtime.engine.page_table import ROOT, TextHashes
from spd.runtime.models import attention_steps
from spd.runtime.models.attention_steps import balance_scales
from spd.runtime.plan.memory import measure_memory
from spd.runtime.plan.memory_fit import memory_remedies
from spd.runtime.round.spans import ProgramRun
from tests.helpers import (
    Patch,
    Tiny,
    collect_outputs,
    compute_logits,
    get_local_queue,
    make_fast_engine,
    random_prompts,
    run_all,
)
from tests.pairs import Pairs

PROMPTS = random_prompts(3, 150, 256)
PARAMS = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 0.9, 1.2)]


@pytest.mark.parametrize("name", ["one", "gemma4/assistant", "deepseek_v3/draft", "hybrid/draft"])
def test_the_plan_counts_the_caches_to_the_byte(name: str, pairs: Pairs) -> None:
    """Entries have eight bits and a scale, a drafter's too; states and rings stay as they are."""
    engine = pairs.get(name).make_engine(2, kv="int8", slots=2)
    queue = get_local_queue(engine)
    caches = {id(runner.cache): runner.cache for runner in queue.snapshots.runners}
    pools: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for cache in caches.values():
        for layer, paged in zip(cache.layers, cache.paged, strict=True):
            (pools if paged else states).extend(layer.pools)
    need = measure_memory(engine.plan.shape)
    drafts = name in ("one", "deepseek_v3/draft", "hybrid/draft")
    assert len(caches) == 1 + drafts
    head_states = 0
    if name == "one":  # an MTP head also keeps a state a page, and rings of them
        head_states = need.draft_cache - sum(
            pool.nbytes for pool in list(caches.values())[1].layers[0].pools
        )
        assert 0 < head_states < need.draft_cache
    assert sum(pool.nbytes for pool in pools) == need.cache + need.draft_cache - head_states
    assert {pool.dtype for pool in pools} == {torch.int8, torch.float16}
    assert not any(state.dtype in (torch.int8, torch.float16) for state in states)
    assert bool(states) == name.startswith("hybrid")


def test_the_plan_proposes_it_and_never_chooses_it(tiny: Tiny) -> None:
    plan = make_plan(EngineConfig(model=tiny("qwen3"), dtype="bfloat16", device="cpu"))
    assert plan.as_dict()["kv"] == "bfloat16"
    shape = replace(plan.shape, slots=64)
    rounded = replace(shape, rounds_cache=True)
    saved = measure_memory(shape).total - measure_memory(rounded).total
    advice = [
        line
        for line in memory_remedies(shape, measure_memory(rounded).total)
        if "--kv int8" in line
    ]
    assert len(advice) == 1 and "not enough" not in advice[0]
    assert saved == measure_memory(shape).cache - measure_memory(rounded).cache > 0
    assert not any("--kv" in line for line in memory_remedies(rounded, 1))
    assert any("--kv" in line for line in memory_remedies(replace(shape, kernels="triton"), 1))


def test_pages_of_two_forms_never_have_one_hash() -> None:
    tokens = list(range(20))
    runs = [ProgramRun(0, 20, "tile")]
    ends = (0, 3, 4, 20)
    hashes = [
        TextHashes(tokens, runs, 4, root=ROOT + kv.encode()).prefix_hash(end)
        for kv in ("int8", "bfloat16", "float32")
        for end in ends
    ]
    assert len(set(hashes)) == len(hashes)


def test_engines_of_two_forms_hash_the_same_text_differently(tiny: Tiny) -> None:
    hashes: list[set[bytes]] = []
    for kv in ("auto", "int8"):
        engine = make_fast_engine(tiny("qwen3"), kv=kv, dtype="float32")
        run_all(engine, PROMPTS[:1], PARAMS[:1])
        hashes.append({*engine.scheduler.pages._page_of})
    assert all(hashes) and not hashes[0] & hashes[1]


@pytest.mark.parametrize("variant", ["qwen3", "deepseek_v3"])
def test_a_shared_prefix_gives_the_text_of_an_own_one(variant: str, tiny: Tiny) -> None:
    """And with few pages, where requests are preempted and replayed."""
    folder: Path = tiny(variant)
    prompts = [PROMPTS[0], (*PROMPTS[0][:130], 7, 8, 9), PROMPTS[0]]
    options = {"kv": "int8", "dtype": "float32"}
    alone = [
        run_all(make_fast_engine(folder, **options), [prompt], [params])[0]
        for prompt, params in zip(prompts, PARAMS, strict=True)
    ]
    engine = make_fast_engine(folder, slots=3, cache_pages=6, **options)
    for _ in range(2):
        assert collect_outputs(run_all(engine, prompts, PARAMS)) == collect_outputs(alone)
    cached = [run.metrics.cached_tokens for run in run_all(engine, prompts, PARAMS)]
    assert max(cached) >= 64


def test_balanced_scales_have_the_same_products() -> None:
    """To the bit, also where a scale is 0; what rotates together has one factor, a power of 2."""
    key = torch.tensor([40.0, 0.3, 0.0, 1.0, -2.0, 0.01, 0.0, 1.0])
    query = torch.tensor([1.5, 3.0, 2.0, 1.0, 0.1, 0.02, 1.0, -0.9])
    for dtype in (torch.float32, torch.bfloat16):
        balanced_query, balanced_key = balance_scales(query.to(dtype), key.to(dtype))
        assert torch.equal(balanced_query * balanced_key, query.to(dtype) * key.to(dtype))
        factors = (balanced_query / query.to(dtype)).float()
        assert torch.equal(factors[:4], factors[4:])
        assert factors[:4].tolist() == [4.0, 0.25, 2.0**-5, 1.0]


def test_keys_of_uneven_size_lose_less(tiny: Tiny, tmp_path: Path, monkeypatch: Patch) -> None:
    """One rotated pair of keys is large and its queries are small, as in published models."""
    folder = tmp_path / "uneven"
    shutil.copytree(tiny("qwen3"), folder)
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor[:: len(tensor) // 2] *= 100.0 if "k_norm" in name else 1 / 100.0
    save_file(tensors, weights, {"format": "pt"})

    def loss(**options: str) -> float:
        logits = compute_logits(make_fast_engine(folder, **options), PROMPTS[0])
        return float((logits - reference).abs().mean())

    reference = compute_logits(make_fast_engine(folder), PROMPTS[0])
    balanced = loss(kv="int8")
    monkeypatch.setattr(attention_steps, "balance_scales", lambda query, key: (query, key))
    assert 0 < balanced < 0.5 * loss(kv="int8")
