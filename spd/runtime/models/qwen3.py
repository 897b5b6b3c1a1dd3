"""Qwen3 (dense): queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import Differences


def differences(config: ModelConfig) -> Differences:
    """RMS norm of each query and key head."""
    return Differences(qk_norm=True)
