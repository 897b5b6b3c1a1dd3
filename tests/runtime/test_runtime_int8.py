"""Weights rounded to int8 and int4 at load, and read in FP8: errors, independent rows, memory, the
plan.
"""

from __future__ import annotations

import itertools
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
from spd.formats.folder import ModelFolder
from spd.kernels.capabilities import CODE_BITS, ROUNDING_GROUP, CodeKind
from spd.kernels.linear.few_bits import IQ4_VALUES, StackedWeight, quantize_int8
from spd.kernels.linear.group_rounding import quantize_groups
from spd.runtime import EngineConfig, make_plan
from spd.runtime.load.packed_weights import unpack_matrix
from spd.runtime.models import family_layout
from spd.runtime.models.allocator import BlockTensors, Piece
from spd.runtime.models.builder import LayerBuilder, reorder_stack
from spd.runtime.models.weights import expected_tensors
from tests.helpers import compute_logits, edit_config, edit_weights, make_engine, read_weights_error
from tests.recipes.packed_twin import write_twin, write_twins


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_rounded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in stacks and strips.

    Scales are bfloat16 values, so products of both dtypes use the same.
    """
    stacked = random(2, 3, 50, 40)
    all_rows = quantize_int8(stacked)
    assert torch.equal(all_rows.scales.to(torch.bfloat16).float(), all_rows.scales)
    for strip in (None, 7 * 40):
        if strip:
            monkeypatch.setattr("spd.kernels.linear.few_bits.STRIP_VALUES", strip)
        for i, matrix in enumerate(map(quantize_int8, stacked)):
            assert torch.equal(matrix.codes, all_rows.codes[i]) and torch.equal(
                matrix.scales, all_rows.scales[i]
            )


KINDS: tuple[CodeKind, ...] = ("iq4", "int5", "int6", "int8")


@pytest.mark.parametrize("kind", KINDS)
def test_groups_err_less_than_groups_scaled_by_their_largest_value(kind: CodeKind) -> None:
    weight = random(1, 70, 256)
    groups = quantize_groups(weight, kind)
    assert groups.scales.shape == (70, 256 // ROUNDING_GROUP)
    assert groups.scales.dtype == torch.float16 and groups.shape == weight.shape
    grouped = weight.view(70, -1, ROUNDING_GROUP)
    largest = grouped.abs().amax(-1, keepdim=True)
    if kind == "iq4":
        step = largest / -IQ4_VALUES[0]
        levels = torch.tensor(IQ4_VALUES)
        simple = levels[((grouped / step)[..., None] - levels).abs().argmin(-1)] * step
    else:
        step = largest / ((1 << CODE_BITS[kind] - 1) - 1)
        simple = (grouped / step).round() * step
    simple_error = (simple - grouped).square().sum(-1)
    error = (groups.plain(torch.float32) - weight).view(grouped.shape).square().sum(-1)
    slack = 1.6 if kind == "int8" else 1.1
    assert (error <= simple_error * slack).all() and error.sum() < 0.9 * simple_error.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_do_not_depend_on_their_neighbours(
    kind: CodeKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(2, 2, 33, 192).bfloat16()
    weight[0, 3, :64] = 0
    values = quantize_groups(weight, kind).plain(torch.float32)
    for part in ((1, slice(5, 9), slice(64, 128)), (0, slice(3, 4), slice(0, 128))):
        assert torch.equal(quantize_groups(weight[part], kind).plain(torch.float32), values[part])
    monkeypatch.setattr("spd.kernels.linear.group_rounding.CACHED_VALUES", 7 * 192)
    monkeypatch.setattr("spd.kernels.linear.group_rounding.THREADS", 1)
    assert torch.equal(quantize_groups(weight, kind).plain(torch.float32), values)


def test_a_value_that_is_not_finite_gives_a_nan_group() -> None:
    weight = random(3, 3, 96)
    weight[0, 3], weight[1, 70], weight[2, 40] = float("nan"), float("inf"), float("-inf")
    for kind in KINDS:
        is_nan = quantize_groups(weight, kind).plain(torch.float32).isnan()
        groups = is_nan.view(3, 3, ROUNDING_GROUP)
        assert torch.equal(groups.all(-1), torch.eye(3).bool()[[0, 2, 1]])
        assert torch.equal(groups.any(-1), groups.all(-1))


def test_rows_of_two_forms_are_reordered_together() -> None:
    pieces = (quantize_groups(random(1, 6, 64), "iq4"), quantize_groups(random(2, 5, 64), "int6"))
    stack = StackedWeight(pieces)
    order = [7, 8, 0, 1, 4, 6, 10, 2, 3, 5, 9]
    reordered = reorder_stack(stack, order)
    kinds = [(piece.kind, piece.shape[0]) for piece in reordered.pieces]
    assert kinds == [("int6", 2), ("iq4", 3), ("int6", 2), ("iq4", 3), ("int6", 1)]
    assert torch.equal(reordered.plain(torch.float32), stack.plain(torch.float32)[order])


def test_pieces_to_be_rounded_move_with_their_rows() -> None:
    weight = random(1, 6, 8)
    tensors = BlockTensors({"qkv": weight.clone()})
    tensors.pieces["qkv"] = [Piece(4, "iq4"), Piece(2, "int6")]
    order = [0, 1, 4, 5, 2, 3]
    LayerBuilder.reorder(object.__new__(LayerBuilder), tensors, "qkv", order)
    assert tensors.pieces["qkv"] == [Piece(2, "iq4"), Piece(2, "int6"), Piece(2, "iq4")]
    assert torch.equal(tensors["qkv"], weight[order])


def demo_logits(folder: Path, **options: Any) -> torch.Tensor:
    """Return float32 logits [T, V] of a text by the demo in a folder, minus each row's mean."""
    engine = make_engine(folder, ctx=512, **options)
    ids = engine.tokenizer.encode("def total(values):\n    result = 0\n    for value in values:\n")
    logits = compute_logits(engine, ids, 0)
    return logits - logits.mean(-1, keepdim=True)


