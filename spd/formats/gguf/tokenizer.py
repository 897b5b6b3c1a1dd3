"""The tokenizer of a GGUF file, built like the model's `tokenizer.json`.

Byte-level vocabularies have tokens and merges, and the name of the rule that cuts a text into
words. SentencePiece vocabularies have scores in place of merges. Two neighbours merge if together
they are a token, the highest score first; that is a list of merges ordered by the scores of the
merged tokens, as Hugging Face's converter writes it. Characters that no token spells become bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypedDict

import tokenizers

from spd.errors import CheckpointError
from spd.formats.gguf.container import GgufFile
from spd.formats.gguf.pre_tokenizers import JsonValue, PreTokenizer, pre_tokenizer_of
from spd.formats.gguf.scored_merges import MAX_MERGED_CHARACTERS, MergeKey, ScoredMerges
from spd.formats.gguf.vocabulary import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    GEMMA4,
    SENTENCE_PIECE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)
from spd.formats.json_file import display_text
from spd.formats.tokenizer import Tokenizer, check_tokenizer_content, convert_library_errors
from spd.formats.tokenizer_config import TokenizerConfig

SPACE = "\u2581"
"""SentencePiece's character for a space."""
MAX_PIECE_CHARACTERS = 1024
"""Characters of one token of a SentencePiece vocabulary; the longest published ones have 31."""
MAX_MERGE_LIST_CHARACTERS = 32_000_000
"""Characters of all merges of a vocabulary together; Gemma's have 8 million."""
_CONVERTERS_SCORE = -1000.0
"""The score that llama.cpp's converter writes for added tokens, whose score is the highest: 0."""
_BOS_RULES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken"
"""Pre-tokenizers of models whose texts begin with BOS, in files without a key for it."""
_STRIPPING_ARCHITECTURE = "phi3"
"""The architecture whose added tokens strip the blanks behind them.

That holds for its files with a SentencePiece vocabulary.
"""
_UNSTRIPPED_TOKENS = ("<unk>", "<s>", "<|endoftext|>")
"""Texts of that architecture's added tokens that strip nothing."""
Pair = tuple[str, str]
"""The texts of the two tokens that a merge joins, in order."""


def open_tokenizer(
    file: GgufFile,
    vocabulary: Vocabulary | None = None,
    max_merged_characters: int = MAX_MERGED_CHARACTERS,
) -> Tokenizer:
    """Build a file's tokenizer from its metadata. Raises CheckpointError for a wrong vocabulary.

    vocabulary: the file's, if it was read before. max_merged_characters: see
    `ScoredMerges.remaining`.
    """
    vocab = vocabulary or Vocabulary.of(file)
    pre_tokenizer = _read_pre_tokenizer(vocab) if vocab.kind == BYTE_LEVEL else None
    sections = (
        _byte_level_sections(pre_tokenizer) if pre_tokenizer else _sentence_piece_sections(vocab)
    )
    texts = _token_texts(vocab)
    ids = {text: number for number, text in enumerate(texts) if text}
    added = [number for number in _added_ids(vocab) if texts[number]]
    where = str(file.path)
    added_tokens = [{"content": texts[number]} for number in added]
    highest = check_tokenizer_content(
        where, {**sections, "model": {"vocab": ids}, "added_tokens": added_tokens}, 0
    )
    is_scored = vocab.kind == SENTENCE_PIECE
    options = _model_options(vocab, pre_tokenizer)
    with convert_library_errors(where):
        library = tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY_TOKENIZER, **sections}))
        library.model = _build_model(ids, [] if is_scored else _file_merges(vocab), options)
        for special in (True, False):
            group = [texts[number] for number in added if vocab.is_control(number) == special]
            library.add_tokens([_added_token(text, vocab, special=special) for text in group])
    config = tokenizer_config(vocab)
    if not is_scored:
        return Tokenizer(library, highest, config, where)
    merges = _scored_merges(vocab, library, texts, ids)
    merges.remaining = max_merged_characters
    return Tokenizer(
        library=library, last=highest, config=config, where=where, encode=merges.encode
    )


def _scored_merges(
    vocab: Vocabulary,
    library: tokenizers.Tokenizer,
    texts: Sequence[str],
    ids: Mapping[str, int],
) -> ScoredMerges:
    """Return the encoder that merges by scores.

    library: the tokenizer without merges, which the encoder completes after enough text. texts,
    ids: tokens by id and ids by token. Raises CheckpointError where the scores would mean too many
    merges.
    """
    pieces = _ranked_pieces(vocab, texts)
    _check_pieces(vocab, texts, pieces)
    scores = {number: score for score, number in pieces}

    def by_lengths(merged: int, first: int, second: int) -> MergeKey:
        """Rank by score, then the longest parts first."""
        return -scores[merged], -len(texts[first]), -len(texts[second]), merged

    def by_ids(merged: int, first: int, second: int) -> MergeKey:
        """Rank by score, then by the ids of the merged token and of its parts."""
        return -scores[merged], merged, first, second

    bytes_ = (number for number, kind in enumerate(vocab.types) if kind == BYTE)
    return ScoredMerges(
        library=library,
        texts=texts,
        mergeable=scores.keys(),
        unmergeable=frozenset(_added_ids(vocab)).union(bytes_),
        order=by_lengths if _orders_merges_by_length(vocab) else by_ids,
        build_full_model=lambda: _build_model(
            ids, _merges_of_scores(vocab, texts, ids), _model_options(vocab, None)
        ),
    )


