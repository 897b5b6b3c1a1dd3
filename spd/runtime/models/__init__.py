"""The layouts of all supported architectures, by name."""

from __future__ import annotations

from collections.abc import Callable

from spd.formats.assistant import ASSISTANT_ARCHITECTURE
from spd.formats.block import BLOCK_ARCHITECTURE
from spd.formats.checkpoint import Checkpoint
from spd.formats.eagle3 import EAGLE3_ARCHITECTURE
from spd.formats.model_config import ModelConfig
from spd.runtime.models import assistant, block, eagle3, families
from spd.runtime.models.weights import ModelLayout, check_weights

_CLASS_NAMES: dict[Callable[[ModelConfig], ModelLayout], str] = {
    families.llama: "Llama Mistral SmolLM3 Granite GraniteMoe Ministral Ministral3 Mixtral",
    families.phi3: "Phi3",
    families.qwen2: "Qwen2 MiMo Qwen2Moe",
    families.qwen3: "Qwen3 Qwen3Moe",
    families.gemma: "Gemma Gemma2 Gemma3",
    families.arcee: "Arcee",
    families.deepseek: "DeepseekV2 DeepseekV3 Glm4MoeLite",
    families.glm4_moe: "Glm4Moe SeedOss",
    families.lfm2: "Lfm2 Lfm2Moe",
    families.qwen3_5: "Qwen3Next Qwen3_5 Qwen3_5Moe",
    families.step3: "Step3p5",
    families.mimo_v2: "MiMoV2Flash",
    families.ernie4_5: "Ernie4_5 Ernie4_5_Moe",
    families.olmo3: "Olmo2 Olmo3 Exaone4",
    families.gemma4: "Gemma4 Gemma4Unified",
    families.muse_glimmer: "MuseGlimmer",
    families.gpt_oss: "GptOss",
    families.granite_hybrid: "GraniteMoeHybrid",
    families.nemotron_h: "NemotronH",
    families.glm4: "Glm Glm4",
    families.cohere2: "Cohere Cohere2",
    families.hunyuan: "HunYuanDenseV1 HunYuanMoEV1",
    families.minimax_m2: "MiniMaxM2",
}
"""Functions of families, and the classes that they lay out, without ForCausalLM."""
FAMILIES = {
    f"{name}ForCausalLM": layout for layout, names in _CLASS_NAMES.items() for name in names.split()
}
"""The layout functions of models, by architecture."""
LAYOUTS = FAMILIES | {
    EAGLE3_ARCHITECTURE: eagle3.layout,
    ASSISTANT_ARCHITECTURE: assistant.layout,
    BLOCK_ARCHITECTURE: block.layout,
}
"""The layout functions of models, and of heads that only draft."""


def family_layout(config: ModelConfig) -> ModelLayout:
    """Return the layout of a model, by its architecture."""
    return LAYOUTS[config.architecture](config)


def unused_tensors(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Check a checkpoint's tensors against a model or a head; return the names that it does not
    use.

    Raises one CheckpointError for all tensors that it lacks, or has in another shape or dtype.
    """
    if config.eagle3 is not None:
        return eagle3.check_eagle3(config, checkpoint)
    if config.block is not None:
        return block.check_block(config, checkpoint)
    if config.assistant is not None:
        return assistant.check_assistant(config, checkpoint)
    return check_weights(checkpoint, config, family_layout(config))
