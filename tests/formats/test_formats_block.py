"""Block drafters' configurations: published ones are read, unsupported ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.block import BlockConfig, ConvolutionConfig, MarkovConfig, SelectorConfig
from tests.formats.formats_helpers import write_json
from tests.helpers import read_model_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""A drafter for a Qwen3-8B."""
SELECTOR = {
    "architectures": ["DFlash2DraftModel"],
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "selector_rank": 256,
    "selector_top_k": 16,
}
"""The keys of a DFlash 2."""
SLIDING = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}


def read_block_config(folder: Path, changes: dict[str, Any]) -> BlockConfig:
    """Write a drafter's configuration and read it."""
    write_json(folder, "config.json", {**PUBLISHED, **changes})
    config = read_model_config(folder)
    assert config.block is not None and config.head_kind == "block"
    return config.block


def test_a_published_drafter_is_read(tmp_path: Path) -> None:
    block = read_block_config(tmp_path, {})
    assert (block.block_size, block.max_drafts, block.mask_token_id) == (16, 15, 151669)
    assert block.aux_layers(36) == (2, 10, 18, 26, 34) and block.target_layers == 36
    assert block.full_sees_block and not block.sliding_sees_block


def test_keys_may_stand_outside(tmp_path: Path) -> None:
    """In older files all keys stand at the top; a nested one counts before an outer one."""
    outer = {"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [3, 1]}
    block = read_block_config(tmp_path, outer)
    assert (block.mask_token_id, block.aux_layers(36)) == (7, (4, 2))
    nested = {"dflash_config": {**PUBLISHED["dflash_config"], "block_size": 8}}
    assert read_block_config(tmp_path, nested).block_size == 8


def test_a_dflash2_is_read(tmp_path: Path) -> None:
    block = read_block_config(tmp_path, SELECTOR)
    assert block.name == "DFlash 2" and block.selector == SelectorConfig(256, 16)
    assert block.convolution == ConvolutionConfig(2, 16)


@pytest.mark.parametrize(
    ("is_causal", "full", "sliding"),
    [(None, True, False), (False, True, True), (True, False, False)],
)
def test_layers_see_their_block_as_the_file_says(
    tmp_path: Path, is_causal: bool | None, full: bool, sliding: bool
) -> None:
    block = read_block_config(tmp_path, {**SLIDING, "is_causal": is_causal})
    assert (block.full_sees_block, block.sliding_sees_block) == (full, sliding)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**PUBLISHED["dflash_config"], **changes}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (nested(target_layer_ids=None), "dflash_config: target_layer_ids: is missing: it names"),
    (nested(target_layer_ids=[]), "target_layer_ids: is missing"),
    (nested(target_layer_ids=[1, 1]), r"target_layer_ids: \[1, 1\] names a layer twice"),
    (nested(target_layer_ids=list(range(17))), "names more than 16 layers"),
    (nested(target_layer_ids=[-1]), "is not a list of whole numbers"),
    (nested(mask_token_id=None), "mask_token_id: is null"),
    (nested(mask_token_id=151936), "dflash_config: mask_token_id: 151936 is not .*151935"),
    ({"block_size": 0}, "block_size: 0 is not .* 2 to 32"),
    ({"block_size": 33}, "block_size: 33 is not .* 2 to 32"),
    ({"block_size": "8"}, "block_size: '8' is not"),
    ({"is_causal": "no"}, "is_causal: 'no' is not"),
    ({"dflash_config": [1]}, r"dflash_config: \[1\] is not an object"),
    (nested(output_multiplier=0), "output_multiplier: 0 is not a number"),
    ({"architectures": ["DFlash2DraftModel"]}, "conv_group_size: is missing"),
    ({**SELECTOR, "selector_top_k": None}, "selector_top_k: is missing"),
    ({**SELECTOR, "conv_group_size": 12}, "conv_group_size: 12 does not divide hidden_size 4096"),
    ({**SELECTOR, "conv_kernel_size": 17}, "conv_kernel_size: 17 is not .* 1 to 16"),
    ({**SELECTOR, "selector_rank": 0}, "selector_rank: 0 is not"),
    ({"speculators_model_type": "peagle"}, "'peagle': drafters of this type are not supported"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_wrong_configurations_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as refusal:
        read_block_config(tmp_path, changes)
    assert "config.json" in str(refusal.value)


SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [2, 18, 36],
    "block_size": 7,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "dtype": "bfloat16",
}
"""A DSpark for a Qwen3-8B: what transformers would fill in is left out."""


def read_speculator(folder: Path, changes: dict[str, Any]) -> BlockConfig:
    """Write a configuration of `speculators` and read it."""
    write_json(folder, "config.json", {**SPECULATORS, **changes})
    config = read_model_config(folder)
    assert config.block is not None and (config.head_dim, config.dtype) == (128, "bfloat16")
    return config.block


def test_a_speculator_is_read(tmp_path: Path) -> None:
    block = read_speculator(tmp_path, {})
    assert block.aux_layers(36) == (2, 18, 36) and block.draft_vocab_size == 32000
    assert block.markov == MarkovConfig("vanilla", 256) and block.has_confidence
    assert block.drafts_from_anchor and block.max_drafts == 7 and not block.sliding_sees_block
    dflash = read_speculator(tmp_path, {"speculators_model_type": "dflash"})
    assert dflash.max_drafts == 6 and dflash.markov is None and not dflash.has_confidence
    dflash2 = {"speculators_model_type": "dflash2", "draft_vocab_size": 151936}
    choosing = read_speculator(tmp_path, dflash2)
    assert choosing.sliding_sees_block and choosing.selector == SelectorConfig(256, 16)
    plain = read_speculator(tmp_path, {"markov_rank": 0, "sample_from_anchor": False})
    assert plain.markov is None and plain.max_drafts == 6 and not plain.confidence_reads_token


WRONG_SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: is missing: it names"),
    ({"mask_token_id": None}, "mask_token_id: is null"),
    ({"markov_head_type": "deep"}, "markov_head_type: 'deep'"),
    ({"markov_rank": -1}, "markov_rank: -1 is not"),
    ({"draft_vocab_size": 0}, "draft_vocab_size: 0 is not"),
    (
        {"target_hidden_size": 2048},
        "target_hidden_size: 2048 is not the drafter's hidden_size 4096",
    ),
    ({"transformer_layer_config": None}, "transformer_layer_config: is missing"),
    ({"transformer_layer_config": {"model_type": "gemma3_text"}}, "model_type: 'gemma3_text'"),
    ({"speculators_model_type": "dflash2"}, "draft_vocab_size: 32000 is not the vocabulary's size"),
    ({"speculators_model_type": "xpress"}, "'xpress': drafters of this type are not supported"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_SPECULATORS)
def test_wrong_speculators_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_speculator(tmp_path, changes)


def test_a_target_with_fewer_layers_is_refused(tmp_path: Path) -> None:
    block = read_block_config(tmp_path, {"num_target_layers": None})
    for layers in (33, 34):  # the last layer's output is normed in the authors' code
        with pytest.raises(CheckpointError, match="streams behind 2, 10, 18, 26, 34 layers needs"):
            block.aux_layers(layers)
    assert block.aux_layers(35)
