"""A model's tokenizer, chat template and marks of thinking: what turns text into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from spd.errors import IncompatibleError, UsageError
from spd.formats.hub import is_repository_name
from spd.formats.thinking import (
    KNOWN_MARKS,
    ThinkingMarks,
    find_thinking_marks,
)

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.folder import ModelFolder
    from spd.formats.model_config import ModelConfig
    from spd.formats.tokenizer import Tokenizer


TAIL = 64
"""Tokens at the end of a prompt that can hold the marks of thinking it ends with."""


def check_ids(ids: Sequence[int], vocab_size: int, flag: str) -> None:
    """Raise UsageError for a token id that the vocabulary does not have."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            words = f"{flag}: token id {token_id} is not in the vocabulary"
            raise UsageError(words, reason=[f"valid: 0 to {vocab_size - 1}"])


@dataclass(frozen=True)
class Vocabulary:
    """What turns text into ids for one model; no tokenizer means that only --prompt-ids work."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    name: str

    @cached_property
    def marks(self) -> ThinkingMarks:
        """Return the marks of the model's thinking."""
        template = "" if self.template is None else self.template.default
        if self.tokenizer is None:
            return KNOWN_MARKS
        return find_thinking_marks(
            template, self.tokenizer.added_tokens, self.tokenizer.special_tokens.keys()
        )

    @cached_property
    def thinking_tokens(self) -> tuple[int | None, int] | None:
        """Return the tokens that begin and end thinking; None where no token ends it."""
        pair = self.marks.thinking[0]
        tokenizer = self.need_tokenizer()
        end = tokenizer.token_to_id(pair.closing)
        return None if end is None else (tokenizer.token_to_id(pair.opening), end)

    def prompt_end(self, ids: Sequence[int]) -> str:
        """Return the last words of a prompt, special tokens included."""
        return self.need_tokenizer().decode(ids[-TAIL:], skip_special=False)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises IncompatibleError when the folder has none."""
        if self.tokenizer is None:
            pull = [f"spd pull {self.name}, if its download was not finished"] * is_repository_name(
                self.name
            )
            words = f"{self.name} has no tokenizer.json, so text cannot be read"
            fix = "--prompt-ids 1,2,3"
            raise IncompatibleError(words, fix=[*pull, fix], code="no_tokenizer")
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """The chat template. Raises IncompatibleError when the folder has none."""
        if self.template is None:
            words = f"{self.name} has no chat template"
            fix = ["spd generate --raw"]
            why = ["It is a base model: it continues text and does not answer."]
            raise IncompatibleError(words, reason=why, fix=fix, code="no_chat_template")
        return self.template


def open_vocabulary(name: str, folder: ModelFolder) -> Vocabulary:
    """Configuration, tokenizer and chat template of a model folder, the latter two where they exist."""
    from spd.formats.model_config import refuse_head

    refuse_head(folder.config, folder.path)
    tokenizer = folder.tokenizer
    return Vocabulary(
        folder.config, tokenizer, None if tokenizer is None else folder.template, name
    )
