"""Whole texts by weights of eight bits that Triton's kernels multiply as they are, in its interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.kernels.linear.skinny_linear import ScaledWeight
from spd.runtime import Engine, EngineConfig, SamplingParams, make_plan
from spd.runtime.layers.linear import SkinnyLinear
from tests.helpers import INTERPRETED, Damped, Run, few_programs, make_engine, run_all
from tests.recipes.fp8_twin import write_twin
from tests.recipes.tiny_mtp import write_tiny_mtp

pytest.importorskip("triton")

pytestmark = INTERPRETED

VOCAB = 48
DENSE: dict[str, Any] = {
    "hidden": 48,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 48,
    "vocab": VOCAB,
    "tokenizer": False,
    "seed": 5,
}
LATENT: dict[str, Any] = {**DENSE, "heads": 4, "kv_heads": 4, "layers": 2}
LARGE: dict[str, Any] = {**DENSE, "hidden": 272, "intermediate": 144}
"""Rows and columns of more than a block, the last one partial."""
PROMPT = [(5, 6, 7, 8, 5, 6, 7, 8, 5)]
PARAMS = [SamplingParams(max_tokens=3, temperature=t, seed=3) for t in (0.0, 0.8)]


REPEATING = [replace(each, logit_bias=((5, 9.0), (6, 9.0), (7, 9.0))) for each in PARAMS]
"""Texts in which a lookup finds something."""

damped = Damped(loud=1, soft=0.15)


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs idle programs too."""

    few_programs(monkeypatch)


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two targets and a draft model, and their FP8 twins; the latent one has an MTP head."""
    shelf = tmp_path_factory.mktemp("eight")
    head: dict[str, Any] = {"family": "deepseek", "variant": "deepseek_v3", "kind": "copy"}
    plain = {
        "dense": tiny("qwen3", layers=2, residual_gain=damped, **DENSE),
        "draft": tiny("qwen3", layers=1, residual_gain=damped, **DENSE),
        "latent": write_tiny_mtp(shelf / "latent", **head, **LATENT),
    }
    twins = {
        f"{name}-fp8": write_twin(folder, shelf / f"{name}-fp8", ue8m0=name == "latent")
        for name, folder in plain.items()
    }
    return {**plain, **twins}


def method_of(name: str, folders: dict[str, Path], weights: str) -> dict[str, Any]:
    draft = folders["draft-fp8" if weights == "fp8" else "draft"]
    return {
        "off": {"spec": "off"},
        "ngram": {"spec": "ngram", "ngram_min": 1, "draft_max": 2},
        "draft": {"spec": "draft", "draft_model": draft, "draft_max": 2},
        "mtp": {"spec": "mtp", "draft_max": 2},
    }[name]


def generate(
    folders: dict[str, Path], target: str, weights: str, method: str, kernels: str, *, repeats: bool = False
) -> list[Run]:
    folder = folders[f"{target}-fp8" if weights == "fp8" else target]
    wishes = {"quantize": "int8"} if weights == "int8" else {}
    wishes |= method_of(method, folders, weights)
    engine = make_engine(folder, kernels=kernels, ctx=128, slots=2, **wishes)
    if kernels == "triton":
        assert engine.plan.weights == weights, engine.plan.weights_reason
    return run_all(engine, PROMPT * 2, REPEATING if repeats else PARAMS)


SLOW = pytest.mark.slow
CASES = [
    ("dense", "draft", "int8"),
    pytest.param("latent", "mtp", "fp8", marks=SLOW),
    pytest.param("dense", "draft", "fp8", marks=SLOW),
    pytest.param("latent", "mtp", "int8", marks=SLOW),
    *(pytest.param(t, "ngram", w, marks=SLOW) for t in ("dense", "latent") for w in ("int8", "fp8")),
]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str, str, bool], list[Run]]:
    """Runs without speculation, by target, weights and whether they repeat themselves, each once."""
    found: dict[tuple[str, str, bool], list[Run]] = {}

    def get(*case: Any) -> list[Run]:
        target, weights, repeats = case
        if case not in found:
            found[case] = generate(folders, target, weights, "off", "triton", repeats=repeats)
        return found[case]

    return get


@pytest.mark.parametrize(("target", "method", "weights"), CASES)
def test_the_same_text_with_every_drafter(
    folders: dict[str, Path],
    plain: Callable[[str, str, bool], list[Run]],
    target: str,
    method: str,
    weights: str,
) -> None:
    """And the one that torch's products make of the same weights, widened: float32 in both."""
    repeats = method == "ngram"
    told = generate(folders, target, weights, method, "triton", repeats=repeats)
    assert [run.output for run in told] == [run.output for run in plain(target, weights, repeats)]
    assert sum(run.metrics.draft_n for run in told) > 0 and len(told[0].tokens) == 3
    widened = generate(folders, target, weights, method, "torch", repeats=repeats)
    assert [(run.output, run.drafts) for run in told] == [(run.output, run.drafts) for run in widened]


