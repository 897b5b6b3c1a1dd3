"""EAGLE-3 heads' configurations: published ones are read, unsupported ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.eagle3 import EAGLE3_ARCHITECTURE, Eagle3Config
from spd.formats.model_config import ModelConfig
from tests.formats.formats_helpers import LLAMA, raises_spd_error, write_json
from tests.helpers import read_model_config

# A Llama-3.1-8B head as first published: only draft_vocab_size distinguishes it from a Llama.
FIRST_PUBLISHED: dict[str, Any] = {
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
OWN_ARCHITECTURE = {**FIRST_PUBLISHED, "architectures": ["LlamaForCausalLMEagle3"]}
LAYER = {key: value for key, value in FIRST_PUBLISHED.items() if key != "draft_vocab_size"}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "transformer_layer_config": LAYER,
    "torch_dtype": "bfloat16",
}


def read_config(folder: Path, config: dict[str, Any]) -> ModelConfig:
    """Write a configuration and read it."""
    write_json(folder, "config.json", config)
    return read_model_config(folder)


def read_head_config(folder: Path, config: dict[str, Any]) -> Eagle3Config:
    """Write a head's configuration and read it."""
    head = read_config(folder, config).eagle3
    assert head is not None
    return head


def test_a_head_is_read_as_first_published(tmp_path: Path) -> None:
    config = read_config(tmp_path, FIRST_PUBLISHED)
    assert (config.architecture, config.num_layers, config.hidden_size) == (
        EAGLE3_ARCHITECTURE,
        1,
        4096,
    )
    assert (config.vocab_size, config.dtype, config.tie_embeddings) == (128256, "float16", False)
    assert config.bos_token_id is None and config.eos_token_ids == ()
    assert config.eagle3 == Eagle3Config(
        target_hidden_size=4096,
        draft_vocab_size=32000,
        configured_layers=None,
        num_aux_layers=3,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    assert config.eagle3.aux_layers(32) == (2, 16, 29)
    assert (
        read_head_config(tmp_path, {**OWN_ARCHITECTURE, "draft_vocab_size": None}).draft_vocab_size
        == OWN_ARCHITECTURE["vocab_size"]
    )
    narrower = {**FIRST_PUBLISHED, "hidden_size": 6144, "target_hidden_size": 8192}
    assert read_head_config(tmp_path, narrower).target_hidden_size == 8192
    assert read_config(tmp_path, LLAMA).eagle3 is None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "deepseek_v3"])
def test_trainers_write_their_target_s_ids(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    ids = {"vocab_size": 129280, "bos_token_id": 151643, "eos_token_id": 151645}
    written = {**OWN_ARCHITECTURE, **ids, "architectures": [architecture], "model_type": model_type}
    assert read_head_config(tmp_path, written).draft_vocab_size == 32000


IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_IDS = "aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({**OWN_ARCHITECTURE, IDS: [2, 18, 33]}, (2, 18, 33)),
        ({**OWN_ARCHITECTURE, OTHER_IDS: [0, 36]}, (0, 36)),
        ({**OWN_ARCHITECTURE, "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
        ({**OWN_ARCHITECTURE, "eagle_config": {IDS: [], "use_last_layernorm": True}}, None),
        ({**SPECULATORS, IDS: [2, 18, 33]}, (2, 18, 33)),
        (SPECULATORS, None),
    ],
)
def test_layers_are_read_in_the_convention_of_their_key(
    tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    """A top-level key counts passed layers; one in eagle_config is the layer of an output."""
    head = read_head_config(tmp_path, config)
    assert head.configured_layers == layers and head.num_aux_layers == len(layers or (1, 2, 3))
    assert head.aux_layers(36) == (layers or (2, 18, 33))


def test_layers_beyond_the_target_are_refused(tmp_path: Path) -> None:
    config = read_head_config(tmp_path, {**OWN_ARCHITECTURE, IDS: [2, 18, 33]})
    assert config.aux_layers(33) == (2, 18, 33)
    with pytest.raises(CheckpointError, match="behind 2, 18, 33 layers") as caught:
        config.aux_layers(32)
    assert caught.value.reason == ("the target has 32 layers",)


def test_the_speculators_layout_is_read(tmp_path: Path) -> None:
    config = read_config(tmp_path, SPECULATORS)
    assert config.eagle3 == Eagle3Config(
        target_hidden_size=4096,
        draft_vocab_size=32000,
        configured_layers=None,
        num_aux_layers=3,
        norm_before_residual=True,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    flags = {
        "norm_before_residual": False,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    }
    head = read_head_config(tmp_path, {**SPECULATORS, **flags})
    assert head == Eagle3Config(
        target_hidden_size=4096,
        draft_vocab_size=32000,
        configured_layers=None,
        num_aux_layers=3,
        norm_before_residual=False,
        norm_before_fc=True,
        fc_norm=True,
        norm_output=True,
    )
    inside = {**SPECULATORS, "transformer_layer_config": {**LAYER, "torch_dtype": None}}
    assert read_config(tmp_path, inside).dtype == "bfloat16"


UNSUPPORTED_LAYER = {**SPECULATORS, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (UNSUPPORTED_LAYER, ("transformer_layer_config", "'qwen3' is not supported (llama is)")),
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
    tmp_path: Path, changes: dict, words: tuple[str, ...]
) -> None:
    write_json(tmp_path, "config.json", {**OWN_ARCHITECTURE, **changes})
    with raises_spd_error(CheckpointError, "config.json", *words):
        read_model_config(tmp_path)
