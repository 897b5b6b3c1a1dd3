"""Weights stored as DeepSeek's FP8 blocks: read as a plain reference reads them, refused in other forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from spd.runtime.load.packed_weights import unpack
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from tests.helpers import (
    edit_config,
    make_engine,
    random_prompts,
    read_model_config,
    refused_weights,
    run_all,
)
from tests.recipes.fp8_twin import write_twin
from tests.runtime.demo_logits import demo_logits, relative_error

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


def test_every_matrix_bit_for_bit(twin: Path) -> None:
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


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "ue8m0"])
def test_the_twin_speaks_as_its_dequantised_copy(
    tiny: Callable[..., Path], tmp_path: Path, stored: str
) -> None:
    source = tiny("deepseek_v3", hidden=72, intermediate=104, dtype="bfloat16")
    twin = write_twin(source, tmp_path / "twin", block=BLOCK, ue8m0=stored == "ue8m0")
    tensors = load_file(twin / "model.safetensors")
    kept = {"float32": torch.float32, "bfloat16": torch.bfloat16, "ue8m0": torch.float8_e8m0fnu}[stored]
    tensors = {n: t.to(kept) if n.endswith("_scale_inv") else t for n, t in tensors.items()}
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    whole = {n: plain(tensors, n, torch.float32) for n in tensors if not n.endswith("_scale_inv")}
    save_file(whole, copy / "model.safetensors", metadata={"format": "pt"})
    params = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, seed=1)]
    prompts = random_prompts(2, 70, 256)
    told, same, other = (
        [run.output for run in run_all(make_engine(folder), prompts, params)]
        for folder in (twin, copy, source)
    )
    assert told == same
    assert told != other, "FP8 changes something"


def test_the_demos_logits_stay_close_to_float32(tmp_path: Path) -> None:
    """As docs/supported-models.md states, in shares of the logits' spread."""
    exact = demo_logits(demo_folder())
    for ue8m0, stated in ((False, 0.035), (True, 0.040)):
        twin = write_twin(demo_folder(), tmp_path / f"twin-{ue8m0}", ue8m0=ue8m0)
        error = relative_error(demo_logits(twin), exact)
        assert stated / 2 < error < 1.5 * stated


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
