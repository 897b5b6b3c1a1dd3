"""Architecture names and the family files that know them. Imports a family only when it is asked for."""

from __future__ import annotations

import importlib

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import ModelLayout

FAMILIES = {
    "LlamaForCausalLM": "spd.runtime.models.llama",
    "Qwen3ForCausalLM": "spd.runtime.models.qwen3",
}


def family_layout(config: ModelConfig) -> ModelLayout:
    """What the configuration's family makes of it. Raises IncompatibleError if the family is unknown."""
    if config.architecture not in FAMILIES:
        raise IncompatibleError(
            f"architecture {config.architecture} is not supported",
            reason=["known architectures: " + ", ".join(sorted(FAMILIES))],
        )
    found: ModelLayout = importlib.import_module(FAMILIES[config.architecture]).layout(config)
    return found
