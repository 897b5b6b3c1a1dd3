"""From what is asked to token ids that fit the context.

Owns the rule for prompts that are too long: refused, or cut at their oldest end on request. A chat
loses its oldest messages and then the beginning of the last one; its system message and the
template's own tokens stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.prompt import Asked
from spd.cli.sampling import check_ids
from spd.errors import IncompatibleError, UsageError
from spd.formats.hub import is_repository_name

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.model_config import ModelConfig
    from spd.formats.tokenizer import Tokenizer

DEFAULT_REPLY = 512
"""Tokens kept free for the reply when a prompt is cut and -n does not say how many."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """What turns text into ids for one model; no tokenizer means that only --prompt-ids work."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    name: str

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises IncompatibleError when the folder has none."""
        if self.tokenizer is None:
            pull = f"spd pull {self.name}, if its download was not finished"
            raise IncompatibleError(
                f"{self.name} has no tokenizer.json, so text cannot be read",
                fix=[*([pull] if is_repository_name(self.name) else []), "--prompt-ids 1,2,3"],
                code="no_tokenizer",
            )
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """The chat template. Raises IncompatibleError when the folder has none."""
        if self.template is None:
            raise IncompatibleError(
                f"{self.name} has no chat template",
                reason=["It is a base model: it continues text and does not answer."],
                fix=["spd generate --raw"],
                code="no_chat_template",
            )
        return self.template


def encode_asked(asked: Asked, vocabulary: Vocabulary, context: int, *, cut: bool) -> list[int]:
    """Token ids of what is asked; with `cut`, of what has far more than `context` of them, those of its end.

    Raises UsageError and IncompatibleError.
    """
    if asked.ids is not None:
        check_ids(asked.ids, vocabulary.config.vocab_size, "--prompt-ids")
        return list(asked.ids)
    tokenizer = vocabulary.need_tokenizer()
    if asked.text is not None:
        text = tokenizer.bounded(asked.text, context, cut=cut)
        ids = tokenizer.encode(text, parse_special=asked.parse_special, add_special=True)
        return ids or [first_token(vocabulary)]
    from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat

    template, variables = vocabulary.need_template(), asked.variables or {}
    chat = render_chat(tokenizer, template, asked.messages, **variables)
    text = tokenizer.bounded(chat.marked, context, cut=cut)
    return encode_rendered(tokenizer, RenderedChat(text, chat.mark))


def render_asked(asked: Asked, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The prompt as text, with the template's own tokens spelled out."""
    if asked.messages:
        return vocabulary.need_template().render(asked.messages, **(asked.variables or {}))
    if asked.text:
        return asked.text
    return "" if vocabulary.tokenizer is None else vocabulary.tokenizer.decode(ids, skip_special=False)


def first_token(vocabulary: Vocabulary) -> int:
    """What stands for an empty raw prompt: the first-token id, else the end-of-text id."""
    tokenizer, config = vocabulary.need_tokenizer(), vocabulary.config
    ends = [tokenizer.token_to_id(text) for text in END_OF_TEXT]
    for token_id in (tokenizer.bos_id, config.bos_token_id, *ends, tokenizer.eos_id, *config.eos_token_ids):
        if token_id is not None:
            return token_id
    raise UsageError(
        "the prompt is empty, and this model has no token to begin with", fix=['spd generate --raw "text"']
    )


