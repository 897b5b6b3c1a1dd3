"""A model's tokenizer, chat template and marks of thinking, which turn text into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from spd.errors import IncompatibleError
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


TAIL_TOKENS = 64
"""Tokens at the end of a prompt among which its last marks of thinking are searched."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer and chat template; without a tokenizer only --prompt-ids works."""

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
        """Return the text of a prompt's last tokens, special tokens included."""
        return self.need_tokenizer().decode(ids[-TAIL_TOKENS:], skip_special=False)

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises IncompatibleError if the folder has none."""
        if self.tokenizer is None:
            pull_hint = [
                f"spd pull {self.name}, if its download was not finished"
            ] * is_repository_name(self.name)
            message = f"{self.name} has no tokenizer.json, so text cannot be read"
            fix = "--prompt-ids 1,2,3"
            raise IncompatibleError(message, fix=[*pull_hint, fix], code="no_tokenizer")
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """Return the chat template. Raises IncompatibleError if the folder has none."""
        if self.template is None:
            message = f"{self.name} has no chat template"
            fix = ["spd generate --raw"]
            reason = ["It is a base model: it continues text and does not answer."]
            raise IncompatibleError(message, reason=reason, fix=fix, code="no_chat_template")
        return self.template


def open_vocabulary(name: str, folder: ModelFolder) -> Vocabulary:
    """Read a model folder's configuration, and its tokenizer and chat template if it has them.

    name: the model, as messages call it. Raises IncompatibleError for the folder of a head.
    """
    from spd.formats.model_config import refuse_head

    refuse_head(folder.config, folder.path)
    tokenizer = folder.tokenizer
    return Vocabulary(
        folder.config, tokenizer, None if tokenizer is None else folder.template, name
    )
