"""Families as they are published: experts in MXFP4, and windows over texts that are interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.errors import CheckpointError
from spd.kernels.linear.few_bits import GroupedWeight
from spd.runtime import SamplingParams
from tests.helpers import Damped, make_engine, quick_engine, random_prompts, run_all
from tests.recipes.tiny_dense import write_dense, write_mxfp4

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


def multiplied_out(folder: Path, elsewhere: Path) -> Path:
    """A copy whose experts are what `transformers` makes of MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        whole, pair = name.removesuffix("_blocks"), (tensors.pop(name), tensors.pop(name[:-6] + "scales"))
        tensors[whole] = convert_moe_packed_tensors(*pair, dtype=torch.float32).contiguous()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text(json.dumps(config))
    save_file(tensors, elsewhere / "model.safetensors", metadata={"format": "pt"})
    return elsewhere


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Experts in MXFP4 stay packed, and speak as `transformers` does with what it makes of them."""
    transformers = pytest.importorskip("transformers")
    folder = write_mxfp4(tmp_path / "published", max_positions=2048)
    wide = multiplied_out(folder, tmp_path / "wide")
    reference = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    prompt = random_prompts(1, 70, 256, seed=4)[0]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)]
    engine = make_engine(folder)
    layer = engine._device.runner.model.layers[0]
    assert isinstance(layer.mlp.experts.weights.gate_up, GroupedWeight)
    assert engine.plan.shape.form.words == "e2m1"
    (run,) = run_all(engine, [prompt], params)
    with torch.inference_mode():
        whole = reference(torch.tensor([[*prompt, *run.tokens]])).logits[0, len(prompt) - 1 : -1]
    scores = whole.log_softmax(-1)
    assert scores.argmax(-1).tolist() == run.tokens
    told = scores.gather(1, torch.tensor(run.tokens)[:, None])[:, 0]
    assert (told - torch.tensor(run.logprobs)).abs().max() < 1e-4
    drafted = run_all(make_engine(folder, spec="draft", draft_model=folder, draft_max=3), [prompt], params)
    assert drafted[0].tokens == run.tokens and drafted[0].metrics.draft_n_accepted > 8


def test_missing_scales_of_mxfp4_are_named(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.down_proj\.weight_scale"):
        make_engine(folder)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_interrupted_texts_are_the_same_under_windows(dense: Shelf, method: str) -> None:
    """Too few pages for all: a request that waits is replayed, window and all."""
    target = dense("gemma3", residual_gain=damped, seed=3, max_positions=1024)
    prompts = [random_prompts(1, 490 + n, 256, seed=n)[0] for n in range(4)]
    params = [SamplingParams(max_tokens=60, temperature=0.7, seed=i, ignore_eos=True) for i in range(4)]
    alone = run_all(quick_engine(target, ctx=1024), prompts, params)
    wishes: dict[str, Any] = {"spec": method, "draft_max": 3, "slots": 4, "lag": 1, "ctx": 1024}
    wishes["cache_pages"] = 40
    if method == "draft":
        wishes["draft_model"] = dense("gemma3", residual_gain=damped, seed=3, max_positions=1024, layers=2)
    runs = run_all(quick_engine(target, **wishes), prompts, params)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert sum(run.metrics.preemptions for run in runs) > 0
