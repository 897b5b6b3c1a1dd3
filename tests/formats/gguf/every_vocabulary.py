"""Published vocabularies: metadata of a `tokenizer.json` as llama.cpp's converter writes it, and texts."""

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
_TEXT = """
the Hello world's I'LL they'RE don'T 3 33 333 12345678 3.14 x=y+1; def f(a, b): return foo_bar
CamelCaseWord HTTPServer naïve façade résumé Größe ÆØÅ Ωmega Привет мир नमस्ते สวัสดี 你好世界
こんにちは カタカナ 한국어 العربية עברית ½ ② Ⅻ ٣٤ 😀 👩\u200d👩\u200d👧 🇩🇪 e\u0301 a\u0300\u0301
\u200b \ufeff ſ \u212a \u212b \u2581 \u2581\u2581 </s> <s> <unk> <div> </b> [INST] <0x41> &nbsp;
#!/bin/sh {{x}} ``` *** --- === ... " ' ´ „“
"""
_WORDS = _TEXT.split()
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
    """Return what a converter writes of a `tokenizer.json` and a `tokenizer_config.json`."""
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
        kind = UNUSED if number not in texts else NORMAL
        if number in added:
            special = added[number]["special"] or _LOOKS_SPECIAL.fullmatch(text)
            kind = CONTROL if special else USER_DEFINED
            text = text if special else text.replace("\u2581", " ")
            kind = UNKNOWN if text == model["unk_token"] and not spells_bytes else kind
        elif _BYTE_TOKEN.fullmatch(text) and not spells_bytes:
            kind = BYTE
        tokens.append(text)
        types.append(kind)
    found: dict[str, GgufValue] = {
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
            found[f"tokenizer.ggml.{key}_token_id"] = tokens.index(name)
    if spells_bytes:
        pairs = (one if isinstance(one, str) else " ".join(one) for one in model["merges"])
        found["tokenizer.ggml.merges"] = tuple(pairs)
    else:
        found["tokenizer.ggml.scores"] = _scores(tokens, types)
        prepends = "Prepend" in json.dumps(file["normalizer"])
        found["tokenizer.ggml.add_space_prefix"] = prepends
    return found


def _scores(tokens: Sequence[str], types: Sequence[int]) -> tuple[float, ...]:
    """Return scores that fall with the id, and what models and the converter write for other kinds."""
    fixed = {BYTE: 0.0, UNUSED: -10000.0}
    return tuple(
        (-1e9 if set(text) == {"\u2581"} else float(-number))
        if kind == NORMAL
        else fixed.get(kind, -1000.0)
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
    )


def file_of(metadata: dict[str, GgufValue]) -> GgufFile:
    """Return a file that holds only metadata."""
    return GgufFile(Path("vocabulary.gguf"), 3, MappingProxyType(metadata), {}, {})


def random_texts(count: int, names: Sequence[str], seed: int = 0) -> list[str]:
    """Return texts of words, blanks, any characters, and the names of added tokens."""
    draw = random.Random(seed)
    return [_text(draw, names) for _ in range(count)]


def _text(draw: random.Random, names: Sequence[str]) -> str:
    parts: list[str] = []
    for _ in range(draw.randint(1, 14)):
        kind = draw.random()
        if kind < 0.45:
            parts.append(draw.choice(_WORDS))
        elif kind < 0.7:
            parts.append(draw.choice(_BLANKS))
        elif kind < 0.8 and names:
            parts.append(draw.choice(names))
        elif kind < 0.9:
            parts.append("".join(chr(draw.randint(33, 0x17F)) for _ in range(draw.randint(1, 6))))
        else:
            parts.append("".join(map(_character, (draw for _ in range(draw.randint(1, 4))))))
    return "".join(parts)


def _character(draw: random.Random) -> str:
    """Return any character but a surrogate."""
    code = draw.choice((draw.randint(0, 0x2FFF), draw.randint(0, 0x1FFFF)))
    return chr(code) if not 0xD800 <= code < 0xE000 else " "
