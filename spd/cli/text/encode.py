"""From what is asked to token ids that fit the context; a prompt that does not is refused, never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spd.cli.text.prompt import Asked
from spd.cli.text.sampling import check_ids
from spd.errors import IncompatibleError, UsageError
from spd.formats.hub import is_repository_name

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.model_config import ModelConfig
    from spd.formats.tokenizer import Tokenizer

DEFAULT_REPLY = 512
"""Tokens to keep free for a reply where -n does not say how many."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


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


def encode_asked(asked: Asked, vocabulary: Vocabulary, context: int) -> list[int]:
    """Token ids of what is asked. Raises UsageError, and IncompatibleError far beyond `context` of them."""
    if asked.ids is not None:
        check_ids(asked.ids, vocabulary.config.vocab_size, "--prompt-ids")
        return list(asked.ids)
    tokenizer = vocabulary.need_tokenizer()
    if asked.text is not None:
        ids = tokenizer.encode(tokenizer.bounded(asked.text, context), add_special=True)
        return ids or [_first_token(vocabulary)]
    from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat

    template, variables = vocabulary.need_template(), asked.variables or {}
    chat = render_chat(tokenizer, template, asked.messages, **variables)
    text = tokenizer.bounded(chat.marked, context)
    return encode_rendered(tokenizer, RenderedChat(text, chat.mark))


def render_asked(asked: Asked, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The prompt as text, with the template's own tokens spelled out."""
    if asked.messages:
        return vocabulary.need_template().render(asked.messages, **(asked.variables or {}))
    if asked.text:
        return asked.text
    return "" if vocabulary.tokenizer is None else vocabulary.tokenizer.decode(ids, skip_special=False)


def _first_token(vocabulary: Vocabulary) -> int:
    """What stands for an empty raw prompt: the first-token id, else the end-of-text id."""
    tokenizer, config = vocabulary.need_tokenizer(), vocabulary.config
    ends = [tokenizer.token_to_id(text) for text in END_OF_TEXT]
    known = (tokenizer.bos_id, config.bos_token_id, *ends, tokenizer.eos_id, *config.eos_token_ids)
    if (token := next((one for one in known if one is not None), None)) is None:
        words = "the prompt is empty, and there is no beginning-of-text token"
        raise UsageError(words, fix=['spd generate --raw "text"'])
    return token


def overflow(count: int, context: int, max_tokens: int | None, most: int) -> IncompatibleError:
    """The refusal of a prompt that leaves no room in a context, which could hold `most` tokens."""
    wanted = count + (min(DEFAULT_REPLY, context // 2) if max_tokens is None else max_tokens)
    return IncompatibleError(
        f"prompt is {count:,} tokens but the context is {context:,}",
        reason=["A reply needs room too: at most one token less than the context."],
        fix=[*([f"--ctx {-(-wanted // 1024)}k"] if wanted <= most else []), "a shorter prompt"],
        code="context_overflow",
    )
