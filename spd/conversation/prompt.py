"""Prompts: token ids, raw text or the messages of a chat, and their encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from spd.conversation.fill_in import fill_in_form, fill_in_ids
from spd.conversation.messages import for_template
from spd.conversation.vocabulary import Vocabulary, check_ids
from spd.errors import IncompatibleError, UsageError
from spd.formats.thinking import (
    THINKING_SWITCHES,
    continues_thinking,
    find_mark_tokens,
    opens_thinking,
)

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer


RESERVED_ARGS = frozenset({"messages", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """One of: token ids, raw text, or the messages of a chat with the template's variables."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    suffix: str | None = None
    """What follows the reply to a raw text, which is to be filled in between."""
    continues: bool = False
    """Whether the reply continues the last message, which the assistant has begun."""


SWITCH = THINKING_SWITCHES[0]
"""The variable that switches thinking, whatever name the template has for it."""


def encode_prompt(asked: Prompt, vocabulary: Vocabulary, context: int) -> list[int]:
    """Token ids of what is asked. Raises UsageError, and IncompatibleError far beyond `context` of them."""
    if asked.ids is not None:
        check_ids(asked.ids, vocabulary.config.vocab_size, "--prompt-ids")
        return list(asked.ids)
    tokenizer = vocabulary.need_tokenizer()
    if asked.text is not None:
        return _encode_raw(asked.text, asked.suffix, vocabulary, context)
    from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat

    template = vocabulary.need_template()
    messages = _templated(asked, template)
    variables = asked.variables or {}
    chat = render_chat(tokenizer, template, messages, continues=asked.continues, **variables)
    text = tokenizer.limit_length(chat.marked, context)
    return encode_rendered(tokenizer, RenderedChat(text, chat.mark))


def _encode_raw(text: str, suffix: str | None, vocabulary: Vocabulary, context: int) -> list[int]:
    """Return the ids of a raw prompt, whose control tokens are read as such, as transformers does.

    suffix: what is to follow the reply. Raises IncompatibleError where the vocabulary has no tokens for it.
    """
    tokenizer = vocabulary.need_tokenizer()
    text = tokenizer.limit_length(text, context)
    if suffix is None:
        ids = tokenizer.encode(text, parse_special=True, add_special=True)
        return ids or [_first_token(vocabulary)]
    form = fill_in_form(tokenizer)
    if form is None:
        words = f"the vocabulary of {vocabulary.name} has no tokens for filling in before a suffix"
        raise IncompatibleError(words, code="no_fill_in")
    behind = tokenizer.limit_length(suffix, context)
    texts = (tokenizer.encode(one, parse_special=True) for one in (text, behind))
    return fill_in_ids(tokenizer, form, *texts)


def _templated(asked: Prompt, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the messages with their calls and their thinking in the form that the template reads."""
    source = template.separate_tools_template or template.default
    return [for_template(message, source) for message in asked.messages]


def render_prompt(asked: Prompt, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The prompt as text, with the template's own tokens spelled out."""
    if asked.messages:
        template = vocabulary.need_template()
        return template.render(_templated(asked, template), **(asked.variables or {}))
    if asked.text:
        return asked.text
    return (
        "" if vocabulary.tokenizer is None else vocabulary.tokenizer.decode(ids, skip_special=False)
    )


def leaves_thinking_open(prompt: Prompt, ids: Sequence[int], vocabulary: Vocabulary) -> bool | None:
    """Return True if a reply to a prompt begins inside thinking; None where it is no turn of a chat.

    ids: the prompt's tokens.
    """
    if vocabulary.tokenizer is None or not prompt.messages:
        return None
    if prompt.messages[-1].get("role") == "assistant":
        # The reply continues that turn.
        return continues_thinking(_last_turn(ids, vocabulary.tokenizer), vocabulary.marks)
    return opens_thinking(vocabulary.prompt_end(ids), vocabulary.marks)


def _last_turn(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return what a prompt holds behind its last special token that marks no thinking."""
    marks = {tokenizer.token_to_id(mark) for mark in find_mark_tokens(tokenizer.special_tokens)}
    ends = tokenizer.special_ids - marks
    turn = takewhile(lambda token: token not in ends, reversed(ids))
    return tokenizer.decode([*turn][::-1], skip_special=False)


def _first_token(vocabulary: Vocabulary) -> int:
    """What stands for an empty raw prompt: the first-token id, else one that ends a text."""
    tokenizer = vocabulary.need_tokenizer()
    config = vocabulary.config
    known = (tokenizer.bos_id, config.bos_token_id, tokenizer.eos_id, *config.eos_token_ids)
    if (token := next((one for one in known if one is not None), None)) is None:
        words = "the prompt is empty, and there is no beginning-of-text token"
        raise UsageError(words, fix=['spd generate --raw "text"'])
    return token
