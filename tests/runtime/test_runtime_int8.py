"""Weights rounded to int8 and int4 at load, and read in FP8: bounded errors, rows apart, counted, stated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import Checkpoint
from spd.formats.demo import demo_folder
from spd.kernels.linear.few_bits import INT4_GROUP, grouped_linear, int4_groups, int8_rows
from spd.runtime import EngineConfig, make_plan
from spd.runtime.load.packed_weights import unpack
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from tests.helpers import (
    edit_config,
    edit_weights,
    logits_of,
    make_engine,
    read_model_config,
    refused_weights,
)
from tests.recipes.fp8_twin import write_twin
from tests.recipes.packed_twin import write_twins

SIZES = {"hidden": 64, "intermediate": 128, "dtype": "bfloat16"}


# -- int8: rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(33, 64), (130, 1056), (5, 70)])
def test_a_product_is_within_its_bound(dtype: torch.dtype, n: int, k: int) -> None:
    """Half a step a weight, and what rounding the result costs: no row or column may exceed that."""
    draw = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=draw) * torch.exp2(torch.arange(n) % 7 - 3.0)[:, None]
    x = torch.randn(9, k, generator=draw).to(dtype)
    made = int8_rows(weight)
    exact, rounded = x.double() @ weight.double().T, x.double() @ made.plain(torch.float64).T
    half_steps = 0.5001 * x.double().abs().sum(1, keepdim=True) * made.scales.double().T
    assert ((rounded - exact).abs() <= half_steps).all()
    assert ((rounded - exact).abs() > 0.01 * half_steps).any(), "something was rounded"
    slack = 4 * torch.finfo(dtype).eps * (x.double().abs() @ made.plain(torch.float64).abs().T)
    found = grouped_linear(x, made)
    assert found.dtype == dtype and ((found.double() - rounded).abs() <= slack).all()


def test_scales_are_bfloat16_numbers() -> None:
    """A product of bfloat16 multiplies by the very scale that a product of float32 does."""
    made = int8_rows(torch.randn(64, 40, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(made.scales.to(torch.bfloat16).float(), made.scales)
    stacked = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(2))
    whole = int8_rows(stacked)
    assert all(torch.equal(int8_rows(one).codes, whole.codes[i]) for i, one in enumerate(stacked))


def test_rounding_in_strips_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(3))
    whole = int8_rows(weight)
    monkeypatch.setattr("spd.kernels.linear.few_bits.STRIP", 7 * 40)
    strips = int8_rows(weight)
    assert torch.equal(whole.codes, strips.codes) and torch.equal(whole.scales, strips.scales)


# -- int4: groups of a row -------------------------------------------------------------------------


def test_groups_err_less_than_the_largest_value_would_have_it() -> None:
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    found = int4_groups(weight)
    assert found.scales.shape == (70, 256 // INT4_GROUP) and found.codes.shape == (70, 128)
    grouped = weight.view(70, -1, INT4_GROUP)
    step = grouped.abs().amax(-1, keepdim=True) / 7
    usual = ((grouped / step).round().clamp(-8, 7) * step - grouped).square().sum(-1)
    own = (found.plain(torch.float32) - weight).view(grouped.shape).square().sum(-1)
    assert (own <= usual * 1.02).all() and own.sum() < 0.9 * usual.sum()


def test_groups_do_not_depend_on_their_neighbours() -> None:
    weight = torch.randn(2, 33, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[0, 3, :64] = 0
    whole = int4_groups(weight)
    for one, part in ((weight[1, 5:9, 64:128], (1, slice(5, 9))), (weight[0, 3:4, :128], (0, slice(3, 4)))):
        found = int4_groups(one)
        columns = slice(64, 128) if one.shape[0] == 4 else slice(0, 128)
        assert torch.equal(found.plain(torch.float32), whole.plain(torch.float32)[part][:, columns])


def test_a_value_that_is_not_finite_is_not_rounded_away() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))
    weight[0, 3], weight[1, 70], weight[2, 1] = float("nan"), float("inf"), float("-inf")
    found = int4_groups(weight).plain(torch.float32).view(3, 2, INT4_GROUP).isnan()
    assert found.all(-1).tolist() == found.any(-1).tolist() == [[True, False], [False, True], [True, False]]


# -- models ----------------------------------------------------------------------------------------


def demo_logits(folder: Path, **wishes: Any) -> torch.Tensor:
    """Float32 logits [T, V] of a text by the demo in a folder, each row less its mean."""
    engine = make_engine(folder, ctx=512, **wishes)
    ids = tuple(engine.tokenizer.encode("def total(values):\n    result = 0\n    for value in values:\n"))
    logits = logits_of(engine, ids, 0)
    return logits - logits.mean(-1, keepdim=True)


def test_the_demos_logits_stay_close_to_float32(tmp_path: Path) -> None:
    """As docs/supported-models.md states: root mean squares, in shares of the exact logits' spread."""
    demo = demo_folder()
    exact = demo_logits(demo)
    twins = {scale: write_twin(demo, tmp_path / f"{scale}", ue8m0=scale) for scale in (False, True)}
    for folder, wishes, low, high in (
        (demo, {"quantize": "int8"}, 0.001, 0.04),
        (demo, {"quantize": "int4"}, 0.02, 0.25),
        (twins[False], {}, 0.0175, 0.0525),
        (twins[True], {}, 0.02, 0.06),
    ):
        error = (demo_logits(folder, **wishes) - exact).square().mean().sqrt()
        assert low < error / exact.square().mean().sqrt() < high, (folder, wishes)


