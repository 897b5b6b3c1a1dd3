"""Prompts into token ids, as the model's chat template wants them; random ids where it has no tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from spd.errors import UsageError
from spd.formats.chat_template import ChatTemplate, encode_chat
from spd.formats.folder import ModelFolder
from spd.formats.tokenizer import Tokenizer
from spd.runtime.lab.prompt_set import Prompt
from spd.runtime.lab.sweep import Question

NO_TEXT_LENGTH = 64
"""Random ids a prompt, where no length was wished for."""
LONG_TOKEN = 100
"""Characters of text that are taken for each token by which prompts are lengthened."""


def encode_questions(
    folder: Path | ModelFolder,
    prompts: Sequence[Prompt],
    lengths: Sequence[int | None],
    max_tokens: int,
    context: int | None,
) -> list[Question]:
    """Every prompt at every length (None: its own). Longer ones get text of their category in front.

    Raises UsageError where a prompt and `max_tokens` do not fit the context (the model's if None), or a
    length is none.
    """
    if 0 in lengths:
        raise UsageError("--prompt-tokens 0 is out of range", reason=["valid: 1 or more"])
    files = ModelFolder.of(folder)
    config, tokenizer = files.config, files.tokenizer
    room = min(context or config.max_positions, config.max_positions) - max_tokens
    template = files.template if tokenizer is not None else None

    def check(prompt: Prompt, count: int) -> None:
        if count > room:
            raise UsageError(
                f"prompt {prompt.name} is {count:,} tokens; with -n {max_tokens} they do not fit the "
                f"context of {room + max_tokens:,}",
                fix=["a smaller -n or --prompt-tokens", "--ctx N, if the model allows more"],
            )

    questions = []
    for length in lengths:
        for prompt in prompts:
            check(prompt, length or 0)
            if tokenizer is None:
                draws = random.Random(prompt.digest)
                size = length or NO_TEXT_LENGTH
                ids = [draws.randrange(config.vocab_size) for _ in range(size)]
            else:
                text = tokenizer.bounded(prompt.text, length or room + max_tokens, cut=length is not None)
                ids = _encode(text, prompt.category, prompts, tokenizer, template, length)
            check(prompt, len(ids))
            questions.append(Question(prompt, tuple(ids), length))
    return questions


def _encode(
    text: str,
    category: str,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    length: int | None,
) -> list[int]:
    def whole(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text, add_special=True)
        return encode_chat(tokenizer, template, [{"role": "user", "content": text}])

    ids = whole(text)
    if length is None:
        return ids
    if len(ids) > length:  # what asks stands at the end
        return whole(tokenizer.decode(tokenizer.encode(text)[len(ids) - length :]))[-length:]
    others = [other.text for other in prompts if other.category == category]
    filler = tokenizer.encode("\n\n".join(others)[: LONG_TOKEN * length])
    filler = (filler * (length // max(1, len(filler)) + 1))[: length - len(ids)]
    return whole(tokenizer.decode(filler) + text)
