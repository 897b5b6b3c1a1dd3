"""The tokenizer of a GGUF file, built for the `tokenizers` library as the model's own `tokenizer.json` is.

Byte-level vocabularies: tokens and merges as they are, words cut by the rule that the file names.
SentencePiece's have scores in place of merges. Two neighbours merge where together they are a token, the
highest score first; that is a list of merges ordered by the scores of what they make, as Hugging Face's
converter writes it. What no token spells becomes bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import tokenizers

from spd.errors import CheckpointError
from spd.formats.gguf.container import GgufFile
from spd.formats.gguf.pre_tokenizers import PreTokenizer, pre_tokenizer_of
from spd.formats.gguf.scored_merges import FEW, Key, ScoredMerges
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
from spd.formats.tokenizer import Tokenizer, check_content, convert_library_errors
from spd.formats.tokenizer_config import TokenizerConfig

SPACE = "\u2581"
"""How SentencePiece spells a space."""
MAX_PIECE = 1024
"""Characters of a token of a SentencePiece vocabulary; the longest published ones have 31."""
MAX_MERGED = 32_000_000
"""Characters of all merges; Gemma's have 8 million."""
_CONVERTERS_SCORE = -1000.0
"""What llama.cpp's converter writes for added tokens, which have the highest score of all, 0."""
_ADDS_BOS = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken"
"""Rules whose models begin with BOS where the file does not say."""
_STRIPS = "phi3"
"""The architecture whose added tokens take the blanks behind them, with a SentencePiece vocabulary."""
_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")
Pair = tuple[str, str]


def open_tokenizer(
    file: GgufFile, vocabulary: Vocabulary | None = None, few: int = FEW
) -> Tokenizer:
    """Build a file's tokenizer; `vocabulary` where it was read. Raises CheckpointError.

    few: see `ScoredMerges.left`.
    """
    words = vocabulary or Vocabulary.of(file)
    rule = _rule(words) if words.kind == BYTE_LEVEL else None
    parts = _byte_level_parts(rule) if rule else _sentence_piece_parts(words)
    texts = _spelled(words)
    ids = {text: number for number, text in enumerate(texts) if text}
    added = [number for number in _added_ids(words) if texts[number]]
    where = str(file.path)
    named = [{"content": texts[number]} for number in added]
    highest = check_content(where, {**parts, "model": {"vocab": ids}, "added_tokens": named}, 0)
    is_scored = words.kind == SENTENCE_PIECE
    options = _options(words, rule)
    with convert_library_errors(where):
        library = tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, **parts}))
        library.model = _model(ids, [] if is_scored else _file_merges(words), options)
        for special in (True, False):
            several = [texts[number] for number in added if words.is_control(number) == special]
            library.add_tokens([_added(text, words, special=special) for text in several])
    config = tokenizer_config(words)
    if not is_scored:
        return Tokenizer(library, highest, config, where)
    merges = _scored_merges(words, library, texts, ids)
    merges.left = few
    return Tokenizer(library, highest, config, where, merges.encode)


def _scored_merges(
    words: Vocabulary,
    library: tokenizers.Tokenizer,
    texts: Sequence[str],
    ids: Mapping[str, int],
) -> ScoredMerges:
    """Return what merges by scores. Raises CheckpointError where they would mean too many merges."""
    pieces = _ranked_pieces(words, texts)
    _check_pieces(words, texts, pieces)
    scores = {number: score for score, number in pieces}

    def by_lengths(whole: int, first: int, second: int) -> Key:
        return -scores[whole], -len(texts[first]), -len(texts[second]), whole

    def by_ids(whole: int, first: int, second: int) -> Key:
        return -scores[whole], whole, first, second

    bytes_ = (number for number, kind in enumerate(words.types) if kind == BYTE)
    return ScoredMerges(
        library=library,
        texts=texts,
        made=scores.keys(),
        kept=frozenset(_added_ids(words)).union(bytes_),
        order=by_lengths if _has_runs_of_blanks(words) else by_ids,
        whole=lambda: _model(ids, _merges(words, texts, ids), _options(words, None)),
    )


