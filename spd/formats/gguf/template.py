"""The chat template of a GGUF file."""

from __future__ import annotations

from spd.formats.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
from spd.formats.gguf.container import GgufFile
from spd.formats.json_file import Fields
from spd.formats.tokenizer_config import TokenizerConfig

_KEY = "tokenizer.chat_template"
"""The key of the template without tools; that for tools has a suffix."""


def read_template(file: GgufFile, config: TokenizerConfig) -> ChatTemplate | None:
    """Return a file's template, with the one for tools where it has another; None without any.

    config: its special tokens. Raises CheckpointError for a template that is no text, or too long.
    """
    fields = Fields(str(file.path), file.metadata)
    if _KEY not in fields:
        return None
    templates = {"default": fields.text(_KEY)}
    if (key := f"{_KEY}.tool_use") in fields:
        templates["tool_use"] = fields.text(key)
    for text in templates.values():
        fields.require(
            len(text) <= MAX_TEMPLATE_BYTES,
            _KEY,
            f"has more than {MAX_TEMPLATE_BYTES:,} characters",
        )
    where = f"{file.path}: {_KEY}"
    return ChatTemplate(where, templates, {**config.roles, **config.named_tokens})