def test_the_plan_says_how_weights_are_kept(tiny: Callable[..., Path]) -> None:
    wishes = EngineConfig(model=tiny("qwen3"), device="cpu", dtype="bfloat16", quantize="int8")
    plan = make_plan(wishes)
    assert (plan.wishes.quantize, plan.weights) == ("int8", "int8") and "made at load" in plan.weights_reason
    wide = make_plan(replace(wishes, quantize="none"))
    assert (wide.wishes.quantize, wide.weights) == ("none", "bfloat16")
    assert plan.need.weights < wide.need.weights
    assert json.dumps(plan.as_dict())


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_weights_that_are_quantized_already(word: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    twins = (
        write_twin(tiny("qwen3"), tmp_path / "fp8"),
        write_twins(tiny("qwen3", **SIZES), tmp_path, "gptq")[0],
    )
    for twin in twins:
        with pytest.raises(IncompatibleError, match=f"--quantize {word}, but the weights"):
            make_plan(EngineConfig(model=twin, device="cpu", quantize=word))


BLOCK = 16
"""Of tiny matrices, so that there are several blocks and partial ones at both edges."""


@pytest.fixture
def twin(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    source = tiny("deepseek_v3", hidden=72, intermediate=104, dtype="bfloat16")
    return write_twin(source, tmp_path / "twin", block=BLOCK)


def plain(tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor by the definition, an element's scale looked up by its place."""
    if tensors[name].dtype != torch.float8_e4m3fn:
        return tensors[name].to(dtype)
    values, scales = tensors[name].float(), tensors[f"{name}_scale_inv"].float()
    rows, columns = (torch.arange(size) // BLOCK for size in values.shape)
    return (values * scales[rows][:, columns]).to(dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_every_matrix_bit_for_bit(tiny: Callable[..., Path], tmp_path: Path, stored: torch.dtype) -> None:
    source = tiny("deepseek_v3", hidden=72, intermediate=104, dtype="bfloat16")
    twin = write_twin(source, tmp_path / "twin", block=BLOCK, ue8m0=stored == torch.float8_e8m0fnu)
    edit_weights(twin, lambda t: t.update({n: t[n].to(stored) for n in list(t) if n.endswith("_scale_inv")}))
    config, tensors = read_model_config(twin), load_file(twin / "model.safetensors")
    assert config.quantization is not None
    shapes, partial, compared = expected_tensors(config, family_layout(config)), 0, 0
    with Checkpoint.open(twin) as checkpoint, torch.inference_mode():
        for name, shape in shapes.items():
            if (found := config.quantization.found(name, shape, checkpoint.tensors)) is not None:
                whole = unpack(checkpoint, *found, shape)
                assert torch.equal(whole.plain(), plain(tensors, name, torch.float32)), name
                partial += tensors[f"{name}_scale_inv"].shape == (3, 5)
                compared += 1
    assert compared > 60 and partial, "partial blocks are seen"


def test_scales_that_are_missing_or_of_another_shape(twin: Path) -> None:
    gone, short = (f"model.layers.1.mlp.experts.{e}.up_proj.weight_scale" for e in (3, 4))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{gone}_inv"]
        tensors[f"{short}_inv"] = tensors[f"{short}_inv"][:, :-1].contiguous()

    said = refused_weights(twin, spoil)
    assert f"'{gone}': is missing" in said and short in said and "shape is [2, 4], expected [2, 5]" in said


def test_fp8_without_a_word_in_the_configuration(twin: Path) -> None:
    edit_config(twin, lambda config: config.pop("quantization_config"))
    assert "dtype F8_E4M3 is not supported" in refused_weights(twin)


def test_a_vector_stored_as_fp8_is_refused(twin: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    said = refused_weights(
        twin, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    assert f"'{name}' in model.safetensors: dtype F8_E4M3 is not supported" in said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"quant_method": "exl3"}, "exl3"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"weight_block_size": None}, "fp8"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [128.0, 128]}, "weight_block_size"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"activation_scheme": "static"}, "static"),
        ({"scale_fmt": "int8"}, "int8"),
    ],
)
def test_every_other_way_of_quantizing_is_refused(twin: Path, change: dict, word: str) -> None:
    edit_config(twin, lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=word):
        read_model_config(twin)
