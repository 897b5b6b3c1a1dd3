"""Folders of models that read images too, as `transformers` saves them: the text equals its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import (
    assert_matches_transformers,
    make_engine,
    random_prompts,
    read_model_config,
)
from tests.recipes.tiny import write_json, write_tokenizer

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
QUERY_GROWTH = {
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2}
}
VISION_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VISION = {
    **VISION_SIZES,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "model_type": "pixtral",
}
GEMMA4 = {
    **SMALL,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
UNIFIED = {**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
UNIFIED["model_type"] = "gemma4_unified_text"
GEMMA4_VISION = {**VISION_SIZES, "num_key_value_heads": 2, "head_dim": 8}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
INTERN_VISION = {**VISION_SIZES, "image_size": [28, 28]}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}


def make_wrapper_config(
    vision: dict[str, Any], other_keys: dict[str, Any], **text: Any
) -> dict[str, Any]:
    return {"text_config": {**SMALL, **text}, "vision_config": vision, **other_keys}


STEP3 = {
    "model_type": "step3p5",
    "sliding_window": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_sliding_attention_heads": 6,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "swiglu_limits": [0, 0.5, 0],
    "swiglu_limits_shared": [0.6, 0.4, None],
}
GLIMMER: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "sliding_window": 24,
    "num_hidden_layers": 5,
    "qk_scale_factor": 2.5,
    "output_multiplier": 1.7,
    "post_norm_eps": 1e-3,
}
GLIMMER_VISION = {**VISION_SIZES, "model_type": "muse_glimmer_vision"}
GLIMMER_PROJECTOR = {"out_hidden_size": 64, "projector_hidden_size": 16}
SIGLIP = {**VISION_SIZES, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
TIED = {"tie_word_embeddings": True}
WITHOUT_AUDIO = {"audio_config": None, "tie_word_embeddings": True}
GEMMA3_TEXT = {"model_type": "gemma3_text", "sliding_window": 24}
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "Qwen3VLForConditionalGeneration",
        make_wrapper_config(QWEN_VISION, {}, model_type="qwen3_vl_text", **MROPE),
    ),
    (
        "Qwen2_5_VLForConditionalGeneration",
        make_wrapper_config(QWEN_VISION, {}, model_type="qwen2_5_vl_text", **MROPE),
    ),
    (
        "InternVLForConditionalGeneration",
        make_wrapper_config(INTERN_VISION, {}, model_type="qwen2"),
    ),
    (
        "InternVLForConditionalGeneration",
        make_wrapper_config(INTERN_VISION, {}, model_type="qwen3"),
    ),
    ("Mistral3ForConditionalGeneration", make_wrapper_config(VISION, {}, model_type="mistral")),
    (
        "Mistral3ForConditionalGeneration",
        make_wrapper_config(VISION, {}, model_type="ministral3", **QUERY_GROWTH),
    ),
    (
        "Step3p7ForConditionalGeneration",
        make_wrapper_config({**VISION, "model_type": "step3p5_vision"}, {}, **STEP3),
    ),
    (
        "MuseGlimmerForConditionalGeneration",
        make_wrapper_config(GLIMMER_VISION, GLIMMER_PROJECTOR, **GLIMMER),
    ),
    (
        "Gemma3ForConditionalGeneration",
        make_wrapper_config(SIGLIP, {**TIED, "mm_tokens_per_image": 4}, **GEMMA3_TEXT),
    ),
    (
        "Gemma4ForConditionalGeneration",
        make_wrapper_config(GEMMA4_VISION, WITHOUT_AUDIO, **GEMMA4, model_type="gemma4_text"),
    ),
    ("Gemma4UnifiedForConditionalGeneration", make_wrapper_config({}, WITHOUT_AUDIO, **UNIFIED)),
    ("Gemma4UnifiedForCausalLM", UNIFIED),
]
WRAPPED = {name: [config] for name, config in CASES}


def randomize(model: Any) -> None:
    """Set random weights by which greedy text does not repeat itself."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            weight.copy_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
        else:
            std = 0.05 if "embed_tokens" in name else 1.4 / weight.shape[-1] ** 0.5
            weight.copy_(std * torch.randn(weight.shape, generator=generator))


def test_both_published_forms_of_qwen2_5_vl_are_read(tmp_path: Path) -> None:
    """The text's keys are among the others; the file of version 5 has the same values."""
    outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    text = {
        **SMALL,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
    }
    configs: list[dict[str, Any]] = [{**outer, **text}, {**outer, "text_config": text}]
    configs_read = []
    for number, config in enumerate(configs):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_json(
            folder / "config.json", {**config, "vision_config": {"depth": 1}, "image_token_id": 300}
        )
        configs_read.append(read_model_config(folder))
    assert configs_read[0] == configs_read[1] and configs_read[0].architecture == "Qwen2ForCausalLM"
    assert configs_read[0].rope.theta == 1e6


@pytest.mark.covers(count=3)
@pytest.mark.parametrize(("name", "config"), CASES)
def test_text_of_a_saved_wrapper_equals_transformers(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    model_config = model_class.config_class(
        **{"tie_word_embeddings": False, **config}, architectures=[name]
    )
    with torch.inference_mode():
        reference = model_class(model_config).eval()
        randomize(reference)
        reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 320, 512)
    assert_matches_transformers(
        reference, make_engine(tmp_path), random_prompts(1, 90, 250, seed=3)[0]
    )
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
