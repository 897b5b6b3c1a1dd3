"""Golden: every variant and family against `transformers` in float32, and as they are published."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.kernels.linear.few_bits import GroupedWeight
from spd.runtime import SamplingParams
from spd.runtime.models.expert_steps import SeparateSum
from spd.runtime.models.moe import MoeMlp
from tests import helpers
from tests.helpers import (
    assert_matches_transformers,
    make_engine,
    random_prompts,
    read_model_config,
    run_all,
    run_one,
)
from tests.recipes.tiny import LLAMA, VARIANTS, write_json
from tests.recipes.tiny_dense import FAMILIES, LONG_ORIGINAL, write_dense, write_mxfp4
from tests.runtime.test_runtime_wrappers import WRAPPED

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untried")


def write_loadable_copy(folder: Path, parent: Path) -> Path:
    """Write a copy that `transformers` can load: MiMo as Qwen2, Step-3.5 and Muse-Glimmer as image
    models.
    """
    loadable = shutil.copytree(folder, parent / "known")
    config = json.loads((loadable / "config.json").read_text())
    wrapper = WRAPPER_CLASSES.get(config["model_type"], "Qwen2ForCausalLM")
    if wrapper in WRAPPED:
        vision = WRAPPED[wrapper][0]["vision_config"]
        config = {"text_config": config, "vision_config": vision, "tie_word_embeddings": False}
    if wrapper.startswith("Muse"):
        config |= {"out_hidden_size": 64, "projector_hidden_size": 16}

        def move_into_language_model(tensors: dict[str, torch.Tensor]) -> None:
            for name in [*tensors]:
                tensors[re.sub(r"^model\.", "model.language_model.", name)] = tensors.pop(name)

        helpers.edit_weights(loadable, move_into_language_model)
    names = {"architectures": [wrapper], "model_type": WRAPPERS.get(wrapper, ["qwen2"])[0]}
    write_json(loadable / "config.json", {**config, **names})
    return loadable


WRAPPER_CLASSES = {
    "step3p5": "Step3p7ForConditionalGeneration",
    "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
}
VISION_CLASSES = ("step3", "muse_glimmer")
NO_TEXT_CLASS = ("mimo", *VISION_CLASSES)
"""Families without a text class in the library.

VISION_CLASSES are parts of classes that read images.
"""
DEFAULT_VARIANTS = (
    "llama2",
    "llama3",
    "biases",
    "yarn",
    "tied",
    "qwen3",
    "gqa8",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_moe",
    "mimo",
    "ernie4_5",
    "ernie4_5_moe",
)
"""Variants of the default lane: the others are of the same classes, with other sizes."""


def variants_and_families(*without: str) -> list[Any]:
    """Return all variants and families as parameters; some variants are slow."""
    names = sorted({*VARIANTS, *FAMILIES} - {*without})
    slow = VARIANTS.keys() - {*DEFAULT_VARIANTS}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", variants_and_families())
def test_logits_and_text_equal_transformers(
    tiny: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """The prompt is several windows long, and for one family so long that blocks of keys are
    skipped.
    """
    is_variant = name in VARIANTS
    folder = tiny(name) if is_variant else write_dense(tmp_path / "model", name, max_positions=2048)
    loadable = write_loadable_copy(folder, tmp_path) if name in NO_TEXT_CLASS else folder
    auto_class = (
        transformers.AutoModelForImageTextToText
        if name in VISION_CLASSES
        else transformers.AutoModelForCausalLM
    )
    reference = auto_class.from_pretrained(loadable, dtype=torch.float32).eval()
    engine = make_engine(
        folder, ctx=LONG_ORIGINAL if name == "phi3_long" else 256 if is_variant else 1024
    )
    prompt = random_prompts(1, 700 if name == "mistral" else 90, 256, seed=len(name))[0]
    run = assert_matches_transformers(reference, engine, prompt, count=24)
    assert max(run.tokens) < engine.usable_vocab
    if is_variant:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert run.text == tokenizer.decode(run.tokens, skip_special_tokens=True)


@pytest.mark.covers(count=26)
@pytest.mark.parametrize("variant", variants_and_families(*NO_TEXT_CLASS))
def test_checkpoints_saved_by_transformers_are_read(
    tiny: Callable[..., Path], tmp_path: Path, variant: str
) -> None:
    """Every class as the installed version writes it is the same model, tensor by tensor."""
    folder = tiny(variant) if variant in VARIANTS else write_dense(tmp_path / "published", variant)
    saved = tmp_path / "saved"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference.save_pretrained(saved, max_shard_size="100KB")
    assert read_model_config(saved) == read_model_config(folder)
    with Checkpoint.open(saved) as saved_checkpoint, Checkpoint.open(folder) as checkpoint:
        assert saved_checkpoint.tensors.keys() == checkpoint.tensors.keys()
        assert all(
            torch.equal(saved_checkpoint.read(name), checkpoint.read(name))
            for name in checkpoint.tensors
        )


def test_every_supported_class_is_compared() -> None:
    """Hybrids are compared in `test_runtime_hybrid`; `transformers` does not know MiMo."""
    saved = {options.get("architecture", LLAMA) for options in VARIANTS.values()} | set(WRAPPED)
    saved |= {name for _, config, _ in FAMILIES.values() for name in config["architectures"]}
    ours = {
        name for name in SUPPORTED_ARCHITECTURES if not name.startswith(("Qwen3_5", "Qwen3Next"))
    }
    assert saved == ours and len(SUPPORTED_ARCHITECTURES) == len(ours) + 5
    assert not hasattr(transformers, "MiMoForCausalLM")


def test_an_end_token_ends_the_text_as_in_transformers(tiny: Callable[..., Path]) -> None:
    """With its fifth greedy token declared as the end, both stop there, end included."""
    folder = tiny("qwen3")
    prompt = random_prompts(1, 20, 256)[0]
    free = run_one(folder, prompt, SamplingParams(max_tokens=24))
    end = next(t for t in free.tokens[4:] if free.tokens.index(t) >= 4)
    stopping = tiny("qwen3", eos=(end,))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        stopping, dtype=torch.float32
    ).eval()
    expected = assert_matches_transformers(
        reference, make_engine(stopping), prompt, 24, may_end_early=True
    ).tokens
    for options in ({"spec": "ngram"}, {"spec": "draft", "draft_model": stopping}):
        run = run_one(stopping, prompt, SamplingParams(max_tokens=24), draft_max=4, **options)
        assert run.tokens == expected and run.finish_reason == "stop" and run.tokens[-1] == end


def dequantize_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Replace experts by `transformers`' dequantized MXFP4."""
    convert = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    for name in [name for name in tensors if name.endswith("_blocks")]:
        tensor_name = name.removesuffix("_blocks")
        blocks = tensors.pop(name)
        scales = tensors.pop(name[:-6] + "scales")
        tensors[tensor_name] = convert(blocks, scales, dtype=torch.float32).contiguous()


