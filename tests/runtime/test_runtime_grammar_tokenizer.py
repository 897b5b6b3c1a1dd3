"""The vocabulary of a grammar is the tokenizer's, and names of control tokens in it are text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spd.formats.folder import ModelFolder
from spd.formats.tokenizer import Tokenizer
from spd.runtime.engine.grammar import GrammarCompiler
from spd.runtime.engine.grammar_tokenizer import GrammarVocabulary
from spd.runtime.engine.request import GrammarSpec

END = 256
MARK = 257
NAMES = ("<tool_call>", "</tool_call>", "plain", "[X]")
WORDS = 288


def opened(
    folder: Path, config: dict[str, Any] | None = None, names: Sequence[str] = ()
) -> Tokenizer:
    """Return a tokenizer of the 256 bytes, `<|end|>` and added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return Tokenizer.open(folder)


def allowed(row: torch.Tensor) -> list[int]:
    return [token for token in range(WORDS) if int(row[token >> 5]) >> (token & 31) & 1]


def walk(tokenizer: Tokenizer, grammar: GrammarSpec) -> list[int]:
    """Return a text of a grammar, by the last token that each mask allows.

    Each allowed token is taken as a draft first: it has to lead where the mask says.
    """
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(grammar, (END,))
    assert state is not None
    tokens: list[int] = []
    while not state.is_finished and len(tokens) < 100:
        rows = torch.empty(2, WORDS // 32, dtype=torch.int32)
        state.write_masks((), rows)
        choices = [token for token in allowed(rows[0]) if token != END]
        if not choices:
            break
        for token in choices:
            assert state.write_masks((token,), rows) == 1, (tokens, token)
        state.accept_token(choices[-1])
        tokens.append(choices[-1])
    return tokens


def one_key(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"const": 1}},
        "required": [name],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }


TEXTS = (*NAMES, "<|end|>", "a</tool_call>b", "<<tool_call>>", "</tool_call><|end|>plain")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["key", "enum", "const", "lark", "regex"])
def test_names_of_control_tokens_are_written_by_ordinary_ones(
    tmp_path: Path, kind: str, text: str
) -> None:
    tokenizer = opened(tmp_path, names=NAMES)
    grammars = {
        "key": GrammarSpec("schema", json.dumps(one_key(text))),
        "enum": GrammarSpec("schema", json.dumps({"enum": [text]})),
        "const": GrammarSpec("schema", json.dumps({"const": {"k": [text]}})),
        "lark": GrammarSpec("lark", f'start: "(" {json.dumps(text)} ")"'),
        "regex": GrammarSpec("regex", f"x{re.escape(text)}y"),
    }
    tokens = walk(tokenizer, grammars[kind])
    decoded = tokenizer.decode(tokens)
    assert text in decoded
    assert {END, MARK, MARK + 1}.isdisjoint(tokens)
    if kind == "key":
        assert json.loads(decoded) == {text: 1}


def test_control_tokens_in_a_lark_grammar_are_tokens(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, names=NAMES)
    assert walk(tokenizer, GrammarSpec("lark", 'start: <tool_call> "a" <[257]> </tool_call>')) == [
        MARK,
        *tokenizer.encode("a"),
        MARK,
        MARK + 1,
    ]


def test_a_token_that_another_file_declares_is_one_of_the_grammar(tmp_path: Path) -> None:
    """`added_tokens_decoder` adds a mark and a word that `tokenizer.json` does not have."""
    declared = {
        "257": {"content": "<call>", "special": False, "normalized": False},
        "258": {"content": "word", "special": False, "normalized": False},
    }
    tokenizer = opened(tmp_path, {"added_tokens_decoder": declared})
    assert tokenizer.encode("word") == [258]
    assert walk(tokenizer, GrammarSpec("lark", 'start: <call> "(word)" <call>')) == [
        257,
        *tokenizer.encode("(word)"),
        257,
    ]


def test_a_vocabulary_is_that_of_the_library() -> None:
    """The same texts and control tokens as llguidance reads in the file itself."""
    from llguidance import LLTokenizer

    folder = ModelFolder.resolve("demo")
    tokenizer = folder.tokenizer
    assert tokenizer is not None
    size = folder.config.vocab_size
    expected = LLTokenizer(str(folder.path / "tokenizer.json"), n_vocab=size)
    actual = GrammarVocabulary(tokenizer, size).library()
    assert actual.vocab_size == expected.vocab_size == size
    for token in range(tokenizer.vocab_size):
        assert actual.decode_bytes([token]) == expected.decode_bytes([token])
        assert actual.is_special_token(token) == expected.is_special_token(token)
    text = 'def f(x): return {"key": [1, 2.5, null]}\n'
    assert actual.tokenize_str(text) == expected.tokenize_str(text) == tokenizer.encode(text)


def test_a_text_within_a_text_gets_no_blank(tmp_path: Path) -> None:
    """A vocabulary that puts a blank before each text writes what a grammar forces without it."""
    pieces = (
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "aa",
        "▁ab",
    )
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("a", "b"), ("a", "a"), ("▁", "ab")]
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    encode = GrammarVocabulary(Tokenizer.open(tmp_path), WORDS)
    encode.library()
    assert encode(b"aab ab") == [vocabulary["a"], vocabulary["ab"], vocabulary["▁ab"]]


def test_where_the_tokenizer_fails_the_longest_tokens_write_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spd.errors import IncompatibleError

    tokenizer = opened(tmp_path, names=NAMES)

    def fail(text: str) -> list[int]:
        raise IncompatibleError(text)

    expected = tokenizer.encode("(a</tool_")
    monkeypatch.setattr(tokenizer, "encode", fail)
    assert (
        walk(tokenizer, GrammarSpec("lark", 'start: "(a</tool_call>)" | "(ab"'))[:1] == expected[:1]
    )