def _check_pieces(
    words: Vocabulary, texts: Sequence[str], pieces: Sequence[tuple[float, int]]
) -> None:
    """Refuse tokens that are too long, or whose merges could have too many characters together."""
    lengths = [len(texts[number]) for _, number in pieces]
    key = "tokenizer.ggml.tokens"
    longest = max(lengths, default=0)
    words.fields.require(longest <= MAX_PIECE, key, f"one has more than {MAX_PIECE} characters")
    total = sum(length * (length - 1) for length in lengths)
    words.fields.require(total <= MAX_MERGED, key, f"mean merges of over {MAX_MERGED:,} characters")


_EMPTY: Mapping[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "post_processor": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


def _rule(words: Vocabulary) -> PreTokenizer:
    """Return how words are cut, or refuse a rule that is not known."""
    key = "tokenizer.ggml.pre"
    name = words.fields.text(key, "")
    rule = pre_tokenizer_of(name, words.fields.text("general.architecture", ""))
    if rule is not None:
        return rule
    if name in ("", "default"):
        message = "does not say how a text is cut into words, so that ids would be guessed"
        fix = ["a newer file of this model"]
        raise CheckpointError(f"{words.fields.where}: {key}: {message}", fix=fix)
    raise words.fields.field_error(key, f"{display_text(name)} is not supported")


def _added_ids(words: Vocabulary) -> list[int]:
    """Return the ids of tokens that are found in a text before it is cut into words, ascending."""
    kinds = (CONTROL, UNKNOWN, USER_DEFINED)
    marked = {number for number, kind in enumerate(words.types) if kind in kinds}
    return sorted(marked.union(words.end_ids))


def _spelled(words: Vocabulary) -> Sequence[str]:
    """Return the tokens as `tokenizer.json` has them: converters write spaces of added ones plainly."""
    if words.kind == BYTE_LEVEL:
        return words.tokens
    return [
        text.replace(" ", SPACE) if kind == USER_DEFINED else text
        for text, kind in zip(words.tokens, words.types, strict=True)
    ]


def _byte_level_parts(rule: PreTokenizer) -> dict[str, Any]:
    """Return the parts of `tokenizer.json` around a byte-level vocabulary."""
    return {
        "normalizer": rule.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.steps)},
        "decoder": _BYTES,
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def _sentence_piece_parts(words: Vocabulary) -> dict[str, Any]:
    """Return the parts around a SentencePiece vocabulary: spaces are spelled, a text may begin with one."""
    spelled: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = spelled
    key = "tokenizer.ggml.add_space_prefix"
    if words.kind == SENTENCE_PIECE and words.fields.boolean(key, True):
        first = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [first, spelled]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _options(words: Vocabulary, rule: PreTokenizer | None) -> dict[str, Any]:
    """Return what the library is told of a model beside tokens and merges."""
    if rule is not None:
        return {"ignore_merges": rule.ignores_merges}
    unknown = words.roles.get("unk_token")
    name = None if unknown is None else words.tokens[unknown]
    return {"unk_token": name, "fuse_unk": True, "byte_fallback": True}


def _model(
    ids: Mapping[str, int], merges: Sequence[Pair], options: Mapping[str, Any]
) -> tokenizers.models.BPE:
    """Return the library's model. Merges of tokens that are not there are left out, as llama.cpp does."""
    try:
        return tokenizers.models.BPE(vocab=dict(ids), merges=list(merges), **options)
    except Exception as error:
        if "out of vocabulary" not in str(error):
            raise
    there = [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()]
    return tokenizers.models.BPE(vocab=dict(ids), merges=there, **options)


