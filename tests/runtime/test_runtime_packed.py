"""Matrices stored in few bits: read by their definitions, refused in every other form."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.formats.checkpoint import Checkpoint
from spd.formats.json_file import Fields
from spd.formats.quantized import read_quantization
from spd.runtime import EngineConfig, SamplingParams, make_plan
from spd.runtime.load import packed_weights
from spd.runtime.load.packed_weights import unpack_matrix, unpack_words
from spd.runtime.plan.memory import tensor_bytes
from tests import helpers
from tests.helpers import (
    Tiny,
    count_accepted,
    edit_config,
    make_engine,
    random_prompts,
    read_weights_error,
    run_all,
)
from tests.kernels.forms import needs_compiled
from tests.recipes import packed_twin
from tests.recipes.packed_twin import LAYOUTS, StoredMatrix, write_twins
from tests.recipes.tiny_dense import write_dense
from tests.recipes.tiny_mtp import write_tiny_mtp

SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 128, "dtype": "bfloat16"}
UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("rows", [8, 40, 72])
def test_every_value_is_unpacked(
    way: str, rows: int, tmp_path: Path, monkeypatch: helpers.Patch
) -> None:
    monkeypatch.setattr(packed_weights, "STRIP_CODES", 500)
    shape = rows, 192
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(rows)) * 0.1
    stored: StoredMatrix = LAYOUTS[way][1](weight)
    save_file(
        {f"a.b.{suffix}": tensor for suffix, tensor in stored.tensors.items()},
        tmp_path / "model.safetensors",
    )
    quantization = read_quantization(
        Fields("config.json", {"quantization_config": LAYOUTS[way][0]})
    )
    scheme = None if quantization is None else quantization.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    with Checkpoint.open(tmp_path) as checkpoint, torch.inference_mode():
        matrix = unpack_matrix(checkpoint, "a.b", scheme, shape)
    assert torch.equal(matrix.dequantize(), stored.values)
    assert (matrix.group == 1) == (way == "gptq-order")
    assert (stored.values - weight).abs().mean() < 0.3 * weight.abs().mean(), "close to the weight"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 33, 100])
def test_words_of_every_width_are_unpacked(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, count), generator=torch.Generator().manual_seed(count))
    assert torch.equal(
        unpack_words(packed_twin.pack_words(codes, bits), bits, count), codes.to(torch.uint8)
    )


def generate_outputs(folder: Path, count: int = 6, vocab: int = 256, **options: Any) -> list[Any]:
    """Generate a greedy and a sampled text; return their outputs."""
    params = [
        SamplingParams(max_tokens=count),
        SamplingParams(max_tokens=count, temperature=0.8, seed=1),
    ]
    engine = make_engine(folder, **{"dtype": "float32", "kernels": "torch", **options})
    return helpers.collect_outputs(run_all(engine, random_prompts(2, 2 * count, vocab), params))


def assert_equals_copy(folder: Path, way: str, to: Path) -> None:
    twin, plain = write_twins(folder, to, way)
    assert generate_outputs(twin) == generate_outputs(plain)


@pytest.mark.covers(count=6)
@pytest.mark.parametrize("way", LAYOUTS)
def test_the_twin_equals_its_dequantised_copy(way: str, tiny: Tiny, tmp_path: Path) -> None:
    assert_equals_copy(tiny("qwen3", **SIZES), way, tmp_path)


@pytest.mark.parametrize("way", ["w4-32-zeros", "nvfp4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_experts_and_latent_attention_equal_the_dequantised_copy(
    family: str, way: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Rows are reordered for interleaved rotation, and experts are stacked."""
    assert_equals_copy(tiny(family, **SIZES), way, tmp_path)