# -- the weights as they are kept ------------------------------------------------------------------


@pytest.mark.parametrize("ue8m0", [False, True])
def test_every_kept_matrix_bit_for_bit(tiny: Callable[..., Path], tmp_path: Path, ue8m0: bool) -> None:
    """Values and scales of fused matrices, against what the loader multiplies out."""
    for variant in ("qwen3", "deepseek_v3"):
        shape = LARGE if variant == "qwen3" else {**LARGE, "heads": 4, "kv_heads": 4}
        twin = write_twin(tiny(variant, layers=2, **shape), tmp_path / f"{variant}-{ue8m0}", ue8m0=ue8m0)
        kept, widened = (make_engine(twin, kernels=k, ctx=128) for k in ("triton", "torch"))
        compared = 0
        for ours, theirs in zip(layers_of(kept), layers_of(widened), strict=True):
            for block in ("attention", "mlp"):
                for name, product in vars(getattr(ours, block)).items():
                    if not isinstance(product, SkinnyLinear) or not isinstance(product.weight, ScaledWeight):
                        continue
                    weight, norm = product.weight, product.around.norm
                    columns = torch.ones(weight.shape[1]) if weight.columns is None else norm
                    right = dense(getattr(getattr(theirs, block), name)) * columns
                    assert torch.equal(weight.plain(torch.float32), right), (variant, name)
                    compared += 1
        assert compared >= 5


def layers_of(engine: Engine) -> list[Any]:
    return engine._device.runner.model.layers  # type: ignore[attr-defined,no-any-return]


def dense(product: Any) -> torch.Tensor:
    """A packed matrix as it was: the products of the unit vectors."""
    with torch.inference_mode():
        return product.product(torch.eye(product_width(product)), 32).T


def product_width(product: Any) -> int:
    return int(product.weight.shape[1])


def scaled_products(engine: Engine) -> dict[str, bool]:
    """Each matrix of the last layer by its place, and whether it has eight bits."""
    layer = layers_of(engine)[-1]
    found = {
        f"{block}.{name}": isinstance(product.weight, ScaledWeight)
        for block in ("attention", "mlp")
        for name, product in vars(getattr(layer, block)).items()
        if isinstance(product, SkinnyLinear)
    }
    for name in ("gate_up", "down"):
        if hasattr(layer.mlp, "experts"):
            found[f"experts.{name}"] = isinstance(getattr(layer.mlp.experts, name), ScaledWeight)
    return found


def test_which_matrices_stay_fp8(folders: dict[str, Path], tmp_path: Path) -> None:
    """All that the checkpoint stores so; where a part of a fused one is not, it is widened."""
    whole = scaled_products(make_engine(folders["latent-fp8"], kernels="triton", ctx=128))
    assert len(whole) == 5 and whole.pop("attention.down") is False, "its first part ends within a group"
    assert all(whole.values())
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for file in folders["dense-fp8"].iterdir():
        (mixed / file.name).write_bytes(file.read_bytes())
    tensors = load_file(mixed / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = load_file(folders["dense"] / "model.safetensors")[name]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    kept = scaled_products(make_engine(mixed, kernels="triton", ctx=128))
    assert kept == {
        "attention.qkv": False,
        "attention.output": True,
        "mlp.gate_up": True,
        "mlp.down": True,
    }


def test_blocks_of_another_size_are_multiplied_out(tiny: Callable[..., Path], tmp_path: Path) -> None:
    twin = write_twin(tiny("qwen3", **DENSE), tmp_path / "twin", block=16)
    for wishes, why in (
        ({"kernels": "triton"}, "blocks of 128 x 128"),
        ({"kernels": "torch"}, "torch's products know none"),
    ):
        plan = make_plan(EngineConfig(model=twin, device="cpu", dtype="float32", **wishes))
        assert plan.weights == "float32" and why in plan.weights_reason
    config = json.loads((twin / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [16, 16]