def test_gpt_oss_stays_packed_and_equals_transformers(tmp_path: Path) -> None:
    """Experts in MXFP4 stay packed, and the text is `transformers`' with dequantized experts."""
    folder = write_mxfp4(tmp_path / "published", max_positions=2048)
    wide = tmp_path / "wide"
    shutil.copytree(folder, wide)
    helpers.edit_weights(wide, dequantize_experts)
    helpers.edit_config(wide, lambda config: config.pop("quantization_config"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    prompt = random_prompts(1, 70, 256, seed=4)[0]
    engine = make_engine(folder)
    mlp = engine.round_queue.runner.model.layers[0].mlp
    assert isinstance(mlp, MoeMlp) and isinstance(mlp.experts, SeparateSum)
    assert isinstance(mlp.experts.weights.gate_up, GroupedWeight)
    assert engine.plan.shape.form.main_kind == "e2m1"
    run = assert_matches_transformers(reference, engine, prompt, 24)
    engine = make_engine(folder, spec="draft", draft_model=folder, draft_max=3)
    (drafted,) = run_all(engine, [prompt], [SamplingParams(max_tokens=24, ignore_eos=True)])
    assert drafted.tokens == run.tokens and drafted.metrics.draft_n_accepted > 8


def test_interrupted_texts_are_the_same_under_windows(tmp_path: Path) -> None:
    """With too few pages for all, a request that waits is prefilled again, windows included."""
    shape: dict[str, Any] = {
        "residual_gain": helpers.DampedLayers(full_layers=2),
        "seed": 3,
        "max_positions": 1024,
    }
    target = write_dense(tmp_path / "target", "gemma3", **shape)
    prompts = [random_prompts(1, 490 + n, 256, seed=n)[0] for n in range(4)]
    params = [
        SamplingParams(max_tokens=60, temperature=0.7, seed=i, ignore_eos=True) for i in range(4)
    ]
    alone = run_all(make_engine(target, kernels="auto", ctx=1024), prompts, params)
    draft = {"draft_model": write_dense(tmp_path / "draft", "gemma3", layers=2, **shape)}
    for spec, model in (("ngram", {}), ("draft", draft)):
        options = {
            "spec": spec,
            "draft_max": 3,
            "slots": 4,
            "lag": 1,
            "ctx": 1024,
            "cache_pages": 40,
            **model,
        }
        runs = run_all(make_engine(target, kernels="auto", **options), prompts, params)
        assert [run.output for run in runs] == [run.output for run in alone]
        assert sum(run.metrics.preemptions for run in runs) > 0