def _file_merges(words: Vocabulary) -> list[Pair]:
    """Return the merges that a file lists; the first part may itself begin with a blank."""
    key = "tokenizer.ggml.merges"
    total = sum(map(len, words.merges))
    words.fields.require(total <= MAX_MERGED, key, f"have more than {MAX_MERGED:,} characters")
    merges: list[Pair] = []
    for merge in words.merges:
        at = merge.find(" ", 1)
        words.fields.require(
            0 < at < len(merge) - 1, key, f"{display_text(merge)} is not two parts"
        )
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _merges(words: Vocabulary, texts: Sequence[str], ids: Mapping[str, int]) -> list[Pair]:
    """Return the merges that scores mean, the highest score first.

    Converters have ordered those of one score in two ways: by ids, and since Gemma 3, whose runs of blanks
    are tokens of their own kind, the longest first part first.
    """
    order = _lengths if _has_runs_of_blanks(words) else _by_ids(ids)
    merges: list[Pair] = []
    for _, group in groupby(_ranked_pieces(words, texts), key=itemgetter(0)):
        start = len(merges)
        members = 0
        for _, number in group:
            pairs = _parts_of(texts[number], ids)
            merges += pairs if order is _lengths or len(pairs) < 2 else sorted(pairs, key=order)
            members += 1
        if members > 1 and order is _lengths:
            merges[start:] = sorted(merges[start:], key=order, reverse=True)
    return merges


def _ranked_pieces(words: Vocabulary, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return scores and ids of tokens that merges may make, the highest score first, then by id."""
    unmerged = (BYTE, CONTROL, UNKNOWN)
    pieces = [
        (0.0 if kind == USER_DEFINED and score == _CONVERTERS_SCORE else score, number)
        for number, (score, kind) in enumerate(zip(words.scores, words.types, strict=True))
        if kind not in unmerged and len(texts[number]) > 1
    ]
    pieces.sort(key=itemgetter(0), reverse=True)
    return pieces


def _has_runs_of_blanks(words: Vocabulary) -> bool:
    """True if two blanks are a token that is found before merges run."""
    return any(
        words.types[words.ids[text]] == USER_DEFINED
        for text in ("  ", 2 * SPACE)
        if text in words.ids
    )


def _parts_of(text: str, ids: Mapping[str, int]) -> list[Pair]:
    """Return all ways to cut a token into two tokens, the longest first part first."""
    return [
        (first, second)
        for at in range(len(text) - 1, 0, -1)
        if (first := text[:at]) in ids and (second := text[at:]) in ids
    ]


def _lengths(pair: Pair) -> tuple[int, int]:
    return len(pair[0]), len(pair[1])


def _by_ids(ids: Mapping[str, int]) -> Callable[[Pair], tuple[int, int]]:
    """Return the order of pairs by the ids of their parts."""
    return lambda pair: (ids[pair[0]], ids[pair[1]])


def _added(text: str, words: Vocabulary, *, special: bool) -> tokenizers.AddedToken:
    """Return a token that is found in a text as it stands."""
    strips = (
        words.kind == SENTENCE_PIECE
        and words.fields.get("general.architecture") == _STRIPS
        and text not in _KEEPS_BLANKS
    )
    return tokenizers.AddedToken(text, rstrip=strips, normalized=False, special=special)


def tokenizer_config(words: Vocabulary) -> TokenizerConfig:
    """Return special words by role, and what is put around a text."""
    texts = {role: words.tokens[number] for role, number in words.roles.items()}
    turns = [role for role in texts if role in ("eot_token", "eom_token")]
    named = {role: texts.pop(role) for role in turns}
    begins = words.kind != BYTE_LEVEL or words.fields.get("tokenizer.ggml.pre") in _ADDS_BOS.split()
    if words.kind != GEMMA4:  # whose files say that they do not, by mistake
        begins = words.fields.boolean("tokenizer.ggml.add_bos_token", begins)
    ends = words.fields.boolean("tokenizer.ggml.add_eos_token", False)
    flags = (begins and "bos_token" in texts, ends and "eos_token" in texts)
    return TokenizerConfig(texts, (), *flags, fields=None, named_tokens=named)
