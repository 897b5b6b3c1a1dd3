"""Text to token ids and back, over the `tokenizers` library and `tokenizer.json` alone.

Plain text never becomes a special token unless asked, and every token's exact bytes are known, so that
text can be put together incrementally. Byte-level and SentencePiece-style vocabularies are supported.

The file is untrusted. What takes much time or memory is refused before the library sees it: replacements may
double a text again and again. Merges and regular expressions may make the library panic, which becomes an
error. Classes that `tokenizer_config.json` names are never imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from spd.errors import CheckpointError, IncompatibleError, SpdError, UsageError
from spd.formats.encoder import Encode, Encoder, encode_ids
from spd.formats.files import FILE_LIMIT
from spd.formats.json_file import display_text, one_line, parse_json, read_text
from spd.formats.names import TOKENIZER_FILE
from spd.formats.thinking import find_mark_tokens
from spd.formats.tokenizer_config import MAX_ID, TokenizerConfig, read_tokenizer_config

_CHANNELS = (("<|message|>", "<|start|>", "<|channel|>", "<|end|>", "<|eom|>"),)
"""What parts a reply into messages; only such models have the first of each."""
SHORT = 1 << 16  # characters of a text that is encoded to see how long it is, whatever the context
MAX_CHARACTERS = (
    4_000_000  # of a vocabulary; published: 2 million. The library takes up to 250 bytes for one
)
MAX_PART = 20_000  # characters of JSON of a normalizer and so on; published: 3,000
MAX_GROWTH = 1000  # of a text by one part; published: T5's map of characters and a pattern, 33 x 4
_GROWTH = {"BertNormalizer": 18, "ByteLevel": 3, "Lowercase": 2, "Metaspace": 5, "Precompiled": 33}
_GROWTH |= {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
logger = logging.getLogger(__name__)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
        """Take a library's tokenizer, and what encodes in its place."""
        self._library = library
        self._where = where
        self._lock = threading.Lock()
        self._encoder = Encoder(encode or partial(encode_ids, library), where)
        self._declared = _contents(config)
        _add_declared(library, config, where)
        # Names given in tokenizer_config.json are special even where tokenizer.json forgets to say so.
        named = [name for name in config.special_tokens if self.token_to_id(name) is not None]
        _make_special(library, named)
        added = library.get_added_tokens_decoder()
        special = (
            pair for pair in sorted(added.items()) if pair[1].special or pair[1].content in named
        )
        self.special_tokens = {token.content: token_id for token_id, token in special}
        self.vocab_size = (
            max(last, *added, -1) + 1
        )  # the highest token id plus one, added tokens included
        if not 0 < self.vocab_size <= MAX_ID + 1:
            why = f"token ids reach {self.vocab_size - 1}, 0 to {MAX_ID} are supported"
            raise CheckpointError(f"{where}: {why}")
        self.special_ids = frozenset(self.special_tokens.values())
        self.added_tokens = frozenset(token.content for token in added.values())
        """The names of tokens beside the vocabulary proper, special ones and others."""
        roles = {role: self.token_to_id(name) for role, name in config.roles.items()}
        self.bos_id = roles.get("bos_token")
        self.eos_id = roles.get("eos_token")
        # The unknown token may well come out of plain text; no other special one may.
        self._forbidden_ids = self.special_ids - {roles.get("unk_token")}
        bytes_of, self._strips = _read_decoder(library, where)
        told = {name for own in _CHANNELS if own[0] in self.special_tokens for name in own}
        told |= find_mark_tokens(self.special_tokens)
        silent = {i for name, i in self.special_tokens.items() if name not in told}
        self.token_bytes = cache(lambda i: b"" if i in silent else bytes_of(self._token(i)))
        """The exact bytes that a token stands for, a leading space included; none for ids without a token and
        special tokens, but for those that part a reply into thinking and answer."""
        self._prefix, self._suffix = self._read_surroundings(config)
        self.digest = b""

    @classmethod
    def open(cls, folder: Path, config: TokenizerConfig | None = None) -> Tokenizer:
        """Load a folder's tokenizer; `config` where it was read."""
        config = config or read_tokenizer_config(folder)
        path = folder / TOKENIZER_FILE
        text = read_text(path, FILE_LIMIT)
        declared = sum(len(token.content) for token in config.added_tokens.values())
        highest = check_content(str(path), parse_json(text, str(path)), declared)
        with convert_library_errors(str(path)):
            library = tokenizers.Tokenizer.from_str(text)
            # Truncation would cut prompts in silence, padding would lengthen them.
            library.no_truncation()
            library.no_padding()
        tokenizer = cls(library, highest, config, str(path))
        tokenizer.digest = hashlib.sha256(text.encode()).digest()
        return tokenizer

    def is_same_file(self, folder: Path) -> bool:
        """True if a folder holds the very file that this one was opened from, and adds the same tokens."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            return False
        if hashlib.sha256(read_text(path, FILE_LIMIT).encode()).digest() != self.digest:
            return False
        return _contents(read_tokenizer_config(folder)) == self._declared

    def encode(
        self, text: str, *, parse_special: bool = False, add_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        `parse_special` lets strings such as <|im_end|> become special tokens; `add_special` puts around
        the text what the tokenizer is set up to put there (usually the BOS token).
        Raises `UsageError` for text that is not Unicode, `IncompatibleError` when the tokenizer fails.
        """
        ids = self._encode(text, parse_special)
        if not parse_special and not self._forbidden_ids.isdisjoint(ids):
            raise IncompatibleError(f"{self._where}: turns plain text into special tokens")
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def limit_length(self, text: str, context: int, *, cut: bool = False) -> str:
        """A text that may fit a context of so many tokens; with `cut` the end of one that cannot.

        Such a text has more characters than as many of the longest tokens. Else raises IncompatibleError.
        """
        if len(text) <= SHORT:
            return text
        longest = max(map(len, self._library.get_vocab(with_added_tokens=True)), default=0)
        most = max(SHORT, longest * context)
        if len(text) > most and not cut:
            why = (
                f"{len(text):,} characters, far more than {context:,} tokens, which is the context"
            )
            raise IncompatibleError(
                f"the prompt is {why}", fix=["a shorter prompt"], code="context_overflow"
            )
        return text[-most:]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids: their bytes as UTF-8, U+FFFD for what is none."""
        names = () if skip_special else self.special_ids
        raw = b"".join(self._token(i).encode() if i in names else self.token_bytes(i) for i in ids)
        return raw.decode("utf-8", "replace").removeprefix(" " if self._strips else "")

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The exact bytes of tokens of the vocabulary, one after the other; see `token_bytes`."""
        return b"".join(map(self.token_bytes, token_ids))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as it is written in the vocabulary."""
        return self._library.token_to_id(token)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex over all pairs of id and token; equal for tokenizers with one vocabulary."""
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        pairs = sorted((token_id, token) for token, token_id in vocabulary.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def _token(self, token_id: int) -> str:
        return (self._library.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None) or ""

    def _encode(self, text: str, parse_special: bool) -> list[int]:
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
        """What the post-processor puts before and after a text, corrected by what the config says."""
        with convert_library_errors(f"{self._where}: cannot encode a letter"):
            whole = self._library.encode("a")
        if not all(self._token(token_id) for token_id in whole.ids):
            raise CheckpointError(
                f"{self._where}: post_processor: adds token ids that do not exist"
            )
        own = [position for position, added in enumerate(whole.special_tokens_mask) if not added]
        first, last = (own[0], own[-1] + 1) if own else (len(whole.ids), len(whole.ids))
        prefix = tuple(whole.ids[:first])
        suffix = tuple(whole.ids[last:])
        self._library.post_processor = None  # from here on both are put there by `encode`
        if whole.ids[first:last] != self._library.encode("a").ids:
            raise CheckpointError(f"{self._where}: post_processor: repeats the text")
        ends = (
            (config.add_bos, self.bos_id, "bos_token"),
            (config.add_eos, self.eos_id, "eos_token"),
        )
        for flag, token_id, name in ends:
            if flag and token_id is None:
                raise CheckpointError(f"{self._where}: add_{name}: is true, but there is no {name}")
        if config.add_bos is not None and self.bos_id is not None:
            prefix = (self.bos_id,) * config.add_bos + prefix[prefix[:1] == (self.bos_id,) :]
        if config.add_eos is not None and self.eos_id is not None:
            suffix = (
                suffix[: len(suffix) - (suffix[-1:] == (self.eos_id,))]
                + (self.eos_id,) * config.add_eos
            )
        return prefix, suffix


def _contents(config: TokenizerConfig) -> dict[int, str]:
    """Return the texts of the added tokens of other files by their ids."""
    return {number: token.content for number, token in config.added_tokens.items()}


_Flags = tuple[bool, bool, bool, bool, bool]


def _flags(token: tokenizers.AddedToken) -> _Flags:
    return token.single_word, token.lstrip, token.rstrip, token.normalized, token.special


def _add_declared(library: tokenizers.Tokenizer, config: TokenizerConfig, where: str) -> None:
    """Add the tokens that files beside `tokenizer.json` declare, as transformers does.

    `added_tokens_decoder` also corrects the flags of tokens that are there; `added_tokens.json` does not.
    """
    known = {token.content: token for token in library.get_added_tokens_decoder().values()}
    has_flags = config.fields is not None and "added_tokens_decoder" in config.fields
    missing = [
        token
        for token in config.added_tokens.values()
        if token.content not in known
        or (has_flags and _flags(token) != _flags(known[token.content]))
    ]
    if not missing:
        return
    with convert_library_errors(f"{where}: added tokens"):
        library.add_tokens(missing)
    for number, token in config.added_tokens.items():
        actual = library.token_to_id(token.content)
        if actual != number and token.content not in known:
            words = "%s: token %s has id %s there, as in transformers; another file says %s"
            logger.warning(words, where, display_text(token.content), actual, number)
            break


def _make_special(library: tokenizers.Tokenizer, names: Sequence[str]) -> None:
    """Make added or other tokens of a vocabulary special. Their other flags stay as they are."""
    known = {token.content: token for token in library.get_added_tokens_decoder().values()}
    tokens: list[tokenizers.AddedToken] = []
    for name in dict.fromkeys(names):
        token = known.get(name, tokenizers.AddedToken(name, normalized=False))
        if name in known and not token.special:
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
    """The printable stand-ins of GPT-2 for the 256 bytes, character to byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return {
        character: ord(character) if ord(character) < 256 else next(others)
        for character in alphabet
    }


def _read_decoder(library: tokenizers.Tokenizer, where: str) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text becomes bytes, and whether a whole text loses the space that it begins with.

    Characters of a byte-level vocabulary stand for bytes; in others texts are replaced, and tokens like
    <0x0A> are bytes.
    """
    state = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()

        def spelled(token: str) -> bytes:
            try:
                return bytes(alphabet[character] for character in token)
            except KeyError:  # a token added as plain text
                return token.encode()

        return spelled, False
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
                raise CheckpointError(
                    f"{where}: decoder: Strip without Fuse before it is not supported"
                )
            strips = True
        elif kind not in ("ByteFallback", "Fuse"):
            raise CheckpointError(f"{where}: decoder: {display_text(kind)} is not supported here")
    if not replacements:
        why = f"{display_text(kinds)} is not supported (ByteLevel and SentencePiece are)"
        raise CheckpointError(f"{where}: decoder: {why}")

    def replaced(token: str) -> bytes:
        if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return replaced, strips


def check_content(where: str, file: Any, declared: int) -> int:
    """Refuse bombs by their keys; returns the highest id.

    declared: characters of the added tokens of other files.
    """
    try:
        model = file["model"]
        ids = model["vocab"]
        ids = ids if isinstance(ids, dict) else {pair[0]: at for at, pair in enumerate(ids)}
        added = sum(len(token["content"]) for token in file.get("added_tokens") or ())
        longer = (added + declared) * _growth(file.get("normalizer")) > MAX_CHARACTERS
        faults = [
            ("added_tokens", longer, f"come to over {MAX_CHARACTERS:,} characters"),
            (
                "model: vocab",
                sum(map(len, ids)) > MAX_CHARACTERS,
                f"has over {MAX_CHARACTERS:,} characters",
            ),
            (
                "model: dropout",
                bool(model.get("dropout")),
                "makes encoding random, null is expected",
            ),
        ]
        for key in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
            part = file.get(key)
            text = json.dumps(file.get(key))
            large = len(text) > MAX_PART and "precompiled_charsmap" not in text
            faults += [
                (key, _growth(part) > MAX_GROWTH, f"may make a text {MAX_GROWTH:,} times as long"),
                (key, large, f"has more than {MAX_PART:,} characters"),
                # Groups that call groups that call groups are compiled without end.
                (key, r"\g" in text, r"calls a group of its pattern by \g"),
            ]
        highest: int = max(ids.values(), default=-1)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: is no tokenizer: {one_line(repr(error))}") from None
    for key, is_one, words in faults:
        if is_one:
            raise CheckpointError(f"{where}: {key}: {words}")
    return highest


def _growth(step: Any) -> float:
    """How many times as long a normalizer, pre-tokenizer, decoder or post-processor may make a text."""
    if step is None:
        return 1.0
    growth = _GROWTH.get(step["type"], 1.0) + sum(
        len(step.get(key, "")) for key in ("content", "prepend")
    )
    growth *= max(1, sum("Sequence" in piece for piece in step.get("single", ())))
    inner = (
        step.get(name, ()) for name in ("normalizers", "pretokenizers", "decoders", "processors")
    )
    return math.prod(map(_growth, chain.from_iterable(inner)), start=growth)


@contextmanager
def convert_library_errors(where: str, kind: type[SpdError] = CheckpointError) -> Iterator[None]:
    """Make what the library raises inside the block a refusal of one line that begins with `where`."""
    try:
        yield
    except BaseException as error:  # a panic is no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a signal
        if isinstance(error, SpdError):
            raise
        message = one_line(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise kind(f"{where}: {message}") from None
