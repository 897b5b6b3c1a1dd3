"""Architecture names and what their families make of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from spd.errors import IncompatibleError
from spd.formats.assistant import ARCHITECTURE as ASSISTANT
from spd.formats.eagle3 import ARCHITECTURE as EAGLE3
from spd.formats.model_config import ModelConfig
from spd.runtime.models import assistant, eagle3, families
from spd.runtime.models.weights import ModelLayout

FAMILIES: dict[str, Callable[[ModelConfig], ModelLayout]] = {
    "LlamaForCausalLM": families.llama,
    "MistralForCausalLM": families.llama,
    "Phi3ForCausalLM": families.phi3,
    "Qwen2ForCausalLM": families.qwen2,
    "Qwen3ForCausalLM": families.qwen3,
    "Qwen3MoeForCausalLM": families.qwen3,
    "Gemma2ForCausalLM": families.gemma,
    "Gemma3ForCausalLM": families.gemma,
    "DeepseekV2ForCausalLM": families.deepseek,
    "DeepseekV3ForCausalLM": families.deepseek,
    "Glm4MoeForCausalLM": families.glm4_moe,
    "Glm4MoeLiteForCausalLM": families.deepseek,
    "Lfm2ForCausalLM": families.lfm2,
    "Lfm2MoeForCausalLM": families.lfm2,
    "Qwen3NextForCausalLM": families.qwen3_5,
    "Qwen3_5ForCausalLM": families.qwen3_5,
    "Qwen3_5MoeForCausalLM": families.qwen3_5,
    "Step3p5ForCausalLM": families.step3,
    "MiMoForCausalLM": families.qwen2,
    "MiMoV2FlashForCausalLM": families.mimo_v2,
    "Ernie4_5ForCausalLM": families.ernie4_5,
    "Ernie4_5_MoeForCausalLM": families.ernie4_5,
    "SmolLM3ForCausalLM": families.llama,
    "Olmo3ForCausalLM": families.olmo3,
    "Gemma4ForCausalLM": families.gemma4,
    "GptOssForCausalLM": families.gpt_oss,
    "GraniteForCausalLM": families.llama,
    "GraniteMoeForCausalLM": families.llama,
    "GraniteMoeHybridForCausalLM": families.granite_hybrid,
    "NemotronHForCausalLM": families.nemotron_h,
    "SeedOssForCausalLM": families.glm4_moe,
    "Ministral3ForCausalLM": families.llama,
    "Glm4ForCausalLM": families.glm4,
    "Exaone4ForCausalLM": families.olmo3,
    "Cohere2ForCausalLM": families.cohere2,
    "HunYuanDenseV1ForCausalLM": families.hunyuan,
    "MixtralForCausalLM": families.llama,
    "MiniMaxM2ForCausalLM": families.minimax_m2,
    "Qwen2MoeForCausalLM": families.qwen2,
}
LAYOUTS = FAMILIES | {EAGLE3: eagle3.layout, ASSISTANT: assistant.layout}
"""Those, and what drafts for other models only."""


def family_layout(config: ModelConfig) -> ModelLayout:
    """What the configuration's family makes of it. Raises IncompatibleError if the family is unknown."""
    if config.architecture not in LAYOUTS:
        raise IncompatibleError(
            f"architecture {config.architecture} is not supported",
            reason=["known architectures: " + ", ".join(sorted(FAMILIES))],
        )
    return LAYOUTS[config.architecture](config)
