"""The chat template of a GGUF file, and how its model wants to be sampled."""

from __future__ import annotations

from spd.formats.chat_template import TEMPLATE_LIMIT, ChatTemplate
from spd.formats.gguf.container import GgufFile
from spd.formats.json_file import Fields
from spd.formats.model_config import GenerationConfig
from spd.formats.tokenizer_config import TokenizerConfig

_KEY = "tokenizer.chat_template"
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of `generation_config.json`, and the words behind `general.sampling.` that mean the same."""


def read_template(file: GgufFile, config: TokenizerConfig) -> ChatTemplate | None:
    """Return a file's template, with the one for tools where it has another; None without any.

    config: its special words. Raises CheckpointError for a template that is no text, or too long.
    """
    fields = Fields(str(file.path), file.metadata)
    if _KEY not in fields:
        return None
    templates = {"default": fields.text(_KEY)}
    if (key := f"{_KEY}.tool_use") in fields:
        templates["tool_use"] = fields.text(key)
    for text in templates.values():
        fields.require(
            len(text) <= TEMPLATE_LIMIT, _KEY, f"has more than {TEMPLATE_LIMIT:,} characters"
        )
    where = f"{file.path}: {_KEY}"
    return ChatTemplate(where, templates, {**config.roles, **config.named})


def read_sampling(file: GgufFile, end_ids: tuple[int, ...]) -> GenerationConfig:
    """Return how a file's model wants to be sampled, and the ids that end a turn."""
    keys = {key: f"general.sampling.{word}" for key, word in _SAMPLING.items()}
    values = {key: _decimal(file.metadata.get(name)) for key, name in keys.items()}
    fields = Fields(str(file.path), values, keys)
    return fields.facts(GenerationConfig, eos_token_ids=end_ids)


def _decimal(value: object) -> object:
    """Return a number of 32 bits as it was written before it became one, other values as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
