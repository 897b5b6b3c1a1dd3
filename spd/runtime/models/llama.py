"""Llama (2, 3.x): the shared skeleton as it is."""

from __future__ import annotations

from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import Differences


def differences(config: ModelConfig) -> Differences:
    """Nothing beyond the skeleton: biases follow the configuration."""
    return Differences()
