"""Prompts: token ids, raw text or the messages of a chat, and their encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from spd.conversation.messages import Message, for_template
from spd.conversation.token_ids import check_token_ids
from spd.errors import IncompatibleError, UsageError
from spd.formats.thinking import (
    THINKING_SWITCHES,
    continues_thinking,
    find_mark_tokens,
    opens_thinking,
)

if TYPE_CHECKING:
    from spd.conversation.vocabulary import Vocabulary
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer


RESERVED_ARGS = frozenset({"messages", "add_generation_prompt"})
"""Variables of chat templates that spd sets itself."""


@dataclass(frozen=True)
class Prompt:
    """One of: token ids, raw text, or the messages of a chat with the template's variables."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Message, ...] = ()
    variables: Mapping[str, object] | None = None
    suffix: str | None = None
    """The text behind the reply to a raw text: the reply fills in between."""
    continues: bool = False
    """True if the reply continues the last message, which the assistant has begun."""


THINKING_SWITCH = THINKING_SWITCHES[0]
"""The variable that switches thinking, whatever name the template has for it."""


def encode_prompt(prompt: Prompt, vocabulary: Vocabulary, context: int) -> list[int]:
    """Return the token ids of a prompt, a chat's rendered by the template.

    Raises UsageError for ids that the vocabulary lacks, IncompatibleError for a prompt far beyond
    `context` tokens or without the tokenizer or template that it needs, and what the template
    raises.
    """
    if prompt.ids is not None:
        check_token_ids(prompt.ids, vocabulary.config.vocab_size, "--prompt-ids")
        return list(prompt.ids)
    tokenizer = vocabulary.need_tokenizer()
    if prompt.text is not None:
        return _encode_raw_text(prompt.text, prompt.suffix, vocabulary, context)
    from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat

    template = vocabulary.need_template()
    messages = _messages_for_template(prompt, template)
    variables = prompt.variables or {}
    chat = render_chat(tokenizer, template, messages, continues=prompt.continues, **variables)
    text = tokenizer.limit_length(chat.marked, context)
    return encode_rendered(tokenizer, RenderedChat(text, chat.mark))


def _encode_raw_text(
    text: str, suffix: str | None, vocabulary: Vocabulary, context: int
) -> list[int]:
    """Return the ids of a raw prompt, whose control tokens are read as such, as transformers does.

    suffix: the text behind the reply. Raises IncompatibleError where the vocabulary has no tokens
    for it.
    """
    tokenizer = vocabulary.need_tokenizer()
    text = tokenizer.limit_length(text, context)
    if suffix is None:
        ids = tokenizer.encode(text, parse_special=True, add_special=True)
        return ids or [_first_token_id(vocabulary)]
    from spd.conversation.fill_in import fill_in_ids, find_fill_in_form

    form = find_fill_in_form(tokenizer)
    if form is None:
        message = (
            f"the vocabulary of {vocabulary.name} has no tokens for filling in before a suffix"
        )
        raise IncompatibleError(message, code="no_fill_in")
    behind = tokenizer.limit_length(suffix, context)
    text_ids = tokenizer.encode(text, parse_special=True)
    suffix_ids = tokenizer.encode(behind, parse_special=True)
    return fill_in_ids(tokenizer, form, text_ids, suffix_ids)


def _messages_for_template(prompt: Prompt, template: ChatTemplate) -> list[Message]:
    """Return the messages with their calls and their thinking in the form that the template
    reads.
    """
    source = template.separate_tools_template or template.default
    return [for_template(message, source) for message in prompt.messages]


def render_prompt(prompt: Prompt, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Return the prompt as text, special tokens spelled out: ids are decoded, chats rendered."""
    if prompt.messages:
        template = vocabulary.need_template()
        return template.render(_messages_for_template(prompt, template), **(prompt.variables or {}))
    if prompt.text:
        return prompt.text
    return (
        "" if vocabulary.tokenizer is None else vocabulary.tokenizer.decode(ids, skip_special=False)
    )


def leaves_thinking_open(prompt: Prompt, ids: Sequence[int], vocabulary: Vocabulary) -> bool | None:
    """Return True if a reply to a prompt begins inside thinking; None where it is no turn of a
    chat.

    ids: the prompt's tokens.
    """
    if vocabulary.tokenizer is None or not prompt.messages:
        return None
    if prompt.messages[-1].get("role") == "assistant":
        # The reply continues that turn.
        return continues_thinking(_last_turn_text(ids, vocabulary.tokenizer), vocabulary.marks)
    return opens_thinking(vocabulary.prompt_end(ids), vocabulary.marks)


def _last_turn_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt's tokens behind the last special one that is no thinking mark."""
    marks = {tokenizer.token_to_id(mark) for mark in find_mark_tokens(tokenizer.special_tokens)}
    ends = tokenizer.special_ids - marks
    turn = takewhile(lambda token: token not in ends, reversed(ids))
    return tokenizer.decode([*turn][::-1], skip_special=False)


def _first_token_id(vocabulary: Vocabulary) -> int:
    """Return the token id of an empty raw prompt: one that begins a text, else one that ends it.

    Raises UsageError if the model has neither.
    """
    tokenizer = vocabulary.need_tokenizer()
    config = vocabulary.config
    candidates = (tokenizer.bos_id, config.bos_token_id, tokenizer.eos_id, *config.eos_token_ids)
    if (token := next((token_id for token_id in candidates if token_id is not None), None)) is None:
        message = "the prompt is empty, and there is no beginning-of-text token"
        raise UsageError(message, fix=['spd generate --raw "text"'])
    return token