def _check_pieces(
    vocab: Vocabulary, texts: Sequence[str], pieces: Sequence[tuple[float, int]]
) -> None:
    """Refuse tokens that are too long, or whose merges could have too many characters together.

    pieces: scores and ids of the tokens. Raises CheckpointError.
    """
    lengths = [len(texts[number]) for _, number in pieces]
    key = "tokenizer.ggml.tokens"
    longest = max(lengths, default=0)
    too_long = f"one has more than {MAX_PIECE_CHARACTERS} characters"
    vocab.fields.require(longest <= MAX_PIECE_CHARACTERS, key, too_long)
    total = sum(length * (length - 1) for length in lengths)
    too_many = f"mean merges of over {MAX_MERGE_LIST_CHARACTERS:,} characters"
    vocab.fields.require(total <= MAX_MERGE_LIST_CHARACTERS, key, too_many)


_EMPTY_TOKENIZER: Mapping[str, JsonValue] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "post_processor": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
"""A `tokenizer.json` without tokens, to which sections are added."""


def _read_pre_tokenizer(vocab: Vocabulary) -> PreTokenizer:
    """Return the rule that cuts a text into words. Raises CheckpointError for an unknown one."""
    key = "tokenizer.ggml.pre"
    name = vocab.fields.text(key, "")
    pre_tokenizer = pre_tokenizer_of(name, vocab.fields.text("general.architecture", ""))
    if pre_tokenizer is not None:
        return pre_tokenizer
    if name in ("", "default"):
        message = "does not say how a text is cut into words, so that ids would be guessed"
        fix = ["a newer file of this model"]
        raise CheckpointError(f"{vocab.fields.where}: {key}: {message}", fix=fix)
    raise vocab.fields.field_error(key, f"{display_text(name)} is not supported")


def _added_ids(vocab: Vocabulary) -> list[int]:
    """Return the ids of tokens that are matched before a text is cut into words, ascending."""
    kinds = (CONTROL, UNKNOWN, USER_DEFINED)
    marked = {number for number, kind in enumerate(vocab.types) if kind in kinds}
    return sorted(marked.union(vocab.end_ids))


def _token_texts(vocab: Vocabulary) -> Sequence[str]:
    """Return the texts of tokens by id as in `tokenizer.json`, with spaces spelled.

    In GGUF files with spelled spaces, added tokens have plain ones.
    """
    if vocab.kind == BYTE_LEVEL:
        return vocab.tokens
    return [
        text.replace(" ", SPACE) if kind == USER_DEFINED else text
        for text, kind in zip(vocab.tokens, vocab.types, strict=True)
    ]


def _byte_level_sections(pre_tokenizer: PreTokenizer) -> dict[str, JsonValue]:
    """Return the sections of `tokenizer.json` around a byte-level vocabulary."""
    return {
        "normalizer": pre_tokenizer.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)},
        "decoder": _BYTE_LEVEL_DECODER,
    }


_BYTE_LEVEL_DECODER: Mapping[str, JsonValue] = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def _sentence_piece_sections(vocab: Vocabulary) -> dict[str, JsonValue]:
    """Return the sections of `tokenizer.json` around a SentencePiece vocabulary.

    Spaces are spelled, and a text may begin with one.
    """
    replace_space: dict[str, JsonValue] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": SPACE,
    }
    decoders: list[JsonValue] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = replace_space
    key = "tokenizer.ggml.add_space_prefix"
    if vocab.kind == SENTENCE_PIECE and vocab.fields.boolean(key, True):
        prepend_space = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend_space, replace_space]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


class _ModelOptions(TypedDict, total=False):
    """Options of the library's model besides tokens and merges."""

    ignore_merges: bool
    unk_token: str | None
    fuse_unk: bool
    byte_fallback: bool


def _model_options(vocab: Vocabulary, pre_tokenizer: PreTokenizer | None) -> _ModelOptions:
    """Return the library's options of a model besides tokens and merges."""
    if pre_tokenizer is not None:
        return {"ignore_merges": pre_tokenizer.ignores_merges}
    unknown = vocab.roles.get("unk_token")
    name = None if unknown is None else vocab.tokens[unknown]
    return {"unk_token": name, "fuse_unk": True, "byte_fallback": True}


def _build_model(
    ids: Mapping[str, int], merges: Sequence[Pair], options: _ModelOptions
) -> tokenizers.models.BPE:
    """Return the library's BPE model of tokens and merges.

    Merges of tokens that do not exist are dropped, as by llama.cpp.
    """
    try:
        return tokenizers.models.BPE(vocab=dict(ids), merges=list(merges), **options)
    except Exception as error:
        if "out of vocabulary" not in str(error):
            raise
    valid_merges = [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()]
    return tokenizers.models.BPE(vocab=dict(ids), merges=valid_merges, **options)