def fit(
    asked: Asked, vocabulary: Vocabulary, *, context: int, max_tokens: int | None, truncate: bool
) -> tuple[Asked, list[int], int]:
    """What is asked so that it fits, its ids, and how many tokens were dropped, of those that were counted.

    Raises IncompatibleError if it does not fit and may not be cut, or cannot be cut enough.
    """
    ids = encode_asked(asked, vocabulary, context, cut=truncate)
    room = min(DEFAULT_REPLY, context // 2) if max_tokens is None else max_tokens
    keep = context - room
    if len(ids) < context and (not truncate or len(ids) <= keep):
        return asked, ids, 0
    if not truncate:
        raise _overflow(len(ids), context, keep, vocabulary.config.max_positions)
    if keep < 1:
        raise IncompatibleError(
            f"-n {room:,} leaves no room for a prompt in a context of {context:,} tokens",
            fix=["a smaller -n"],
        )
    if asked.messages:
        cut = _cut_chat(asked, vocabulary, keep)
        fitting = encode_asked(cut, vocabulary, context, cut=True)
    else:
        fitting = _cut_ids(ids, keep, vocabulary)
        cut = Asked(ids=tuple(fitting))
    return cut, fitting, len(ids) - len(fitting)


def _overflow(count: int, context: int, keep: int, most: int) -> IncompatibleError:
    fix = []
    wanted = count + context - max(keep, 0)
    if wanted <= most:
        fix.append(f"--ctx {-(-wanted // 1024)}k")
    if keep > 0:
        fix.append(
            f"--overflow truncate-left to drop the oldest {count - keep:,} tokens"
            f" (leaves {context - keep:,} for the reply)"
        )
    return IncompatibleError(
        f"prompt is {count:,} tokens but the context is {context:,}",
        reason=["A reply needs room too: at most one token less than the context."]
        if count == context
        else [],
        fix=fix or ["a shorter prompt"],
        code="context_overflow",
    )


def _cut_ids(ids: list[int], keep: int, vocabulary: Vocabulary) -> list[int]:
    """The newest `keep` ids; a first-token id in front stays in front."""
    tokenizer = vocabulary.tokenizer
    if keep > 1 and tokenizer is not None and tokenizer.adds_bos and ids[0] == tokenizer.bos_id:
        return [ids[0], *ids[len(ids) - keep + 1 :]]
    return ids[len(ids) - keep :]


def _cut_chat(asked: Asked, vocabulary: Vocabulary, keep: int) -> Asked:
    """The chat without its oldest messages, then without the beginning of its last one."""

    def size(messages: Sequence[Message]) -> int:
        part = Asked(messages=tuple(messages), variables=asked.variables)
        return len(encode_asked(part, vocabulary, keep, cut=True))

    system = [message for message in asked.messages[:1] if message["role"] == "system"]
    turns = list(asked.messages[len(system) :])
    last = len(turns) - 1  # templates want a user's turn first
    firsts = [i for i, turn in enumerate(turns) if i in (0, last) or turn["role"] == "user"]
    if firsts:
        at = bisect_left(firsts[:-1], True, key=lambda i: size([*system, *turns[i:]]) <= keep)
        turns = turns[firsts[at] :]
    if turns and size([*system, *turns]) > keep:
        turns[-1] = _cut_message(
            turns[-1], lambda last: size([*system, *turns[:-1], last]) - keep, vocabulary, keep
        )
    return Asked(messages=(*system, *turns), variables=asked.variables)


def _cut_message(
    message: Message, excess: Callable[[Message], int], vocabulary: Vocabulary, keep: int
) -> Message:
    """A message without its oldest tokens. Raises IncompatibleError if dropping all is not enough."""
    tokenizer = vocabulary.need_tokenizer()
    message = {**message, "content": tokenizer.bounded(message["content"], keep, cut=True)}
    tokens = tokenizer.encode(message["content"])
    dropped = 0
    while (over := excess(message)) > 0:
        if dropped >= len(tokens):
            raise IncompatibleError(
                "the prompt cannot be cut enough: the system message and the template alone are too long",
                fix=["a shorter system message, a smaller -n, or a larger --ctx"],
                code="context_overflow",
            )
        dropped += over
        # a cut inside a character leaves a replacement character in front that is not in the text
        text = tokenizer.decode(tokens[dropped:], skip_special=False).lstrip("\ufffd")
        message = {**message, "content": text}
    return message
