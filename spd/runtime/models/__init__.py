"""Architecture names and the family files that know them. Imports a family only when it is needed."""

from __future__ import annotations

import importlib

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import ModelLayout

FAMILIES = {
    "LlamaForCausalLM": "spd.runtime.models.families.llama",
    "MistralForCausalLM": "spd.runtime.models.families.llama",
    "Phi3ForCausalLM": "spd.runtime.models.families.phi3",
    "Qwen2ForCausalLM": "spd.runtime.models.families.qwen2",
    "Qwen3ForCausalLM": "spd.runtime.models.families.qwen3",
    "Qwen3MoeForCausalLM": "spd.runtime.models.families.qwen3",
    "Gemma2ForCausalLM": "spd.runtime.models.families.gemma",
    "Gemma3ForCausalLM": "spd.runtime.models.families.gemma",
    "DeepseekV2ForCausalLM": "spd.runtime.models.families.deepseek",
    "DeepseekV3ForCausalLM": "spd.runtime.models.families.deepseek",
    "Glm4MoeForCausalLM": "spd.runtime.models.families.glm4_moe",
    "Qwen3NextForCausalLM": "spd.runtime.models.families.qwen3_5",
    "Qwen3_5ForCausalLM": "spd.runtime.models.families.qwen3_5",
    "Qwen3_5MoeForCausalLM": "spd.runtime.models.families.qwen3_5",
    "MiMoForCausalLM": "spd.runtime.models.families.mimo",
    "Ernie4_5ForCausalLM": "spd.runtime.models.families.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "spd.runtime.models.families.ernie4_5",
    "SmolLM3ForCausalLM": "spd.runtime.models.families.llama",
    "Olmo3ForCausalLM": "spd.runtime.models.families.olmo3",
    "Gemma4ForCausalLM": "spd.runtime.models.families.gemma4",
    "GptOssForCausalLM": "spd.runtime.models.families.gpt_oss",
    "GraniteForCausalLM": "spd.runtime.models.families.llama",
    "GraniteMoeForCausalLM": "spd.runtime.models.families.llama",
    "SeedOssForCausalLM": "spd.runtime.models.families.glm4_moe",
    "Ministral3ForCausalLM": "spd.runtime.models.families.llama",
    "Glm4ForCausalLM": "spd.runtime.models.families.glm4",
    "Exaone4ForCausalLM": "spd.runtime.models.families.olmo3",
    "Cohere2ForCausalLM": "spd.runtime.models.families.cohere2",
    "HunYuanDenseV1ForCausalLM": "spd.runtime.models.families.hunyuan",
    "MixtralForCausalLM": "spd.runtime.models.families.llama",
    "Qwen2MoeForCausalLM": "spd.runtime.models.families.qwen2",
}
HEADS = {"LlamaForCausalLMEagle3": "spd.runtime.models.eagle3"}
"""Heads that draft for a model and are no models themselves."""


def family_layout(config: ModelConfig) -> ModelLayout:
    """What the configuration's family makes of it. Raises IncompatibleError if the family is unknown."""
    known = FAMILIES | HEADS
    if config.architecture not in known:
        raise IncompatibleError(
            f"architecture {config.architecture} is not supported",
            reason=["known architectures: " + ", ".join(sorted(FAMILIES))],
        )
    found: ModelLayout = importlib.import_module(known[config.architecture]).layout(config)
    return found
