"""Building a decoder: the same weights whichever way they are read, folded norms, dummy weights, progress."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.kernels.dispatch import load_kernels
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.load.loader import build_model, decoder_part, direct_fill
from spd.runtime.load.progress import LoadMeter, LoadProgress
from spd.runtime.load.weight_reader import read_tensors
from spd.runtime.models.builder import LayerBuilder, Place
from spd.runtime.plan.memory import tensor_bytes
from tests.helpers import make_engine, random_prompts, read_model_config, run_all

WAYS = ("direct", "threaded")


def held(folder: Path, way: str, meter: LoadMeter | None = None, fold: bool = False) -> dict[str, Tensor]:
    """What a decoder holds in float16, which nothing packs, by the names of the parts it was fused from."""
    config, meter = read_model_config(folder), meter or LoadMeter()
    with Checkpoint.open(folder) as checkpoint, torch.inference_mode():
        builder = LayerBuilder(Place(torch.float16, "cpu", load_kernels("torch")), config.rms_norm_eps)
        builder.fold_norms |= fold
        fill: Any = direct_fill(checkpoint, meter)
        if way == "threaded":
            fill = partial(read_tensors, checkpoint, advance=meter.advance)
        at_once = way == "threaded"
        model = build_model(config, decoder_part(config), builder, fill, 64, at_once=at_once, meter=meter)
    found = {"embed_tokens": model.embedding, "head": model.head.weight, "norm": model.final_norm}
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        linears = {"q+k+v": attention.qkv, "o": attention.output, "gate+up": mlp.gate_up, "down": mlp.down}
        for name, linear in linears.items():
            found |= {f"{i}.{name}": linear.weight, f"{i}.{name}.bias": linear.bias}
        found |= {f"{i}.input_norm": attention.qkv.around.norm, f"{i}.post_norm": mlp.gate_up.around.norm}
        found[f"{i}.qk_norm"] = attention.qk_weight
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("variant", ["qwen3", "biases", "qwen3_bias", "mlp_bias", "tied", "sharded", "gqa4"])
def test_weights_are_the_same_whichever_way_they_are_read(variant: str, tiny: Callable[..., Path]) -> None:
    """Golden tests hold the first way against `transformers`."""
    folder = tiny("llama2", mlp_bias=True) if variant == "mlp_bias" else tiny(variant)
    direct, threaded = (held(folder, way) for way in WAYS)
    assert direct.keys() == threaded.keys()
    for name, tensor in direct.items():
        assert torch.equal(threaded[name], tensor) and tensor.any(), name


@pytest.mark.parametrize("way", WAYS)
def test_progress_counts_every_byte(way: str, tiny: Callable[..., Path]) -> None:
    folder, told = tiny("biases"), list[LoadProgress]()
    total = tensor_bytes(read_model_config(folder), "float16")
    held(folder, way, LoadMeter(told.append, total))
    read = [report for report in told if report.phase == "read"]
    assert all(report.total == total for report in told)
    assert read[-1].done == total and [r.done for r in read] == sorted(r.done for r in read)
    packed = [report.done for report in told if report.phase == "pack"]
    assert packed == sorted(packed) and len(packed) == (2 if way == "threaded" else 0)
    assert not packed or 0 < packed[-1] <= total


def test_the_engine_tells_its_progress(tiny: Callable[..., Path]) -> None:
    told, model, draft = list[LoadProgress](), tiny("tied"), tiny("tied", layers=1)
    wishes: dict[str, Any] = {"threads": 1, "dtype": "float32", "ctx": 256, "spec": "draft"}
    Engine(EngineConfig(model=model, draft_model=draft, **wishes), told.append)
    assert told[-1].done == told[-1].total and told[0].done < told[0].total
    assert told[-1].total == sum(tensor_bytes(read_model_config(f), "float32") for f in (model, draft))


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_folded_into_the_matrices_behind_them_only(way: str, tiny: Callable[..., Path]) -> None:
    plain, folded = held(tiny("qwen3"), way), held(tiny("qwen3"), way, fold=True)
    for name, tensor in plain.items():
        layer, _, part = name.partition(".")
        norm = {"q+k+v": "input_norm", "gate+up": "post_norm"}.get(part)
        expected = tensor if norm is None else (tensor.float() * plain[f"{layer}.{norm}"].float()).half()
        assert torch.equal(folded[name], expected) and torch.equal(expected, tensor) == (norm is None), name


@pytest.mark.parametrize("variant", ["tied", "glm4_moe"])
def test_dummy_models_say_different_things(variant: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    size = {"hidden": 128, "vocab": 2000, "layers": 6} if variant == "tied" else {"vocab": 2000}
    (tmp_path / "config.json").write_bytes((tiny(variant, **size) / "config.json").read_bytes())
    params = [SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)] * 3
    runs = run_all(make_engine(tmp_path, load="dummy"), random_prompts(3, 20, 2000), params)
    for run in runs:
        assert len(run.tokens) == 40 and len(set(run.tokens)) >= 20
        assert all(-9 < logprob < -0.01 for logprob in run.logprobs), "neither uniform nor certain"
    assert len({tuple(run.tokens) for run in runs}) == 3