def test_the_demos_logits_stay_close_to_float32(tmp_path: Path) -> None:
    """As in docs/supported-models.md: root mean square errors relative to the exact logits' spread."""
    demo = demo_folder()
    exact = demo_logits(demo)
    twins = {scale: write_twin(demo, tmp_path / f"{scale}", ue8m0=scale) for scale in (False, True)}
    for folder, options, low, high in (
        (demo, {"quantize": "int8"}, 0.001, 0.04),
        (demo, {"quantize": "int4"}, 0.02, 0.25),
        (twins[False], {}, 0.0175, 0.0525),
        (twins[True], {}, 0.02, 0.06),
    ):
        error = (demo_logits(folder, **options) - exact).square().mean().sqrt()
        assert low < error / exact.square().mean().sqrt() < high, (folder, options)


def test_the_plan_states_how_weights_are_stored(tiny: Callable[..., Path]) -> None:
    config = EngineConfig(model=tiny("qwen3"), device="cpu", dtype="bfloat16", quantize="int8")
    plan = make_plan(config)
    wide = make_plan(replace(config, quantize="none"))
    assert (
        plan.weights == "int8"
        and "made at load" in plan.weights_reason
        and wide.weights == "bfloat16"
    )
    assert plan.need.weights < wide.need.weights and json.dumps(plan.as_dict())


