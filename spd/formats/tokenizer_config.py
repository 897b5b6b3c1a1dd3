"""The names beside a tokenizer: which token begins and ends a sequence, and the chat template's source.

Read from `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and
`chat_template.json`; all are optional. Classes that these files name are never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.json_file import CONFIG_LIMIT, Fields, names_in, read_json_object, read_text, shown

CONFIG_NAME = "tokenizer_config.json"
MAP_NAME = "special_tokens_map.json"
TEMPLATE_LIMIT = 1_000_000  # bytes; the longest published template is below 50 kB
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerConfig:
    """Special tokens by role, further ones, and what is put around a text (`None`: not said)."""

    roles: Mapping[str, str]
    additional: tuple[str, ...]
    add_bos: bool | None
    add_eos: bool | None


@dataclass(frozen=True)
class TemplateSource:
    """The text of a chat template, and of the one for tools if it is another; `where` names the file."""

    where: str
    default: str
    tool_use: str | None = None


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Special tokens and flags; empty when the folder says nothing. Raises `CheckpointError`."""
    names = names_in(folder)
    roles: dict[str, str] = {}
    additional: dict[str, None] = {}
    flags: dict[str, bool] = {}
    for name in (MAP_NAME, CONFIG_NAME):  # the second wins
        if name not in names:
            continue
        fields = Fields(str(folder / name), read_json_object(folder / name))
        for key in _ROLES:
            if key in fields:
                roles[key] = _content(fields, key, fields.get(key))
        for key in _LISTS:
            value = fields.get(key)
            members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            additional.update((_content(fields, key, member), None) for member in members)
        flags.update(
            (key, fields.boolean(key, False)) for key in ("add_bos_token", "add_eos_token") if key in fields
        )
    return TokenizerConfig(roles, tuple(additional), flags.get("add_bos_token"), flags.get("add_eos_token"))


def _content(fields: Fields, key: str, value: object) -> str:
    """A token is written as its text, or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise fields.refused(key, f"{shown(value)} is not a token")
    return content


def read_template_source(folder: Path) -> TemplateSource | None:
    """The chat template of a folder, `None` without one; a file of its own wins over the config.

    Raises `CheckpointError` naming file and field.
    """
    names = names_in(folder)
    if "chat_template.jinja" in names:
        path = folder / "chat_template.jinja"
        return TemplateSource(str(path), read_text(path, TEMPLATE_LIMIT))
    for name in ("chat_template.json", CONFIG_NAME):
        if name not in names:
            continue
        fields = Fields(str(folder / name), read_json_object(folder / name, CONFIG_LIMIT))
        if "chat_template" in fields:
            return _template_of(fields)
    return None


def _template_of(fields: Fields) -> TemplateSource:
    value = fields.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    else:
        for entry in value if isinstance(value, list) else [None]:
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(key), str) for key in ("name", "template")
            ):
                raise fields.refused("chat_template", "is neither a string nor a list of named templates")
            templates[entry["name"]] = entry["template"]
    if "default" not in templates:
        raise fields.refused(
            "chat_template", f"has no template named default, only {shown(sorted(templates))}"
        )
    if any(len(template) > TEMPLATE_LIMIT for template in templates.values()):
        raise CheckpointError(f"{fields.where}: chat_template: is longer than {TEMPLATE_LIMIT:,} characters")
    return TemplateSource(f"{fields.where}: chat_template", templates["default"], templates.get("tool_use"))
