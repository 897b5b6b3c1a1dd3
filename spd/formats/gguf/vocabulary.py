"""The tokens of a GGUF file: texts, types, ids with a role, and ids that end a turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spd.errors import CheckpointError
from spd.formats.gguf.container import GgufFile
from spd.formats.json_file import Fields, display_text

MAX_TOKENS = 1 << 24
"""Tokens of a vocabulary."""
BYTE_LEVEL = "gpt2"
SENTENCE_PIECE = "llama"
GEMMA4 = "gemma4"
TOKENIZER_KINDS = (BYTE_LEVEL, SENTENCE_PIECE, GEMMA4)
"""Supported values of `tokenizer.ggml.model`.

The last one merges as the first does, over spelled spaces.
"""

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
"""Values of `tokenizer.ggml.token_type`."""

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
}
"""The file's keys behind `tokenizer.ggml.`, by Hugging Face's names of roles."""
_DEFAULT_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""Ids of a SentencePiece vocabulary, in files without them."""
_END_ROLES = ("eos_token", "eot_token", "eom_token")
"""Roles whose tokens end a turn."""
_END_WORDS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>
<|eom_id|> <|end_of_text|> <end_of_utterance> <turn|> <|tool_response> [e~[ <|fim_pad|> <fim-pad>
<fim_pad> <|fim_repo|> <|repo_name|> <fim-repo> <reponame> <|file_sep|>
<\uff5cend\u2581of\u2581sentence\uff5c>
"""
_END_TEXTS = frozenset(_END_WORDS.split())
"""Texts of tokens that end a turn, whatever their type, as in llama.cpp."""
_CONTROL_END_TEXTS = frozenset(
    ("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "[PAD]", "<REPO>")
)
"""Texts of which only a control token ends a turn.

In other vocabularies they are words, as those of HTML. llama.cpp lets any of them end a turn.
"""
_CALL_TOKENS = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|calls|>", "<|flush|>")))
"""In a vocabulary with all tokens of one of these, `<|end|>` ends a message and not the turn."""


def has_vocabulary(file: GgufFile) -> bool:
    """True if a file names a tokenizer, supported or not; drafters' files may have none."""
    return file.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one file, checked."""

    kind: str
    """One of `TOKENIZER_KINDS`."""
    tokens: tuple[str, ...]
    """Texts by id; a row of the embedding without a token has an empty text."""
    types: tuple[int, ...]
    """Values of `tokenizer.ggml.token_type` by id."""
    scores: tuple[float, ...]
    """By id, of a SentencePiece vocabulary; else empty."""
    merges: tuple[str, ...]
    """Each is two parts with a blank between them; empty for a SentencePiece vocabulary."""
    fields: Fields
    """The file's metadata."""

    @classmethod
    def of(cls, file: GgufFile) -> Vocabulary:
        """Read the tokens in a file's metadata.

        Raises CheckpointError for wrong or unsupported values.
        """
        fields = Fields(str(file.path), file.metadata)
        kind = fields.choice("tokenizer.ggml.model", TOKENIZER_KINDS)
        tokens = _read_texts(fields, "tokenizer.ggml.tokens")
        count = len(tokens)
        fields.require(0 < count <= MAX_TOKENS, "tokenizer.ggml.tokens", f"are {count}")
        types = _read_integers(fields, "tokenizer.ggml.token_type", count) or (NORMAL,) * count
        if len(set(tokens)) < count:
            fields.require(
                len(set(filter(None, tokens))) == sum(map(bool, tokens)),
                "tokenizer.ggml.tokens",
                "a token is there twice",
            )
        texts = tuple(
            "" if kind == UNUSED and text == f"[PAD{number}]" else text
            for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        )
        scores: tuple[float, ...] = ()
        merges: tuple[str, ...] = ()
        if kind == SENTENCE_PIECE:
            scores = _read_scores(fields, count)
        else:
            merges = _read_texts(fields, "tokenizer.ggml.merges")
        return cls(kind, texts, types, scores, merges, fields)

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Return the ids of the tokens that have a text."""
        return {text: number for number, text in enumerate(self.tokens) if text}

    @cached_property
    def roles(self) -> Mapping[str, int]:
        """Return the ids of tokens with a role, by Hugging Face's names of roles (`bos_token`).

        Raises CheckpointError where a key has no token id.

        Files have the id 0 for a padding token that does not exist, so that an ordinary word counts
        only as the token that begins or ends a text.
        """
        roles: dict[str, int] = {}
        for role, name in _ROLES.items():
            key = f"tokenizer.ggml.{name}"
            number = _DEFAULT_IDS.get(role) if self.kind == SENTENCE_PIECE else None
            if key in self.fields:
                number = self.fields.integer(key, -1, (1 << 32) - 1)
            if number is None or not 0 <= number < len(self.tokens) or not self.tokens[number]:
                continue
            is_word = self.types[number] in (NORMAL, BYTE)
            if not is_word or (role in ("bos_token", "eos_token") and key in self.fields):
                roles[role] = number
        return roles

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Return the ids of tokens that end a turn: those of keys first, then others, ascending.

        Others are tokens whose text is known to end one. Raises CheckpointError for wrong keys.
        """
        file_ids = [self.roles[role] for role in _END_ROLES if role in self.roles]
        listed_ids = _read_integers(self.fields, "tokenizer.ggml.eos_token_ids")
        file_ids += [number for number in listed_ids if 0 <= number < len(self.tokens)]
        present = _END_TEXTS & self.ids.keys()
        text_ids = {self.ids[text] for text in present}
        for text in _CONTROL_END_TEXTS & self.ids.keys():
            if self.types[self.ids[text]] == CONTROL:
                text_ids.add(self.ids[text])
        ends = dict.fromkeys((*file_ids, *sorted(text_ids)))
        if any(calls <= present for calls in _CALL_TOKENS):
            ends.pop(self.ids.get("<|end|>", -1), None)
        return tuple(ends)

    def is_control(self, number: int) -> bool:
        """True if the token of this id is a mark that plain text never spells."""
        return self.types[number] in (CONTROL, UNKNOWN) or number in self.end_ids


def _read_texts(fields: Fields, key: str) -> tuple[str, ...]:
    """Return the list of texts under a key. Raises CheckpointError without it."""
    value = fields.get(key)
    if isinstance(value, tuple) and (not value or isinstance(value[0], str)):
        return value
    raise fields.field_error(key, f"{display_text(value)} is not a list of texts")


def _read_integers(fields: Fields, key: str, count: int | None = None) -> tuple[int, ...]:
    """Return the list of whole numbers under a key, empty when absent.

    count: the length that it must have. Raises CheckpointError for another value or length.
    """
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, tuple) or (value and type(value[0]) is not int):
        raise fields.field_error(key, f"{display_text(value)} is not a list of whole numbers")
    if count is not None and len(value) != count:
        raise fields.field_error(key, f"are {len(value):,}, but there are {count:,} tokens")
    return value


def _read_scores(fields: Fields, count: int) -> tuple[float, ...]:
    """Return the score of each token. Raises CheckpointError unless there are `count` numbers."""
    key = "tokenizer.ggml.scores"
    value = fields.get(key)
    if not isinstance(value, tuple) or not value or type(value[0]) not in (int, float):
        raise fields.field_error(key, f"{display_text(value)} is not a list of numbers")
    if len(value) != count:
        raise CheckpointError(f"{fields.where}: {key}: are {len(value):,} for {count:,} tokens")
    fields.require(not any(map(math.isnan, value)), key, "one is not a number")
    return value