@pytest.mark.parametrize(("way", "group_bytes"), [("w4-32", 2), ("gptq", 4), ("awq", 5)])
def test_codes_stay_packed_and_are_counted(
    way: str, group_bytes: int, tiny: Tiny, tmp_path: Path
) -> None:
    """group_bytes: bytes of a group's scale, float32 where it was stored in float16, and of its
    zero point.
    """
    twin, plain = write_twins(tiny("qwen3", **SIZES), tmp_path, way)
    engine, wide = (
        make_engine(folder, kernels="torch", dtype="bfloat16") for folder in (twin, plain)
    )
    assert engine.plan.weights == "int4" and "as stored" in engine.plan.weights_reason
    assert engine.plan.need.weights < wide.plan.need.weights
    config = engine.plan.model.config
    form = engine.plan.shape.form
    layers = tensor_bytes(config, "bfloat16", form), tensor_bytes(config, "bfloat16")
    stored = load_file(plain / "model.safetensors").items()
    matrices = sum(
        tensor.numel() for name, tensor in stored if tensor.dim() == 2 and "proj" in name
    )
    assert layers[1] - layers[0] == matrices * 2 - matrices // 2 - matrices // 32 * group_bytes


@pytest.mark.parametrize("way", ["fp8-block", "modelopt-nvfp4"])
def test_step_packs_scales_of_experts_as_it_packs_experts(way: str, tmp_path: Path) -> None:
    source = write_dense(tmp_path / "source", "step3", dtype="bfloat16")
    twin, plain = write_twins(
        source, tmp_path, way, unquantized=(*packed_twin.UNQUANTIZED, "moe.gate.")
    )

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name in [
            name for name in tensors if way == "fp8-block" and name.endswith("weight_scale")
        ]:
            tensors[f"{name}_inv"] = tensors.pop(name)
        tensors["model.layers.1.moe.up_proj.input_scale"] = torch.ones(8)

    helpers.edit_weights(twin, as_published)
    assert generate_outputs(twin) == generate_outputs(plain)