def test_the_plan_states_whether_activations_are_rounded(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config = EngineConfig(model=tiny("qwen3"), device="cpu", quantize="int8", activations="int8")
    plan = make_plan(config)
    assert plan.as_dict()["activations"] == "int8" and plan.shape.form.rounds_rows
    assert not plan.can_round_activations, "they are rounded already"
    whole = make_plan(replace(config, activations="whole"))
    assert whole.as_dict()["activations"] == "whole" and not whole.shape.form.rounds_rows
    assert whole.as_dict()["can_round_activations"] is True
    wide = make_plan(replace(config, activations="whole", quantize="none"))
    assert not wide.can_round_activations
    fp8 = write_twin(tiny(), tmp_path / "fp8")
    for model, fix in ((config.model, "--quantize int8"), (fp8, "leave --activations out")):
        with pytest.raises(IncompatibleError, match="weights in integer codes") as caught:
            make_plan(replace(config, model=model, quantize="none"))
        assert caught.value.fix[0] == fix


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounded_activations_move_the_demos_logits_a_little(dtype: str) -> None:
    """Between 0.1 and 5 per cent of their spread; C and torch agree up to their other operations."""
    demo = demo_folder()
    options = {"quantize": "int8", "dtype": dtype}
    whole = demo_logits(demo, **options)
    rounded = demo_logits(demo, activations="int8", **options)
    by_torch = demo_logits(demo, activations="int8", kernels="torch", **options)
    spread = whole.square().mean().sqrt()
    assert 0.001 < (rounded - whole).square().mean().sqrt() / spread < 0.05
    assert (by_torch - rounded).square().mean().sqrt() / spread < 0.03


def test_quantized_weights_are_not_quantized_again(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plain = tiny(hidden=64, intermediate=128, dtype="bfloat16")
    fp8 = write_twin(tiny(), tmp_path / "fp8")
    gptq, _ = write_twins(plain, tmp_path, "gptq")
    for twin, word in itertools.product((fp8, gptq), ("int8", "int4")):
        with pytest.raises(IncompatibleError, match=f"--quantize {word}, but the weights"):
            make_plan(EngineConfig(model=twin, device="cpu", quantize=word))


BLOCK = 16
"""The block size of tiny matrices, which have several blocks and partial ones at both edges."""


@pytest.fixture
def twin(tiny: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return an FP8 checkpoint, with its scales in the parameter's dtype."""
    stored = getattr(request, "param", torch.float32)
    source = tiny("deepseek_v3", hidden=72, intermediate=104, dtype="bfloat16")
    twin = write_twin(source, tmp_path / "twin", block=BLOCK, ue8m0=stored == torch.float8_e8m0fnu)
    edit_weights(
        twin, lambda t: t.update({n: t[n].to(stored) for n in list(t) if n.endswith("_scale_inv")})
    )
    return twin


@pytest.mark.parametrize(
    "twin", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], indirect=True
)
def test_every_matrix_equals_its_definition(twin: Path) -> None:
    """Each element is multiplied by the scale of its block."""
    config = ModelFolder(twin).config
    tensors = load_file(twin / "model.safetensors")
    assert config.quantization is not None
    shapes = expected_tensors(config, family_layout(config))
    partial = 0
    compared = 0
    with Checkpoint.open(twin) as checkpoint, torch.inference_mode():
        for name, shape in shapes.items():
            module_scheme = config.quantization.module_scheme(name, shape, checkpoint.tensors)
            if module_scheme is not None:
                module, scheme = module_scheme
                scales = tensors[f"{name}_scale_inv"]
                rows, columns = (torch.arange(size) // BLOCK for size in shape)
                expected = tensors[name].float() * scales.float()[rows][:, columns]
                assert torch.equal(
                    unpack_matrix(checkpoint, module, scheme, shape).dequantize(), expected
                ), name
                partial += scales.shape == (3, 5)
                compared += 1
    assert compared > 60 and partial, "partial blocks are seen"


def test_missing_scales_and_wrong_shapes_are_named(twin: Path) -> None:
    gone, short = (f"model.layers.1.mlp.experts.{e}.up_proj.weight_scale" for e in (3, 4))
    edit_weights(twin, lambda t: t.pop(f"{gone}_inv"))
    message = read_weights_error(
        twin, lambda t: t.update({f"{short}_inv": t[f"{short}_inv"][:, :-1].clone()})
    )
    assert (
        f"'{gone}': is missing" in message
        and short in message
        and "shape is [2, 4], expected [2, 5]" in message
    )


def test_fp8_is_refused_where_it_is_not_expected(twin: Path) -> None:
    """In a vector, and without a quantization_config."""
    name = "model.layers.0.input_layernorm.weight"
    message = read_weights_error(twin, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert f"'{name}' in model.safetensors: dtype F8_E4M3 is not supported" in message
    edit_config(twin, lambda config: config.pop("quantization_config"))
    message = read_weights_error(twin, lambda t: t.update({name: t[name].float()}))
    assert "dtype F8_E4M3 is not supported" in message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight_block_size": None}, "fp8"),
        *(
            ({"weight_block_size": size}, "weight_block_size")
            for size in ([128], [0, 128], [128.0, 128])
        ),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"activation_scheme": "static"}, "static"),
        ({"scale_fmt": "int8"}, "int8"),
    ],
)
def test_other_ways_of_quantizing_are_refused(twin: Path, change: dict, word: str) -> None:
    edit_config(twin, lambda config: config["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=word):
        make_plan(EngineConfig(model=twin, device="cpu"))
