"""Metadata of published vocabularies, as llama.cpp's converter writes it, and random texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spd.formats.gguf.container import GgufFile, GgufValue
from spd.formats.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>", re.DOTALL)
_SAMPLE_TEXT = """
the Hello world's I'LL they'RE don'T 3 33 333 12345678 3.14 x=y+1; def f(a, b): return foo_bar
CamelCaseWord HTTPServer naïve façade résumé Größe ÆØÅ Ωmega Привет мир नमस्ते สวัสดี 你好世界
こんにちは カタカナ 한국어 العربية עברית ½ ② Ⅻ ٣٤ 😀 👩\u200d👩\u200d👧 🇩🇪 e\u0301 a\u0300\u0301
\u200b \ufeff ſ \u212a \u212b \u2581 \u2581\u2581 </s> <s> <unk> <div> </b> [INST] <0x41> &nbsp;
#!/bin/sh {{x}} ``` *** --- === ... " ' ´ „“
"""
_WORDS = _SAMPLE_TEXT.split()
_BLANKS = (
    "\u2028",
    "\r",
    " ",
    "  ",
    "   ",
    "     ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n ",
    "\u3000",
    "\u00a0",
)


def metadata_of(file: dict[str, Any], pre: str, config: dict[str, Any]) -> dict[str, GgufValue]:
    """Return the metadata that a converter makes of the files of a tokenizer."""
    model = file["model"]
    added = {token["id"]: token for token in file["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    size = max(texts) + 3
    spells_bytes = not model["byte_fallback"]
    tokens: list[str] = []
    types: list[int] = []
    for number in range(size):
        text = texts.get(number, f"[PAD{number}]")
        token_type = UNUSED if number not in texts else NORMAL
        if number in added:
            special = added[number]["special"] or _LOOKS_SPECIAL.fullmatch(text)
            token_type = CONTROL if special else USER_DEFINED
            text = text if special else text.replace("\u2581", " ")
            token_type = UNKNOWN if text == model["unk_token"] and not spells_bytes else token_type
        elif _BYTE_TOKEN.fullmatch(text) and not spells_bytes:
            token_type = BYTE
        tokens.append(text)
        types.append(token_type)
    metadata: dict[str, GgufValue] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2" if spells_bytes else "llama",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.add_bos_token": bool(config.get("add_bos_token", False)),
    }
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        name = config.get(role)
        name = name["content"] if isinstance(name, dict) else name
        if name in tokens:
            metadata[f"tokenizer.ggml.{key}_token_id"] = tokens.index(name)
    if spells_bytes:
        pairs = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        metadata["tokenizer.ggml.merges"] = tuple(pairs)
    else:
        metadata["tokenizer.ggml.scores"] = _scores(tokens, types)
        prepends = "Prepend" in json.dumps(file["normalizer"])
        metadata["tokenizer.ggml.add_space_prefix"] = prepends
    return metadata


def _scores(tokens: Sequence[str], types: Sequence[int]) -> tuple[float, ...]:
    """Return scores that fall with the id, and the converter's scores of other types."""
    fixed_scores = {BYTE: 0.0, UNUSED: -10000.0}
    return tuple(
        (-1e9 if set(text) == {"\u2581"} else float(-number))
        if token_type == NORMAL
        else fixed_scores.get(token_type, -1000.0)
        for number, (text, token_type) in enumerate(zip(tokens, types, strict=True))
    )


def file_of(metadata: dict[str, GgufValue]) -> GgufFile:
    """Return a file that holds only metadata."""
    return GgufFile(
        path=Path("vocabulary.gguf"),
        version=3,
        metadata=MappingProxyType(metadata),
        tensors={},
        identities={},
    )


def random_texts(count: int, names: Sequence[str], seed: int = 0) -> list[str]:
    """Return texts of words, blanks, any characters, and the names of added tokens."""
    draw = random.Random(seed)
    return [_random_text(draw, names) for _ in range(count)]


def _random_text(draw: random.Random, names: Sequence[str]) -> str:
    parts: list[str] = []
    for _ in range(draw.randint(1, 14)):
        choice = draw.random()
        if choice < 0.45:
            parts.append(draw.choice(_WORDS))
        elif choice < 0.7:
            parts.append(draw.choice(_BLANKS))
        elif choice < 0.8 and names:
            parts.append(draw.choice(names))
        elif choice < 0.9:
            parts.append("".join(chr(draw.randint(33, 0x17F)) for _ in range(draw.randint(1, 6))))
        else:
            parts.append("".join(map(_random_character, (draw for _ in range(draw.randint(1, 4))))))
    return "".join(parts)


def _random_character(draw: random.Random) -> str:
    """Return a random character that is no surrogate."""
    code = draw.choice((draw.randint(0, 0x2FFF), draw.randint(0, 0x1FFFF)))
    return chr(code) if not 0xD800 <= code < 0xE000 else " "
