"""Architecture names and what their families make of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.runtime.models import eagle3
from spd.runtime.models.families import llama, variants
from spd.runtime.models.weights import ModelLayout

FAMILIES: dict[str, Callable[[ModelConfig], ModelLayout]] = {
    "LlamaForCausalLM": llama.layout,
    "MistralForCausalLM": llama.layout,
    "Phi3ForCausalLM": variants.phi3,
    "Qwen2ForCausalLM": variants.qwen2,
    "Qwen3ForCausalLM": variants.qwen3,
    "Qwen3MoeForCausalLM": variants.qwen3,
    "Gemma2ForCausalLM": variants.gemma,
    "Gemma3ForCausalLM": variants.gemma,
    "DeepseekV2ForCausalLM": variants.deepseek,
    "DeepseekV3ForCausalLM": variants.deepseek,
    "Glm4MoeForCausalLM": variants.glm4_moe,
    "Glm4MoeLiteForCausalLM": variants.deepseek,
    "Lfm2ForCausalLM": variants.lfm2,
    "Lfm2MoeForCausalLM": variants.lfm2,
    "Qwen3NextForCausalLM": variants.qwen3_5,
    "Qwen3_5ForCausalLM": variants.qwen3_5,
    "Qwen3_5MoeForCausalLM": variants.qwen3_5,
    "MiMoForCausalLM": variants.qwen2,
    "Ernie4_5ForCausalLM": variants.ernie4_5,
    "Ernie4_5_MoeForCausalLM": variants.ernie4_5,
    "SmolLM3ForCausalLM": llama.layout,
    "Olmo3ForCausalLM": variants.olmo3,
    "Gemma4ForCausalLM": variants.gemma4,
    "GptOssForCausalLM": variants.gpt_oss,
    "GraniteForCausalLM": llama.layout,
    "GraniteMoeForCausalLM": llama.layout,
    "GraniteMoeHybridForCausalLM": variants.granite_hybrid,
    "NemotronHForCausalLM": variants.nemotron_h,
    "SeedOssForCausalLM": variants.glm4_moe,
    "Ministral3ForCausalLM": llama.layout,
    "Glm4ForCausalLM": variants.glm4,
    "Exaone4ForCausalLM": variants.olmo3,
    "Cohere2ForCausalLM": variants.cohere2,
    "HunYuanDenseV1ForCausalLM": variants.hunyuan,
    "MixtralForCausalLM": llama.layout,
    "Qwen2MoeForCausalLM": variants.qwen2,
}


def family_layout(config: ModelConfig) -> ModelLayout:
    """What the configuration's family makes of it. Raises IncompatibleError if the family is unknown."""
    known = {**FAMILIES, "LlamaForCausalLMEagle3": eagle3.layout}  # a head, and no model itself
    if config.architecture not in known:
        raise IncompatibleError(
            f"architecture {config.architecture} is not supported",
            reason=["known architectures: " + ", ".join(sorted(FAMILIES))],
        )
    return known[config.architecture](config)
