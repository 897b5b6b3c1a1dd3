"""Weights stored as DeepSeek's FP8 blocks: read as a plain reference reads them, refused in other forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.runtime.load.packed_weights import unpack
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from tests.helpers import edit_config, edit_weights, read_model_config, refused_weights
from tests.recipes.fp8_twin import write_twin

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
