"""Architecture names and the family files that know them. Imports a family only when it is asked for."""

from __future__ import annotations

import importlib

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import Differences

FAMILIES = {
    "LlamaForCausalLM": "spd.runtime.models.llama",
    "Qwen3ForCausalLM": "spd.runtime.models.qwen3",
}


def family_differences(config: ModelConfig) -> Differences:
    """What the configuration's family adds to the skeleton. Raises IncompatibleError if unknown."""
    if config.architecture not in FAMILIES:
        raise IncompatibleError(
            f"architecture {config.architecture} is not supported",
            reason=["known architectures: " + ", ".join(sorted(FAMILIES))],
        )
    found: Differences = importlib.import_module(FAMILIES[config.architecture]).differences(config)
    return found
