"""Text to token ids and back, over the `tokenizers` library and `tokenizer.json` alone.

Plain text becomes a special token only on request, and every token's exact bytes are known, so that
text can be decoded incrementally. Byte-level and SentencePiece-style vocabularies are supported.

The file is untrusted. Parts that need much time or memory are refused before the library reads
them: replacements may double a text again and again. Merges and regular expressions may make the
library panic, which becomes an error. Classes that `tokenizer_config.json` names are never
imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from spd.errors import CheckpointError, IncompatibleError, SpdError, UsageError
from spd.formats.encoder import Encode, Encoder, encode_ids
from spd.formats.files import MAX_FILE_BYTES
from spd.formats.json_file import display_text, one_line, parse_json, read_text
from spd.formats.names import TOKENIZER_FILE
from spd.formats.thinking import find_mark_tokens
from spd.formats.tokenizer_config import MAX_TOKEN_ID, TokenizerConfig, read_tokenizer_config

_CHANNEL_TOKENS = (("<|message|>", "<|start|>", "<|channel|>", "<|end|>", "<|eom|>"),)
"""Tokens that divide a reply into messages; only such models have the first of each group."""
SHORT_TEXT = 1 << 16
"""Characters of a text that is always encoded to count its tokens, whatever the context."""
MAX_CHARACTERS = 4_000_000
"""Characters of a vocabulary; published: 2 million. The library needs up to 250 bytes for one."""
MAX_PART_CHARACTERS = 20_000
"""Characters of JSON of a normalizer and so on; published: 3,000."""
MAX_GROWTH = 1000
"""Growth of a text by one part; published: T5's map of characters and a pattern, 33 x 4."""
_GROWTH_BY_TYPE = {
    "BertNormalizer": 18,
    "ByteLevel": 3,
    "Lowercase": 2,
    "Metaspace": 5,
    "Precompiled": 33,
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
}
"""Factors by which parts of a type may lengthen a text; of other types: 1, or by their patterns."""
logger = logging.getLogger(__name__)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The text of a token that stands for one byte."""


class Tokenizer:
    """The tokenizer of a model folder; safe to use from several threads."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        last: int,
        config: TokenizerConfig,
        where: str,
        encode: Encode | None = None,
    ) -> None:
        """Configure a library's tokenizer, in place: tokens are added, the post-processor removed.

        last: the highest id of its vocabulary. config: tokens of files beside `tokenizer.json`.
        where: the file, for messages. encode: a function that encodes in the library's place.
        Raises CheckpointError for what is not supported.
        """
        self._library = library
        self._where = where
        self._lock = threading.Lock()
        self._encoder = Encoder(encode or partial(encode_ids, library), where)
        self._declared = _added_token_texts(config)
        _add_declared_tokens(library, config, where)
        # Names in tokenizer_config.json are special even where tokenizer.json does not mark them.
        special_names = [
            name for name in config.special_tokens if self.token_to_id(name) is not None
        ]
        _mark_special_tokens(library, special_names)
        added = library.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.special or token.content in special_names
        }
        self.vocab_size = max(last, *added, -1) + 1
        """The highest token id plus one, added tokens included."""
        if not 0 < self.vocab_size <= MAX_TOKEN_ID + 1:
            reason = f"token ids reach {self.vocab_size - 1}, 0 to {MAX_TOKEN_ID} are supported"
            raise CheckpointError(f"{where}: {reason}")
        self.special_ids = frozenset(self.special_tokens.values())
        self.added_tokens = frozenset(token.content for token in added.values())
        """The names of added tokens, special ones and others."""
        roles = {role: self.token_to_id(name) for role, name in config.roles.items()}
        self.bos_id = roles.get("bos_token")
        self.eos_id = roles.get("eos_token")
        # Plain text may become the unknown token, but no other special one.
        self._forbidden_ids = self.special_ids - {roles.get("unk_token")}
        bytes_of, self._strips = _read_decoder(library, where)
        visible = set(find_mark_tokens(self.special_tokens))
        for channel_tokens in _CHANNEL_TOKENS:
            if channel_tokens[0] in self.special_tokens:
                visible.update(channel_tokens)
        hidden = {i for name, i in self.special_tokens.items() if name not in visible}
        self.token_bytes = cache(lambda i: b"" if i in hidden else bytes_of(self._token_text(i)))
        """The exact bytes of a token, a leading space included; none for ids without a token and
        for special tokens, except those that separate a reply's thinking from its answer."""
        self._prefix, self._suffix = self._read_surroundings(config)
        self.digest = b""
        """SHA-256 of `tokenizer.json`; empty for a tokenizer of another file."""

    @classmethod
    def open(cls, folder: Path, config: TokenizerConfig | None = None) -> Tokenizer:
        """Read and check a folder's tokenizer.

        config: that of the folder, where it was read before. Raises CheckpointError.
        """
        config = config or read_tokenizer_config(folder)
        path = folder / TOKENIZER_FILE
        text = read_text(path, MAX_FILE_BYTES)
        declared = sum(len(token.content) for token in config.added_tokens.values())
        highest = check_tokenizer_content(str(path), parse_json(text, str(path)), declared)
        with convert_library_errors(str(path)):
            library = tokenizers.Tokenizer.from_str(text)
            # Truncation would shorten prompts without an error, padding would lengthen them.
            library.no_truncation()
            library.no_padding()
        tokenizer = cls(library, highest, config, str(path))
        tokenizer.digest = hashlib.sha256(text.encode()).digest()
        return tokenizer

    def is_same_file(self, folder: Path) -> bool:
        """Read a folder's files; True if its tokenizer file is equal and adds the same tokens."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            return False
        if hashlib.sha256(read_text(path, MAX_FILE_BYTES).encode()).digest() != self.digest:
            return False
        return _added_token_texts(read_tokenizer_config(folder)) == self._declared

    def encode(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        parse_special: strings such as <|im_end|> become special tokens. add_special: add the tokens
        that the tokenizer is configured to put around a text (often the BOS token). Raises
        `UsageError` for text that is not Unicode, `IncompatibleError` when the tokenizer fails.
        """
        ids = self._encode_text(text, parse_special)
        if not parse_special and not self._forbidden_ids.isdisjoint(ids):
            raise IncompatibleError(f"{self._where}: turns plain text into special tokens")
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def limit_length(self, text: str, context: int, *, cut: bool = False) -> str:
        """Return a text that may fit a context of so many tokens; with `cut` its end.

        A text with more characters than that many of the longest tokens cannot fit. Without `cut`
        it raises IncompatibleError.
        """
        if len(text) <= SHORT_TEXT:
            return text
        longest_token = max(map(len, self._library.get_vocab(with_added_tokens=True)), default=0)
        max_characters = max(SHORT_TEXT, longest_token * context)
        if len(text) > max_characters and not cut:
            reason = (
                f"{len(text):,} characters, far more than {context:,} tokens, which is the context"
            )
            raise IncompatibleError(
                f"the prompt is {reason}", fix=["a shorter prompt"], code="context_overflow"
            )
        return text[-max_characters:]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids: their bytes as UTF-8, with U+FFFD for invalid bytes."""
        names = () if skip_special else self.special_ids
        raw = b"".join(
            self._token_text(i).encode() if i in names else self.token_bytes(i) for i in ids
        )
        return raw.decode("utf-8", "replace").removeprefix(" " if self._strips else "")

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the joined exact bytes of tokens; see `token_bytes`."""
        return b"".join(map(self.token_bytes, token_ids))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary; None for an unknown one."""
        return self._library.token_to_id(token)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex over all pairs of id and token.

        Equal for tokenizers with one vocabulary.
        """
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        pairs = sorted((token_id, token) for token, token_id in vocabulary.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def _token_text(self, token_id: int) -> str:
        """Return a token as written in the vocabulary; empty for an id without a token."""
        return (
            self._library.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        ) or ""

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text alone, of special tokens too if `parse_special`.

        Raises UsageError for half of a surrogate pair, CheckpointError if the patterns take too
        long, and IncompatibleError if the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text is not Unicode: it holds half of a surrogate pair") from None
        with (
            self._lock,
            convert_library_errors(f"{self._where}: cannot encode this text", IncompatibleError),
        ):
            return self._encoder.encode(text, parse_special)

    def _read_surroundings(
        self, config: TokenizerConfig
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that are put before and after a text, by post-processor and config.

        Removes the library's post-processor. Raises CheckpointError.
        """
        with convert_library_errors(f"{self._where}: cannot encode a letter"):
            encoded = self._library.encode("a")
        if not all(self._token_text(token_id) for token_id in encoded.ids):
            raise CheckpointError(
                f"{self._where}: post_processor: adds token ids that do not exist"
            )
        text_positions = [
            position for position, added in enumerate(encoded.special_tokens_mask) if not added
        ]
        first = last = len(encoded.ids)
        if text_positions:
            first = text_positions[0]
            last = text_positions[-1] + 1
        prefix = tuple(encoded.ids[:first])
        suffix = tuple(encoded.ids[last:])
        self._library.post_processor = None  # `encode` adds both
        if encoded.ids[first:last] != self._library.encode("a").ids:
            raise CheckpointError(f"{self._where}: post_processor: repeats the text")
        ends = (
            (config.add_bos, self.bos_id, "bos_token"),
            (config.add_eos, self.eos_id, "eos_token"),
        )
        for flag, token_id, name in ends:
            if flag and token_id is None:
                raise CheckpointError(f"{self._where}: add_{name}: is true, but there is no {name}")
        if config.add_bos is not None and self.bos_id is not None:
            remaining = prefix[1:] if prefix[:1] == (self.bos_id,) else prefix
            prefix = (self.bos_id, *remaining) if config.add_bos else remaining
        if config.add_eos is not None and self.eos_id is not None:
            remaining = suffix[:-1] if suffix[-1:] == (self.eos_id,) else suffix
            suffix = (*remaining, self.eos_id) if config.add_eos else remaining
        return prefix, suffix


def _added_token_texts(config: TokenizerConfig) -> dict[int, str]:
    """Return the texts of the added tokens of other files by their ids."""
    return {number: token.content for number, token in config.added_tokens.items()}


_Flags = tuple[bool, bool, bool, bool, bool]
"""Flags of an added token in the order of `_token_flags`."""


def _token_flags(token: tokenizers.AddedToken) -> _Flags:
    """Return the flags of an added token, with which it is found in a text."""
    return token.single_word, token.lstrip, token.rstrip, token.normalized, token.special


def _add_declared_tokens(
    library: tokenizers.Tokenizer, config: TokenizerConfig, where: str
) -> None:
    """Add tokens to the library that files beside `tokenizer.json` declare, as transformers does.

    `added_tokens_decoder` also corrects the flags of existing tokens; `added_tokens.json` does not.
    """
    existing = {token.content: token for token in library.get_added_tokens_decoder().values()}
    has_flags = config.fields is not None and "added_tokens_decoder" in config.fields
    missing = [
        token
        for token in config.added_tokens.values()
        if token.content not in existing
        or (has_flags and _token_flags(token) != _token_flags(existing[token.content]))
    ]
    if not missing:
        return
    with convert_library_errors(f"{where}: added tokens"):
        library.add_tokens(missing)
    for number, token in config.added_tokens.items():
        actual = library.token_to_id(token.content)
        if actual != number and token.content not in existing:
            message = "%s: token %s has id %s there, as in transformers; another file says %s"
            logger.warning(message, where, display_text(token.content), actual, number)
            break


def _mark_special_tokens(library: tokenizers.Tokenizer, names: Sequence[str]) -> None:
    """Mark added or other tokens of the library as special. Their other flags stay as they are."""
    existing = {token.content: token for token in library.get_added_tokens_decoder().values()}
    tokens: list[tokenizers.AddedToken] = []
    for name in dict.fromkeys(names):
        token = existing.get(name, tokenizers.AddedToken(name, normalized=False))
        if name in existing and not token.special:
            token = tokenizers.AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
        tokens.append(token)
    library.add_special_tokens(tokens)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's bytes by the printable characters that stand for them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spare_bytes = (byte for byte in range(256) if chr(byte) not in alphabet)
    return {
        character: ord(character) if ord(character) < 256 else next(spare_bytes)
        for character in alphabet
    }


def _read_decoder(library: tokenizers.Tokenizer, where: str) -> tuple[Callable[[str], bytes], bool]:
    """Return the function from a token's text to bytes, and True if a text loses its leading space.

    Characters of a byte-level vocabulary stand for bytes; in others texts are replaced, and tokens
    like <0x0A> are bytes.
    """
    state = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return partial(_byte_level_bytes, alphabet=_byte_alphabet()), False
    replacements: list[tuple[str, str]] = []
    strips = False
    for position, step in enumerate(steps):
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips |= step["prepend_scheme"] != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            if "Fuse" not in kinds[:position]:
                reason = "Strip without Fuse before it is not supported"
                raise CheckpointError(f"{where}: decoder: {reason}")
            strips = True
        elif kind not in ("ByteFallback", "Fuse"):
            raise CheckpointError(f"{where}: decoder: {display_text(kind)} is not supported here")
    if not replacements:
        reason = f"{display_text(kinds)} is not supported (ByteLevel and SentencePiece are)"
        raise CheckpointError(f"{where}: decoder: {reason}")
    has_byte_tokens = "ByteFallback" in kinds
    return (
        partial(_replaced_bytes, replacements=replacements, has_byte_tokens=has_byte_tokens),
        strips,
    )


def _byte_level_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # a token added as plain text
        return token.encode()


def _replaced_bytes(
    token: str, replacements: Sequence[tuple[str, str]], has_byte_tokens: bool
) -> bytes:
    """Return the bytes of a token after replacements; those such as <0x0A> may be a byte each."""
    if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()


def check_tokenizer_content(where: str, file: Any, declared: int) -> int:
    """Raise CheckpointError for content that needs much time or memory; return the highest id.

    where: the file, for messages. file: its JSON value. declared: characters of the added tokens of
    other files.
    """
    try:
        model = file["model"]
        vocab = model["vocab"]
        ids = vocab if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
        added = sum(len(token["content"]) for token in file.get("added_tokens") or ())
        normalized = (added + declared) * _max_growth(file.get("normalizer"))
        size = f"{MAX_CHARACTERS:,} characters"
        faults = [
            ("added_tokens", normalized > MAX_CHARACTERS, f"come to over {size}"),
            ("model: vocab", sum(map(len, ids)) > MAX_CHARACTERS, f"has over {size}"),
            (
                "model: dropout",
                bool(model.get("dropout")),
                "makes encoding random, null is expected",
            ),
        ]
        for key in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
            part = file.get(key)
            text = json.dumps(part)
            grows = _max_growth(part) > MAX_GROWTH
            is_large = len(text) > MAX_PART_CHARACTERS and "precompiled_charsmap" not in text
            faults += [
                (key, grows, f"may make a text {MAX_GROWTH:,} times as long"),
                (key, is_large, f"has more than {MAX_PART_CHARACTERS:,} characters"),
                # Groups that call groups that call groups are compiled without end.
                (key, r"\g" in text, r"calls a group of its pattern by \g"),
            ]
        highest: int = max(ids.values(), default=-1)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: is no tokenizer: {one_line(repr(error))}") from None
    for key, has_fault, reason in faults:
        if has_fault:
            raise CheckpointError(f"{where}: {key}: {reason}")
    return highest


def _max_growth(step: Any) -> float:
    """Return the most a text may grow by a normalizer, pre-tokenizer, decoder or post-processor."""
    if step is None:
        return 1.0
    growth = _GROWTH_BY_TYPE.get(step["type"], 1.0) + sum(
        len(step.get(key, "")) for key in ("content", "prepend")
    )
    growth *= max(1, sum("Sequence" in piece for piece in step.get("single", ())))
    inner = (
        step.get(name, ()) for name in ("normalizers", "pretokenizers", "decoders", "processors")
    )
    return math.prod(map(_max_growth, chain.from_iterable(inner)), start=growth)


@contextmanager
def convert_library_errors(where: str, kind: type[SpdError] = CheckpointError) -> Iterator[None]:
    """Turn a library's exception in the block into an error of one line that begins with `where`."""
    try:
        yield
    except BaseException as error:  # a panic is no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a signal
        if isinstance(error, SpdError):
            raise
        message = one_line(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise kind(f"{where}: {message}") from None
