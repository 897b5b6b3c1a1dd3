"""Families as they are published: experts in MXFP4, and windows over texts that are interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.kernels.linear.few_bits import GroupedWeight
from spd.runtime import SamplingParams
from tests import helpers
from tests.helpers import make_engine, random_prompts, run_all, speaks_as
from tests.recipes.tiny_dense import write_dense, write_mxfp4


def multiplied_out(tensors: dict[str, torch.Tensor]) -> None:
    """Experts become what `transformers` makes of MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [name for name in tensors if name.endswith("_blocks")]:
        whole, pair = name.removesuffix("_blocks"), (tensors.pop(name), tensors.pop(name[:-6] + "scales"))
        tensors[whole] = convert_moe_packed_tensors(*pair, dtype=torch.float32).contiguous()


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Experts in MXFP4 stay packed, and speak as `transformers` does with what it makes of them."""
    transformers = pytest.importorskip("transformers")
    folder, wide = write_mxfp4(tmp_path / "published", max_positions=2048), tmp_path / "wide"
    shutil.copytree(folder, wide)
    helpers.edit_weights(wide, multiplied_out)
    helpers.edit_config(wide, lambda config: config.pop("quantization_config"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    prompt, engine = random_prompts(1, 70, 256, seed=4)[0], make_engine(folder)
    experts = engine._device.runner.model.layers[0].mlp.experts
    assert isinstance(experts.weights.gate_up, GroupedWeight) and engine.plan.shape.form.words == "e2m1"
    run = speaks_as(reference, engine, prompt, 24)
    engine = make_engine(folder, spec="draft", draft_model=folder, draft_max=3)
    (drafted,) = run_all(engine, [prompt], [SamplingParams(max_tokens=24, ignore_eos=True)])
    assert drafted.tokens == run.tokens and drafted.metrics.draft_n_accepted > 8


def test_missing_scales_of_mxfp4_are_named(tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.experts.down_proj_scales"
    said = helpers.refused_weights(write_mxfp4(tmp_path), lambda tensors: tensors.pop(gone))
    assert "layers.1.mlp.experts.0.down_proj.weight_scale" in said


def test_interrupted_texts_are_the_same_under_windows(tmp_path: Path) -> None:
    """Too few pages for all: a request that waits is replayed, window and all."""
    shape: dict[str, Any] = {"residual_gain": helpers.Damped(loud=2), "seed": 3, "max_positions": 1024}
    target = write_dense(tmp_path / "target", "gemma3", **shape)
    prompts = [random_prompts(1, 490 + n, 256, seed=n)[0] for n in range(4)]
    params = [SamplingParams(max_tokens=60, temperature=0.7, seed=i, ignore_eos=True) for i in range(4)]
    alone = run_all(make_engine(target, kernels="auto", ctx=1024), prompts, params)
    draft = {"draft_model": write_dense(tmp_path / "draft", "gemma3", layers=2, **shape)}
    for spec, model in (("ngram", {}), ("draft", draft)):
        wishes = {"spec": spec, "draft_max": 3, "slots": 4, "lag": 1, "ctx": 1024, "cache_pages": 40, **model}
        runs = run_all(make_engine(target, kernels="auto", **wishes), prompts, params)
        assert [run.output for run in runs] == [run.output for run in alone]
        assert sum(run.metrics.preemptions for run in runs) > 0
