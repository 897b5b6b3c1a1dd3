"""What files beside `tokenizer.json` say of tokens: roles, names of their own, and tokens that it lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tokenizers

from spd.formats.json_file import Fields, display_text, list_folder
from spd.formats.names import TOKENIZER_CONFIG_FILE

MAP_NAME = "special_tokens_map.json"
ADDED_NAME = "added_tokens.json"
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("add_bos_token", "add_eos_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_NAMED = ("extra_special_tokens", "model_specific_special_tokens")
"""Keys of objects that give special tokens names of their own, for chat templates."""
MAX_ID = (1 << 24) - 1
_ID = re.compile(r"[0-9]{1,8}")


@dataclass(frozen=True)
class TokenizerConfig:
    """Special tokens by role, further ones, and what is put around a text (`None`: not said)."""

    roles: Mapping[str, str]
    additional_tokens: tuple[str, ...]
    add_bos: bool | None
    add_eos: bool | None
    fields: Fields | None  # all of `tokenizer_config.json`
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens under other names than roles, such as `eot_token`."""
    added_tokens: Mapping[int, tokenizers.AddedToken] = field(default_factory=dict)
    """Added tokens by the ids that files beside `tokenizer.json` give them, ascending."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every token that is called special."""
        return (*self.roles.values(), *self.named_tokens.values(), *self.additional_tokens)


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Special tokens and flags; empty when the folder says nothing."""
    names = list_folder(folder)
    roles: dict[str, str] = {}
    named: dict[str, str] = {}
    additional: dict[str, None] = {}
    flags: dict[str, bool] = {}
    files = {
        name: Fields.read(folder / name)
        for name in (MAP_NAME, TOKENIZER_CONFIG_FILE)
        if name in names
    }
    for fields in files.values():  # the second wins
        roles |= {key: _content(fields, key, fields.get(key)) for key in _ROLES if key in fields}
        named |= _named_tokens(fields)
        for key in _LISTS:
            value = fields.get(key)
            if isinstance(value, list):
                additional.update((_content(fields, key, member), None) for member in value)
        flags |= {key: fields.boolean(key, False) for key in _FLAGS if key in fields}
    config = TokenizerConfig(
        roles,
        tuple(additional),
        flags.get("add_bos_token"),
        flags.get("add_eos_token"),
        files.get(TOKENIZER_CONFIG_FILE),
        named,
    )
    if config.fields is not None and "added_tokens_decoder" in config.fields:
        return replace(config, added_tokens=_declared_tokens(config.fields))
    if ADDED_NAME in names:
        listed = _listed_tokens(Fields.read(folder / ADDED_NAME), frozenset(config.special_tokens))
        return replace(config, added_tokens=listed)
    return config


def _named_tokens(fields: Fields) -> dict[str, str]:
    """Return special tokens under names of their own: of two keys, and of any key that ends in _token."""
    found: dict[str, str] = {}
    for key, value in fields.values.items():
        is_token = isinstance(value, str) or (
            isinstance(value, dict) and value.get("__type") == "AddedToken"
        )
        if key.endswith("_token") and key not in (*_ROLES, *_FLAGS) and is_token and value:
            found[key] = _content(fields, key, value)
    for key in _NAMED:
        value = fields.get(key)
        if isinstance(value, dict):
            found |= {name: _content(fields, key, member) for name, member in value.items()}
    return found


def _declared_tokens(fields: Fields) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens_decoder` by their ids."""
    found: dict[int, tokenizers.AddedToken] = {}
    decoder = fields.nested("added_tokens_decoder")
    for number in decoder.values:
        decoder.require(_ID.fullmatch(number) is not None, number, "is not a token id")
        token = decoder.nested(number)
        content = _content(token, "content", token.get("content"))
        special = token.boolean("special", False)
        found[int(number)] = tokenizers.AddedToken(
            content,
            single_word=token.boolean("single_word", False),
            lstrip=token.boolean("lstrip", False),
            rstrip=token.boolean("rstrip", False),
            normalized=token.boolean("normalized", not special),
            special=special,
        )
    return dict(sorted(found.items()))


def _listed_tokens(fields: Fields, special: frozenset[str]) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens.json` by their ids. special: those that are special."""
    found: dict[int, tokenizers.AddedToken] = {}
    for text in fields.values:
        number = fields.integer(text, 0, MAX_ID)
        fields.require(bool(text), text, "is an empty token")
        is_special = text in special
        found[number] = tokenizers.AddedToken(text, normalized=not is_special, special=is_special)
    return dict(sorted(found.items()))


def _content(fields: Fields, key: str, value: object) -> str:
    """A token is written as its text, or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise fields.field_error(key, f"{display_text(value)} is not a token")
    return content
