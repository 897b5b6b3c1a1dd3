"""Text to token ids and back, over the `tokenizers` library and `tokenizer.json` alone.

Plain text never becomes a special token unless asked, and every token's exact bytes are known, so that
text can be put together incrementally. Byte-level and SentencePiece-style vocabularies are supported.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import tokenizers

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.formats.json_file import one_line, shown
from spd.formats.tokenizer_file import (
    TokenizerConfig,
    load_tokenizer,
    quiet_library,
    read_tokenizer_config,
    within,
)

MAX_ID = (1 << 24) - 1
PIECE = 1 << 16
"""Characters that are encoded at a time to see how long a text is."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class _Decoder:
    """How a token's text becomes bytes.

    `alphabet` is the byte of each character (byte-level vocabularies), else `replacements` are made in
    the text, tokens like <0x0A> being bytes; `strips` drops the space that a whole text begins with.
    """

    alphabet: dict[str, int] | None
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strips: bool = False

    def bytes_of(self, token: str) -> bytes:
        if self.alphabet is not None:
            try:
                return bytes(self.alphabet[character] for character in token)
            except KeyError:  # a token added as plain text
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


class Tokenizer:
    """The tokenizer of a model folder; safe to use from several threads."""

    def __init__(
        self, library: tokenizers.Tokenizer, highest: int, config: TokenizerConfig, where: str
    ) -> None:
        self._library = library
        self._where = where
        self._lock = threading.Lock()
        self._stuck = False
        # Names given in tokenizer_config.json are special even where tokenizer.json forgets to say so.
        names = (*config.roles.values(), *config.additional)
        named = [name for name in names if self.token_to_id(name) is not None]
        special = [tokenizers.AddedToken(name, special=True, normalized=False) for name in named]
        library.add_special_tokens(special)
        added = library.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.special or token.content in named
        }
        self.vocab_size = max(highest, *added, -1) + 1
        """The highest token id plus one, added tokens included."""
        if not 0 < self.vocab_size <= MAX_ID + 1:
            highest = self.vocab_size - 1
            raise CheckpointError(f"{where}: token ids reach {highest}, 0 to {MAX_ID} are supported")
        self.special_ids = frozenset(self.special_tokens.values())
        self.bos_id = self._role(config, "bos_token")
        self.eos_id = self._role(config, "eos_token")
        # The unknown token may well come out of plain text; no other special one may.
        self._forbidden_ids = self.special_ids - {self._role(config, "unk_token")}
        self._decoder = _read_decoder(library, where)
        self.token_bytes = cache(self._bytes_of)
        """The exact bytes that a token stands for; none for special tokens and for ids without a token.

        A leading space counts, also where `decode` drops it from the start of a whole text.
        """
        self._prefix, self._suffix = self._read_surroundings(config)
        self.adds_bos = self.bos_id is not None and self._prefix[:1] == (self.bos_id,)

    @classmethod
    def open(cls, folder: Path, config: TokenizerConfig | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder; `config` where it was read. Raises `CheckpointError`."""
        config = config or read_tokenizer_config(folder)
        return cls(*load_tokenizer(folder), config, str(folder / "tokenizer.json"))

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text.

        `parse_special` lets strings such as <|im_end|> become special tokens; `add_special` puts around
        the text what the tokenizer is set up to put there (usually the BOS token).
        Raises `UsageError` for text that is not Unicode, `IncompatibleError` when the tokenizer fails.
        """
        ids = self._encode(text, parse_special)
        if not parse_special and not self._forbidden_ids.isdisjoint(ids):
            ids = self._encode_in_pieces(text)
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def bounded(self, text: str, context: int, *, cut: bool = False) -> str:
        """A text that may fit a context of so many tokens; with `cut` the end of one that is far longer.

        Raises IncompatibleError for such a text without. Pieces are encoded from the end until they have
        twice as many tokens, less what a cut may have made of the token at either end of a piece.
        """
        if len(text) <= 8 * context + PIECE:
            return text
        longest = max(map(len, self._library.get_vocab(with_added_tokens=True)), default=0)
        start, count = len(text), 0
        while start > 0 and count <= 2 * context:
            ids = self._encode(text[max(0, start - PIECE) : start], parse_special=True)
            count += max(0, len(ids) - 2 * longest)
            start -= PIECE
        if start <= 0:
            return text
        if cut:
            return text[start:]
        raise IncompatibleError(
            f"the prompt is {len(text):,} characters, far more than {context:,} tokens, which is the context",
            fix=["a shorter prompt"],
            code="context_overflow",
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids: their bytes as UTF-8, U+FFFD for what is none."""
        raw = b"".join(
            (b"" if skip_special else self._token(token_id).encode())
            if token_id in self.special_ids
            else self.token_bytes(token_id)
            for token_id in ids
        )
        return raw.decode("utf-8", "replace").removeprefix(" " if self._decoder.strips else "")

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """The exact bytes of tokens of the vocabulary, one after the other; see `token_bytes`."""
        return b"".join(map(self.token_bytes, token_ids))

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self._decoder.bytes_of(self._token(token_id))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as it is written in the vocabulary."""
        return self._library.token_to_id(token)

    def fingerprint(self) -> str:
        """SHA-256 in hex over all pairs of id and token; equal for tokenizers with one vocabulary."""
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        pairs = sorted((token_id, token) for token, token_id in vocabulary.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def _token(self, token_id: int) -> str:
        return (self._library.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None) or ""

    def _role(self, config: TokenizerConfig, role: str) -> int | None:
        name = config.roles.get(role)
        return None if name is None else self.token_to_id(name)

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        if self._stuck:
            raise IncompatibleError(f"{self._where}: an earlier text did not come back from the tokenizer")
        seconds = 30 + len(text) / 10_000
        try:
            with self._lock, quiet_library():
                self._library.encode_special_tokens = not parse_special
                # Of the encoding calls only this one lets go of the interpreter, so that a clock can run.
                call = partial(self._library.encode_batch_fast, [text], add_special_tokens=False)
                ids: list[int] = within(seconds, call)[0].ids
                return ids
        except TimeoutError:
            self._stuck = True
            why = f"takes more than {seconds:.0f} s to encode this text"
            raise IncompatibleError(f"{self._where}: {why}") from None
        except (TypeError, UnicodeEncodeError):
            raise UsageError("the text is not Unicode: it holds half of a surrogate pair") from None
        except Exception as error:
            raise IncompatibleError(f"{self._where}: cannot encode this text: {one_line(error)}") from None

    def _encode_in_pieces(self, text: str) -> list[int]:
        """Plain text through a vocabulary that holds special tokens as ordinary words: cut inside each."""
        names = [name for name in self.special_tokens if len(name) > 1 and name in text]
        names.sort(key=len, reverse=True)
        cuts = "|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names) or "(?!)"
        pieces = re.split(cuts, text)
        ids = [token_id for piece in pieces for token_id in self._encode(piece, parse_special=False)]
        if not self._forbidden_ids.isdisjoint(ids):
            raise IncompatibleError(f"{self._where}: turns plain text into special tokens")
        return ids

    def _read_surroundings(self, config: TokenizerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before and after a text, corrected by what the config says."""
        whole = self._library.encode("a")
        if not all(self._token(token_id) for token_id in whole.ids):
            raise CheckpointError(f"{self._where}: post_processor: adds token ids that do not exist")
        own = [position for position, added in enumerate(whole.special_tokens_mask) if not added]
        first, last = (own[0], own[-1] + 1) if own else (len(whole.ids), len(whole.ids))
        prefix, suffix = tuple(whole.ids[:first]), tuple(whole.ids[last:])
        ends = (config.add_bos, self.bos_id, "bos"), (config.add_eos, self.eos_id, "eos")
        for flag, token_id, name in ends:
            if flag and token_id is None:
                why = f"add_{name}_token: is true, but there is no {name}_token"
                raise CheckpointError(f"{self._where}: {why}")
        if config.add_bos is not None and self.bos_id is not None:
            prefix = (self.bos_id,) * config.add_bos + prefix[prefix[:1] == (self.bos_id,) :]
        if config.add_eos is not None and self.eos_id is not None:
            suffix = suffix[: len(suffix) - (suffix[-1:] == (self.eos_id,))] + (self.eos_id,) * config.add_eos
        return prefix, suffix


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2 for the 256 bytes, character to byte."""
    spans = ("!", "~"), ("¡", "¬"), ("®", "ÿ")
    printable = [byte for first, last in spans for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_decoder(library: tokenizers.Tokenizer, where: str) -> _Decoder:
    """Understand the decoder of a tokenizer; one whose bytes a token are unknown is refused by name."""
    state = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Decoder(_byte_alphabet())
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
                raise CheckpointError(f"{where}: decoder: Strip without Fuse before it is not supported")
            strips = True
        elif kind not in ("ByteFallback", "Fuse"):
            raise CheckpointError(f"{where}: decoder: {shown(kind)} is not supported here")
    if not replacements:
        why = f"{shown(kinds)} is not supported (ByteLevel and SentencePiece are)"
        raise CheckpointError(f"{where}: decoder: {why}")
    return _Decoder(None, tuple(replacements), "ByteFallback" in kinds, strips)
