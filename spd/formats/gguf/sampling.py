"""Default sampling parameters of a GGUF file."""

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
"""Keys of `generation_config.json`, and the file's keys behind `general.sampling.`."""


def read_sampling(file: GgufFile, end_ids: tuple[int, ...]) -> GenerationConfig:
    """Return the default sampling parameters of a file, with the ids that end a turn."""
    keys = {key: f"general.sampling.{word}" for key, word in _SAMPLING.items()}
    values = {key: _decimal(file.metadata.get(name)) for key, name in keys.items()}
    fields = Fields(str(file.path), values, keys)
    return fields.read_dataclass(GenerationConfig, eos_token_ids=end_ids)


def _decimal(value: object) -> object:
    """Return a float32 as the decimal that it was rounded from, other values as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
