"""EAGLE-3 heads by their configurations: what published ones say is read, what cannot be run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.eagle3 import ARCHITECTURE, Eagle3Config
from spd.formats.model_config import ModelConfig
from tests.formats.formats_helpers import LLAMA, refused, write_json
from tests.helpers import read_model_config

# A Llama-3.1-8B head as its authors published it: no mark but draft_vocab_size.
FIRST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
TRAINED = {**FIRST, "architectures": ["LlamaForCausalLMEagle3"]}
LAYER = {key: value for key, value in FIRST.items() if key != "draft_vocab_size"}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "transformer_layer_config": LAYER,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    write_json(folder, "config.json", config)
    return read_model_config(folder)


def facts(folder: Path, config: dict[str, Any]) -> Eagle3Config:
    found = read(folder, config).eagle3
    assert found is not None
    return found


def test_a_head_as_first_published(tmp_path: Path) -> None:
    config = read(tmp_path, FIRST)
    assert (config.architecture, config.num_layers, config.hidden_size) == (ARCHITECTURE, 1, 4096)
    assert (config.vocab_size, config.dtype, config.tie_embeddings) == (128256, "float16", False)
    assert config.bos_token_id is None and config.eos_token_ids == ()
    assert config.eagle3 == Eagle3Config(4096, 32000, None, 3, False, False, False, False)
    assert config.eagle3.aux_layers(32) == (2, 16, 29)
    assert (
        facts(tmp_path, {**TRAINED, "draft_vocab_size": None}).draft_vocab_size
        == TRAINED["vocab_size"]
    )
    narrower = {**FIRST, "hidden_size": 6144, "target_hidden_size": 8192}
    assert facts(tmp_path, narrower).target_hidden_size == 8192
    assert read(tmp_path, LLAMA).eagle3 is None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "deepseek_v3"])
def test_trainers_write_their_target_s_ids(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    ids = {"vocab_size": 129280, "bos_token_id": 151643, "eos_token_id": 151645}
    written = {**TRAINED, **ids, "architectures": [architecture], "model_type": model_type}
    assert facts(tmp_path, written).draft_vocab_size == 32000


IDS = "eagle_aux_hidden_state_layer_ids"
OTHER = "aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({**TRAINED, IDS: [2, 18, 33]}, (2, 18, 33)),
        ({**TRAINED, OTHER: [0, 36]}, (0, 36)),
        ({**TRAINED, "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
        ({**TRAINED, "eagle_config": {IDS: [], "use_last_layernorm": True}}, None),
        ({**SPECULATORS, IDS: [2, 18, 33]}, (2, 18, 33)),
        (SPECULATORS, None),
    ],
)
def test_layers_that_are_read(
    tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    """At the top the layers passed; inside eagle_config the one whose output it is."""
    found = facts(tmp_path, config)
    assert found.configured_layers == layers and found.num_aux_layers == len(layers or (1, 2, 3))
    assert found.aux_layers(36) == (layers or (2, 18, 33))


def test_layers_beyond_the_target(tmp_path: Path) -> None:
    found = facts(tmp_path, {**TRAINED, IDS: [2, 18, 33]})
    assert found.aux_layers(33) == (2, 18, 33)
    with pytest.raises(CheckpointError, match="behind 2, 18, 33 layers") as caught:
        found.aux_layers(32)
    assert caught.value.reason == ("the target has 32 layers",)


def test_speculators(tmp_path: Path) -> None:
    config = read(tmp_path, SPECULATORS)
    assert config.eagle3 == Eagle3Config(4096, 32000, None, 3, True, False, False, False)
    flags = {
        "norm_before_residual": False,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    }
    found = facts(tmp_path, {**SPECULATORS, **flags})
    assert found == Eagle3Config(4096, 32000, None, 3, False, True, True, True)
    inside = {**SPECULATORS, "transformer_layer_config": {**LAYER, "torch_dtype": None}}
    assert read(tmp_path, inside).dtype == "bfloat16"


OTHER_LAYER = {**SPECULATORS, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (OTHER_LAYER, ("transformer_layer_config", "'qwen3' is not supported (llama is)")),
        (
            {**SPECULATORS, "transformer_layer_config": None},
            ("transformer_layer_config", "is missing"),
        ),
        ({"num_hidden_layers": 2}, ("num_hidden_layers", "2 is not supported (1 is)")),
        ({"draft_vocab_size": 128257}, ("draft_vocab_size", "128257")),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            ("eagle_config", "use_aux_hidden_state"),
        ),
        (
            {"eagle_config": {"use_mtp_layernorm": True}},
            ("use_mtp_layernorm", "true is not supported"),
        ),
        (
            {"eagle_config": {"use_last_layernorm": False}},
            ("use_last_layernorm", "false is not supported"),
        ),
        (
            {"eagle_config": {"parallel_draft_step": 4}},
            ("parallel_draft_step", "4 is not supported"),
        ),
        ({IDS: [5, 2, 3]}, (IDS, "not ascending")),
        ({IDS: [2, 2, 3]}, (IDS, "not ascending")),
        ({IDS: "2"}, (IDS, "not a list")),
        ({IDS: [2, True]}, (IDS, "not a list")),
        ({IDS: list(range(17))}, (IDS, "more than 16")),
        ({"layer_types": ["sliding_attention"]}, ("layer_types", "not supported")),
        ({"norm_output": 1}, ("norm_output", "not true or false")),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, changed: dict, words: tuple[str, ...]
) -> None:
    write_json(tmp_path, "config.json", {**TRAINED, **changed})
    with refused(CheckpointError, "config.json", *words):
        read_model_config(tmp_path)
