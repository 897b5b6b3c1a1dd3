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
    questions = []
    for length in lengths:
        for prompt in prompts:
            if tokenizer is None:
                draws = random.Random(prompt.digest)
                size = length or NO_TEXT_LENGTH
                ids = [draws.randrange(config.vocab_size) for _ in range(size)]
            else:
                ids = _encode(prompt, prompts, tokenizer, template, length)
            if len(ids) > room:
                raise UsageError(
                    f"prompt {prompt.name} is {len(ids):,} tokens; with -n {max_tokens} they do not fit the "
                    f"context of {room + max_tokens:,}",
                    fix=["a smaller -n or --prompt-tokens", "--ctx N, if the model allows more"],
                )
            questions.append(Question(prompt, tuple(ids), length))
    return questions


def _encode(
    prompt: Prompt,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    length: int | None,
) -> list[int]:
    def whole(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text, add_special=True)
        return encode_chat(tokenizer, template, [{"role": "user", "content": text}])

    ids = whole(prompt.text)
    if length is None:
        return ids
    if len(ids) > length:  # what asks stands at the end
        return whole(tokenizer.decode(tokenizer.encode(prompt.text)[len(ids) - length :]))[-length:]
    others = [other.text for other in prompts if other.category == prompt.category]
    filler = tokenizer.encode("\n\n".join(others))
    filler = (filler * (length // max(1, len(filler)) + 1))[: length - len(ids)]
    return whole(tokenizer.decode(filler) + prompt.text)