@pytest.mark.parametrize(
    ("way", "last", "change", "words"),
    [
        (
            "w4-32",
            "weight_packed",
            lambda t: t[:, 1:].contiguous(),
            "shape is [128, 7], expected [128, 8]",
        ),
        ("w4-32", "weight_packed", lambda t: t.long(), "dtype I64 is not supported here (I32 are)"),
        ("w4-32", "weight_scale", None, "weight_scale': is missing"),
        ("w4-32-zeros", "weight_zero_point", None, "weight_zero_point': is missing"),
        ("gptq", "qzeros", lambda t: t + 1, "calls the weights symmetric"),
        ("gptq", "g_idx", lambda t: t + 1, "names a group beyond the 2 of them"),
        ("gptq", "g_idx", lambda t: t.flip(0), "columns of a group are not neighbours"),
        ("awq", "qzeros", lambda t: t[1:].contiguous(), "shape is [1, 16], expected [2, 16]"),
        ("fp8-block", "weight_scale", lambda t: t[1:].contiguous(), "expected [4, 2]"),
        ("nvfp4", "weight_global_scale", None, "weight_global_scale': is missing"),
    ],
)
def test_wrong_tensors_are_refused(
    way: str, last: str, change: Any, words: str, tiny: Tiny, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(UP + last)
        if change is not None:
            tensors[UP + last] = change(tensor)

    message = read_weights_error(write_twins(tiny("qwen3", **SIZES), tmp_path, way)[0], spoil)
    assert words in message and UP in message


def test_schemes_that_do_not_fit_the_tensors_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Zero points of symmetric weights, codes without a scheme, and groups that do not divide."""
    twin, _ = write_twins(tiny("qwen3", **SIZES), tmp_path / "w4", "w4-32")
    zeros = {UP + "weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)}
    message = read_weights_error(twin, lambda tensors: tensors.update(zeros))
    assert "calls the weights symmetric" in message and "model.safetensors" in message
    scheme_change = {"targets": ["re:.*o_proj"]}
    edit_config(
        twin,
        lambda config: config["quantization_config"]["config_groups"]["group_0"].update(
            scheme_change
        ),
    )
    assert "holds codes, but quantization_config has no scheme for it" in read_weights_error(twin)
    twin, _ = write_twins(tiny("qwen3", **SIZES), tmp_path / "gptq", "gptq")
    edit_config(twin, lambda config: config["quantization_config"].update(group_size=48))
    message = read_weights_error(twin)
    assert "groups of 48 do not divide 64 columns" in message and "qweight" in message


def excluding(pattern: str) -> Callable[[dict[str, Any]], object]:
    """Return a change that leaves out the layers of a pattern, in the manner of GPTQModel."""
    return lambda config: config["quantization_config"].update(dynamic={pattern: {}})


def test_the_header_says_which_matrices_are_quantized(tiny: Tiny, tmp_path: Path) -> None:
    unquantized = ("lm_head", "embed", "o_proj")
    twin, plain = write_twins(tiny("qwen3", **SIZES), tmp_path, "gptq", unquantized=unquantized)
    for pattern in (r"-:.*up_proj", r"-:.*o_proj"):
        edit_config(twin, excluding(pattern))
        assert generate_outputs(twin) == generate_outputs(plain)


def test_an_older_quantization_file_is_read(tiny: Tiny, tmp_path: Path) -> None:
    twin, plain = write_twins(tiny("qwen3", **SIZES), tmp_path, "modelopt-nvfp4")
    inner = json.loads((twin / "config.json").read_text())["quantization_config"]
    edit_config(twin, lambda config: config.pop("quantization_config"))
    del inner["quant_method"]
    (twin / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inner}))
    assert generate_outputs(twin) == generate_outputs(plain)


@pytest.mark.parametrize("name", ["weight_packed", "input_scale", "k_scale"])
def test_scales_of_activations_are_not_needed(
    name: str, tiny: Tiny, tmp_path: Path, caplog: Any
) -> None:
    twin, _ = write_twins(tiny("qwen3", **SIZES), tmp_path, "w4-32")
    helpers.edit_weights(twin, lambda t: t.update({f"model.layers.0.other.{name}": torch.ones(1)}))
    make_engine(twin)
    assert ("1 tensors" in caplog.text) == (name == "weight_packed")


def assert_kernels_equal_copy(
    folder: Path, way: str, to: Path, kernels: str, count: int = 6, vocab: int = 256
) -> None:
    """Assert that packed codes give the text of the dequantised copy, in float32."""
    twin, plain = write_twins(folder, to, way)
    plan = make_plan(EngineConfig(model=twin, device="cpu", dtype="float32", kernels=kernels))
    assert plan.weights in ("int4", "int8", "e2m1", "e4m3")
    outputs = generate_outputs(twin, count, vocab, kernels=kernels)
    assert outputs == generate_outputs(plain, count, vocab, kernels="torch")


@needs_compiled
@pytest.mark.parametrize("way", ["w4-32", "w4--1-zeros", "w8-32", "fp8-block", "nvfp4", "mxfp4"])
def test_c_kernels_equal_the_dequantised_copy(way: str, tiny: Tiny, tmp_path: Path) -> None:
    assert_kernels_equal_copy(tiny("qwen3", **SIZES), way, tmp_path, "native")


@helpers.INTERPRETER_MARKS[0]
@helpers.INTERPRETER_MARKS[1]
@pytest.mark.parametrize("way", ["w4--1-zeros", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_triton_kernels_equal_the_dequantised_copy(
    way: str, tiny: Tiny, tmp_path: Path, monkeypatch: Any
) -> None:
    helpers.limit_programs(monkeypatch)
    family = "qwen3_moe" if way == "nvfp4" else "qwen3"
    folder = tiny(family, **SIZES, layers=1, vocab=64, tokenizer=False)
    assert_kernels_equal_copy(folder, way, tmp_path, "triton", count=2, vocab=64)


@needs_compiled
@pytest.mark.parametrize("unquantized", [(), ("mtp_layers",)])
def test_mtp_heads_in_codes_and_unquantized_draft_the_same(
    unquantized: tuple[str, ...], tmp_path: Path
) -> None:
    """The projection is unpacked.

    Unquantized modules of a head need no entry in the ignore list.
    """
    source = write_tiny_mtp(
        tmp_path / "source", family="mimo", kind="copy", variant="qwen3", **SIZES
    )
    twin, plain = write_twins(
        source, tmp_path, "w4-32", unquantized=(*packed_twin.UNQUANTIZED, *unquantized)
    )
    names = load_file(twin / "model.safetensors")
    assert any("mtp_layers" in name and name.endswith("weight_packed") for name in names) == (
        not unquantized
    )
    params = [SamplingParams(max_tokens=40, temperature=t, seed=3) for t in (0, 0.8, 1)]
    prompts = random_prompts(3, 30, 256)
    options = {"kernels": "native", "dtype": "float32"}
    off = run_all(make_engine(twin, spec="off", **options), prompts, params)
    options |= helpers.PROPOSER_OPTIONS["mtp"]
    runs, plain_runs = (
        run_all(make_engine(folder, **options), prompts, params) for folder in (twin, plain)
    )
    helpers.assert_same_runs(runs, off)
    assert count_accepted(runs) == count_accepted(plain_runs)


def test_a_head_in_codes_is_converted_to_a_separate_folder(tmp_path: Path) -> None:
    source = write_tiny_mtp(
        tmp_path / "source", family="mimo", kind="copy", variant="qwen3", **SIZES
    )
    twin, _ = write_twins(source, tmp_path, "w4-32")
    head = tmp_path / "head"
    subprocess.run(
        [sys.executable, "-m", "spd", "convert-mtp", str(twin), str(head), "-q"], check=True
    )
    config = json.loads((head / "config.json").read_text())["transformer_layer_config"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    prompts = random_prompts(2, 30, 256)
    params = [SamplingParams(max_tokens=30)] * 2
    engines = (
        make_engine(twin, **mtp_options, **helpers.PROPOSER_OPTIONS["mtp"])
        for mtp_options in ({}, {"draft_model": head})
    )
    expected, runs = (run_all(engine, prompts, params) for engine in engines)
    helpers.assert_same_runs(runs, expected)
    assert count_accepted(runs) == count_accepted(expected)


@pytest.mark.oracle
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (7, 33), (16, 100), (33, 128)])
def test_words_are_unpacked_as_compressed_tensors_packs_them(
    bits: int, rows: int, columns: int
) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    signed = (codes - (1 << (bits - 1))).to(torch.int8)
    words = packing.pack_to_int32(signed, bits)
    assert torch.equal(unpack_words(words, bits, columns), codes.to(torch.uint8))
    down = packing.pack_to_int32(signed, bits, packed_dim=0)
    assert torch.equal(unpack_words(down.t(), bits, rows).t(), codes.to(torch.uint8))


NAN_CODES = ["fp8-tensor", "fp8-channel", "fp8-block"]


@pytest.mark.parametrize("way", [*NAN_CODES, "mxfp4", "nvfp4", "modelopt-nvfp4", "int8", "w4-32"])
def test_values_that_are_not_finite_make_their_scales_nan(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale of NaN carries the NaN of a code into the sum, and a warning names the tensor."""
    config, store = LAYOUTS[way]
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    tensors = store(weight).tensors
    if way in NAN_CODES:
        tensors["weight"].view(torch.uint8)[5, 40] = 0xFF
        where = "a.b.weight"
    elif way == "nvfp4":
        tensors["weight_global_scale"].fill_(torch.inf)
        where = "a.b.weight_global_scale"
    else:
        scales = tensors["weight_scale"]
        scales.view(torch.uint8).fill_(255)
        where = "a.b.weight_scale"
    save_file(
        {f"a.b.{suffix}": tensor for suffix, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    quantization = read_quantization(Fields("config.json", {"quantization_config": config}))
    assert quantization is not None
    scheme = quantization.scheme_of("a.b")
    assert scheme is not None
    with Checkpoint.open(tmp_path) as checkpoint:
        matrix = unpack_matrix(checkpoint, "a.b", scheme, (64, 64))
    assert matrix.scales[5].isnan().any()
    plain = matrix.dequantize()
    assert plain[5, 40].isnan()
    assert f"tensor {where} holds values that are not finite" in caplog.text
    if way in ("fp8-channel", "fp8-block"):
        assert plain[40, :8].isfinite().all()
