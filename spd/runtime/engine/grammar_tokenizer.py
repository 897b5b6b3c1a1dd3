"""The vocabulary of a grammar: the tokens of a model's tokenizer, and how it encodes text.

Where a grammar has only one continuation, llguidance forces its text, which it encodes as the
tokenizer would. The name of a control token in that text is encoded by ordinary tokens: a parser of
replies would misread the control token itself.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from spd.errors import SpdError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from spd.formats.tokenizer import Tokenizer

_FENCE = "\x02"
"""A character that no vocabulary joins with the following text.

Some tokenizers drop or add a blank at the beginning of a text, so a text is also encoded after
this.
"""


class GrammarVocabulary:
    """A tokenizer with the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: number of ids in a mask, those without a token included."""
        self._tokenizer = tokenizer
        controls = _control_tokens(tokenizer)
        self._controls = frozenset(controls)
        self.special_token_ids = sorted(controls)
        self.tokens = [
            controls[token].encode() if token in controls else tokenizer.token_bytes(token)
            for token in range(size)
        ]
        self.eos_token_id = self._end_of_text(size)
        self.bos_token_id = tokenizer.bos_id
        names = sorted(controls.values(), key=len, reverse=True)
        self._control = re.compile(f"(?=({'|'.join(map(re.escape, names))}))") if names else None
        self._library: LLTokenizer | None = None

    def library(self) -> LLTokenizer:
        """Return llguidance's form of this vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._library is None:
            self._library = LLTokenizer(TokenizerWrapper(self))
        return self._library

    def __call__(self, text: str | bytes) -> list[int]:
        """Return ordinary tokens for a text. It does not raise, since llguidance would panic."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        text_bytes = text.encode()
        for encode in (self._encode, self._encode_fenced):
            ids = encode(text)
            if self._decode_bytes(ids) == text_bytes and self._controls.isdisjoint(ids):
                return ids
        return self._library.greedy_tokenize(text) if self._library is not None else []

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is cut inside each control token's name.

        None on errors.
        """
        names = self._control.finditer(text) if self._control is not None else ()
        cuts = [0, *(name.start() + 1 for name in names), len(text)]
        try:
            pieces = [
                self._tokenizer.encode(text[begin:end]) for begin, end in itertools.pairwise(cuts)
            ]
        except SpdError:
            return []
        return [token for piece in pieces for token in piece]

    def _encode_fenced(self, text: str) -> list[int]:
        """Return the tokens of a text that follows `_FENCE`, so that no blank is dropped or added."""
        ids = self._encode(_FENCE + text)
        for count in range(len(ids)):
            if self._decode_bytes(ids[:count]).lstrip(b" ") == _FENCE.encode():
                return ids[count:]
        return []

    def _decode_bytes(self, ids: list[int]) -> bytes:
        """Return the bytes that token ids stand for."""
        return self._tokenizer.decode_bytes(ids)

    def _end_of_text(self, size: int) -> int:
        """Return the id by which llguidance ends a text; no mask allows it.

        An id without a token is best, since a grammar can contain a token by its number.
        """
        unused = range(self._tokenizer.vocab_size, size)
        if unused:
            return unused[0]
        if self._tokenizer.eos_id is not None:
            return self._tokenizer.eos_id
        return self.special_token_ids[0] if self.special_token_ids else size - 1


def _control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of the tokens without text, by id.

    These are the special tokens, and added tokens of the form `<…>`, such as `<tool_call>`.
    """
    names = (name for name in tokenizer.added_tokens if re.fullmatch(r"<.*>", name, re.DOTALL))
    added = {tokenizer.token_to_id(name): name for name in sorted(names)}
    special = {token: name for name, token in tokenizer.special_tokens.items()}
    return {**special, **{token: name for token, name in added.items() if token is not None}}
