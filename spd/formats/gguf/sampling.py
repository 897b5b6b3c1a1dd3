"""How the model of a GGUF file wants to be sampled."""

from __future__ import annotations

from spd.formats.gguf.container import GgufFile
from spd.formats.json_file import Fields
from spd.formats.model_config import GenerationConfig

_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of `generation_config.json`, and the words behind `general.sampling.` that mean the same."""


def read_sampling(file: GgufFile, end_ids: tuple[int, ...]) -> GenerationConfig:
    """Return how a file's model wants to be sampled, and the ids that end a turn."""
    keys = {key: f"general.sampling.{word}" for key, word in _SAMPLING.items()}
    values = {key: _decimal(file.metadata.get(name)) for key, name in keys.items()}
    fields = Fields(str(file.path), values, keys)
    return fields.read_dataclass(GenerationConfig, eos_token_ids=end_ids)


def _decimal(value: object) -> object:
    """Return a number of 32 bits as it was written before it became one, other values as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
