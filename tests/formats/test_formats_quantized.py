"""Quantized matrices in configurations: the scheme of each module, and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.json_file import Fields
from spd.formats.quantized import Quantization, read_quantization
from spd.formats.weight_schemes import Scheme
from tests.recipes.packed_twin import compressed_tensors_config, gptq_config, group_config


def read_config(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization(Fields("config.json", {"quantization_config": config}))
    assert quantization is not None
    return quantization


def test_targets_are_names_and_patterns_with_and_without_a_wrapper() -> None:
    config = group_config(4, 64)
    names = ["model.language_model.layers.0.mlp", r"re:.*self_attn\.[qk]_proj$"]
    config["config_groups"]["group_0"]["targets"] = [*names, r"re:model\.language_model.*\.1\."]
    quantization = read_config(config)
    for module in ("layers.0.mlp.up_proj", "layers.3.self_attn.k_proj", "layers.1.mlp.up_proj"):
        assert quantization.scheme_of(f"model.{module}") == Scheme("pack", 4, 64)
    assert (
        quantization.scheme_of("model.layers.3.self_attn.o_proj")
        is quantization.scheme_of("mtp.fc")
        is None
    )


def test_named_targets_come_before_classes() -> None:
    config = group_config(4, 32)
    eight_bits = group_config(8, -1)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**eight_bits, "targets": [r"re:.*down_proj"]}
    quantization = read_config(config)
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") == Scheme("pack", 8)
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme("pack", 4, 32)


def test_gptqs_overrides_change_the_scheme_of_modules() -> None:
    dynamic = {r"-:.*\.o_proj": {}, r"+:.*\.o_proj": {"bits": 8, "group_size": 64}}
    quantization = read_config(gptq_config(dynamic=dynamic))
    assert quantization.scheme_of("model.layers.0.self_attn.o_proj") == Scheme(
        "gptq", 8, 64, offset=1
    )
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") == Scheme(
        "gptq", 4, 32, offset=1
    )


def test_modelopt_mixes_algorithms_by_names_of_modules() -> None:
    layers = {
        "model.language_model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}
    }
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    quantization = read_config(config)
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme("modelopt-nvfp4", 4, 16)
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") == Scheme("fp8", 8)
    assert quantization.scheme_of("model.layers.1.mlp.up_proj") is None
    assert read_config({**config, "quant_algo": "FP8"}).scheme_of(
        "model.layers.8.mlp.up_proj"
    ) == Scheme("fp8", 8)


FOUR_BIT_ACTIVATIONS = group_config(4, 32)
FOUR_BIT_ACTIVATIONS["config_groups"]["group_0"]["input_activations"] = {
    "num_bits": 4,
    "type": "int",
    "dynamic": True,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FOUR_BIT_ACTIVATIONS, "activations of fewer than 8 bits are not supported"),
        *(
            ({"quant_method": name}, f"quantized weights ('{name}') are not supported")
            for name in ("bitsandbytes", "exl3", "quark", "torchao", "fp8", "hqq")
        ),
        (
            {**group_config(4, 32), "transform_config": {"config_groups": {"a": {}}}},
            "rotations of weights",
        ),
        (
            {**group_config(4, 32), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights",
        ),
        ({**group_config(4, 32), "quantization_status": "frozen"}, "'frozen' is not supported"),
        (compressed_tensors_config("marlin-24"), "'marlin-24' is not supported"),
        (group_config(12, 32), "12 is more than 8"),
        (gptq_config(checkpoint_format="gptq_p"), "'gptq_p' is not supported (gptq, gptq_v2 are)"),
        (gptq_config(bits=5), "5 is not supported (2, 3, 4, 8 are)"),
        (gptq_config(group_size=0), "0 columns share no scale"),
        (gptq_config(dynamic={r"+:(": {}}), "is no pattern"),
        (gptq_config(dynamic={r"+:(a)\1": {}}), "an escape that is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' is not supported (gemm"),
        ({"quant_method": "awq", "bits": 3}, "3 is not supported (4 is)"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported"),
    ],
)
def test_unsupported_values_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config)
    assert caught.value.message.startswith("config.json: ") and message in caught.value.message
    assert "\n" not in caught.value.message and caught.value.exit_code == 4