def _file_merges(vocab: Vocabulary) -> list[Pair]:
    """Return the merges that a file lists, in order; their first part may begin with a blank.

    Raises CheckpointError for an entry that is not two parts, and for too many characters.
    """
    key = "tokenizer.ggml.merges"
    total = sum(map(len, vocab.merges))
    too_many = f"have more than {MAX_MERGE_LIST_CHARACTERS:,} characters"
    vocab.fields.require(total <= MAX_MERGE_LIST_CHARACTERS, key, too_many)
    merges: list[Pair] = []
    for merge in vocab.merges:
        split = merge.find(" ", 1)
        vocab.fields.require(
            0 < split < len(merge) - 1, key, f"{display_text(merge)} is not two parts"
        )
        merges.append((merge[:split], merge[split + 1 :]))
    return merges


def _merges_of_scores(
    vocab: Vocabulary, texts: Sequence[str], ids: Mapping[str, int]
) -> list[Pair]:
    """Return the merges that the scores imply, the highest score first.

    Converters order merges of one score in two ways: by ids, and since Gemma 3, whose runs of
    blanks are user-defined tokens, the longest first part first.
    """
    order = _by_lengths if _orders_merges_by_length(vocab) else _by_ids(ids)
    merges: list[Pair] = []
    for _, group in groupby(_ranked_pieces(vocab, texts), key=itemgetter(0)):
        start = len(merges)
        members = 0
        for _, number in group:
            pairs = _token_pairs(texts[number], ids)
            merges += pairs if order is _by_lengths or len(pairs) < 2 else sorted(pairs, key=order)
            members += 1
        if members > 1 and order is _by_lengths:
            merges[start:] = sorted(merges[start:], key=order, reverse=True)
    return merges


def _ranked_pieces(vocab: Vocabulary, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return scores and ids of tokens that merges may make, the highest score first, then by id."""
    unmerged = (BYTE, CONTROL, UNKNOWN)
    pieces = [
        (0.0 if kind == USER_DEFINED and score == _CONVERTERS_SCORE else score, number)
        for number, (score, kind) in enumerate(zip(vocab.scores, vocab.types, strict=True))
        if kind not in unmerged and len(texts[number]) > 1
    ]
    pieces.sort(key=itemgetter(0), reverse=True)
    return pieces


def _orders_merges_by_length(vocab: Vocabulary) -> bool:
    """True if merges of one score are in the order of their lengths, as converters write them since
    Gemma 3.

    Such a vocabulary is known by two blanks that are a token of its user's.
    """
    return any(
        vocab.types[vocab.ids[text]] == USER_DEFINED
        for text in ("  ", 2 * SPACE)
        if text in vocab.ids
    )


def _token_pairs(text: str, ids: Mapping[str, int]) -> list[Pair]:
    """Return all pairs of tokens that form a token's text, the longest first part first."""
    return [
        (first, second)
        for at in range(len(text) - 1, 0, -1)
        if (first := text[:at]) in ids and (second := text[at:]) in ids
    ]


def _by_lengths(pair: Pair) -> tuple[int, int]:
    """Return the sort key of a pair: the characters of its parts."""
    return len(pair[0]), len(pair[1])


def _by_ids(ids: Mapping[str, int]) -> Callable[[Pair], tuple[int, int]]:
    """Return a sort key of pairs: the ids of their parts."""
    return lambda pair: (ids[pair[0]], ids[pair[1]])


def _added_token(text: str, vocab: Vocabulary, *, special: bool) -> tokenizers.AddedToken:
    """Return the library's added token for a text, which is matched before normalization.

    special: it is matched only where special tokens are parsed.
    """
    strips = (
        vocab.kind == SENTENCE_PIECE
        and vocab.fields.get("general.architecture") == _STRIPPING_ARCHITECTURE
        and text not in _UNSTRIPPED_TOKENS
    )
    return tokenizers.AddedToken(text, rstrip=strips, normalized=False, special=special)


def tokenizer_config(vocab: Vocabulary) -> TokenizerConfig:
    """Return a vocabulary's special tokens by role, and whether they are put around a text."""
    texts = {role: vocab.tokens[number] for role, number in vocab.roles.items()}
    turn_roles = [role for role in texts if role in ("eot_token", "eom_token")]
    turn_texts = {role: texts.pop(role) for role in turn_roles}
    has_bos_rule = vocab.fields.get("tokenizer.ggml.pre") in _BOS_RULES.split()
    begins = vocab.kind != BYTE_LEVEL or has_bos_rule
    if vocab.kind != GEMMA4:  # its files have false, by mistake
        begins = vocab.fields.boolean("tokenizer.ggml.add_bos_token", begins)
    ends = vocab.fields.boolean("tokenizer.ggml.add_eos_token", False)
    return TokenizerConfig(
        texts,
        (),
        add_bos=begins and "bos_token" in texts,
        add_eos=ends and "eos_token" in texts,
        fields=None,
        named_tokens=turn_texts,
    )
