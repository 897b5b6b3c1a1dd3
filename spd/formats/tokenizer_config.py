"""Tokens in the files beside `tokenizer.json`: roles, further names, additional tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tokenizers

from spd.formats.json_file import Fields, display_text, list_folder
from spd.formats.names import TOKENIZER_CONFIG_FILE

SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
_ROLE_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAG_KEYS = ("add_bos_token", "add_eos_token")
_LIST_KEYS = ("additional_special_tokens", "extra_special_tokens")
_NAMED_TOKEN_KEYS = ("extra_special_tokens", "model_specific_special_tokens")
"""Keys of objects that give special tokens names for chat templates."""
MAX_TOKEN_ID = (1 << 24) - 1
"""The highest token id in a file."""
_ID = re.compile(r"[0-9]{1,8}")


@dataclass(frozen=True)
class TokenizerConfig:
    """Special tokens by role, further ones, and flags for those around a text (`None`: absent)."""

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
        """Every special token, by role, by name, and the additional ones."""
        return (*self.roles.values(), *self.named_tokens.values(), *self.additional_tokens)


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read special tokens and flags of a folder; empty where it has no such file.

    Raises CheckpointError.
    """
    names = list_folder(folder)
    roles: dict[str, str] = {}
    named_tokens: dict[str, str] = {}
    additional_tokens: dict[str, None] = {}
    flags: dict[str, bool] = {}
    files = {
        name: Fields.read(folder / name)
        for name in (SPECIAL_TOKENS_MAP_FILE, TOKENIZER_CONFIG_FILE)
        if name in names
    }
    for fields in files.values():  # the second wins
        roles |= {
            key: _token_content(fields, key, fields.get(key)) for key in _ROLE_KEYS if key in fields
        }
        named_tokens |= _read_named_tokens(fields)
        for key in _LIST_KEYS:
            value = fields.get(key)
            if isinstance(value, list):
                additional_tokens.update(
                    (_token_content(fields, key, member), None) for member in value
                )
        flags |= {key: fields.boolean(key, False) for key in _FLAG_KEYS if key in fields}
    config = TokenizerConfig(
        roles=roles,
        additional_tokens=tuple(additional_tokens),
        add_bos=flags.get("add_bos_token"),
        add_eos=flags.get("add_eos_token"),
        fields=files.get(TOKENIZER_CONFIG_FILE),
        named_tokens=named_tokens,
    )
    if config.fields is not None and "added_tokens_decoder" in config.fields:
        return replace(config, added_tokens=_read_added_tokens_decoder(config.fields))
    if ADDED_TOKENS_FILE in names:
        added_tokens = _read_added_tokens_file(
            Fields.read(folder / ADDED_TOKENS_FILE), frozenset(config.special_tokens)
        )
        return replace(config, added_tokens=added_tokens)
    return config


def _read_named_tokens(fields: Fields) -> dict[str, str]:
    """Return special tokens by other names: of two keys, and of any key that ends in _token."""
    tokens: dict[str, str] = {}
    for key, value in fields.values.items():
        is_token = isinstance(value, str) or (
            isinstance(value, dict) and value.get("__type") == "AddedToken"
        )
        if key.endswith("_token") and key not in (*_ROLE_KEYS, *_FLAG_KEYS) and is_token and value:
            tokens[key] = _token_content(fields, key, value)
    for key in _NAMED_TOKEN_KEYS:
        value = fields.get(key)
        if isinstance(value, dict):
            tokens |= {name: _token_content(fields, key, member) for name, member in value.items()}
    return tokens


def _read_added_tokens_decoder(fields: Fields) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens_decoder` by their ids."""
    tokens: dict[int, tokenizers.AddedToken] = {}
    decoder = fields.nested("added_tokens_decoder")
    for number in decoder.values:
        decoder.require(_ID.fullmatch(number) is not None, number, "is not a token id")
        token = decoder.nested(number)
        content = _token_content(token, "content", token.get("content"))
        special = token.boolean("special", False)
        tokens[int(number)] = tokenizers.AddedToken(
            content,
            single_word=token.boolean("single_word", False),
            lstrip=token.boolean("lstrip", False),
            rstrip=token.boolean("rstrip", False),
            normalized=token.boolean("normalized", not special),
            special=special,
        )
    return dict(sorted(tokens.items()))


def _read_added_tokens_file(
    fields: Fields, special: frozenset[str]
) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens.json` by their ids.

    special: the special ones among them.
    """
    tokens: dict[int, tokenizers.AddedToken] = {}
    for text in fields.values:
        number = fields.integer(text, 0, MAX_TOKEN_ID)
        fields.require(bool(text), text, "is an empty token")
        is_special = text in special
        tokens[number] = tokenizers.AddedToken(text, normalized=not is_special, special=is_special)
    return dict(sorted(tokens.items()))


def _token_content(fields: Fields, key: str, value: object) -> str:
    """Return the text of a token, which is written as it is, or as an object that holds it.

    Raises CheckpointError for another value.
    """
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise fields.field_error(key, f"{display_text(value)} is not a token")
    return content
