"""Prompts into token ids, as the model's chat template wants them; random ids where it has no tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from spd.errors import UsageError
from spd.formats.chat_template import encode_chat
from spd.formats.folder import ModelFolder
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
    most = min(context or config.max_positions, config.max_positions)
    questions = []
    for length in lengths:
        for prompt in prompts:
            count, ids = length or 0, list[int]()
            if count <= most and tokenizer is None:
                draws = random.Random(prompt.digest)
                ids = [draws.randrange(config.vocab_size) for _ in range(length or NO_TEXT_LENGTH)]
            elif count <= most:
                ids = _encode(files, prompt, prompts, length, most)
            if (count := max(count, len(ids))) > most - max_tokens:
                raise UsageError(
                    f"prompt {prompt.name} is {count:,} tokens; with -n {max_tokens} they do not fit the "
                    f"context of {most:,}",
                    fix=["a smaller -n or --prompt-tokens"],
                )
            questions.append(Question(prompt, tuple(ids), length))
    return questions


def _encode(
    files: ModelFolder, prompt: Prompt, prompts: Sequence[Prompt], length: int | None, context: int
) -> list[int]:
    tokenizer, template = files.tokenizer, files.template
    assert tokenizer is not None
    text = tokenizer.bounded(prompt.text, length or context, cut=length is not None)

    def whole(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text, add_special=True)
        return encode_chat(tokenizer, template, [{"role": "user", "content": text}])

    ids = whole(text)
    if length is None:
        return ids
    if len(ids) > length:  # what asks stands at the end
        return whole(tokenizer.decode(tokenizer.encode(text)[len(ids) - length :]))[-length:]
    others = [other.text for other in prompts if other.category == prompt.category]
    filler = tokenizer.encode("\n\n".join(others)[: 100 * length])  # far more than tokens of text have
    filler = (filler * (length // max(1, len(filler)) + 1))[: length - len(ids)]
    return whole(tokenizer.decode(filler) + text)
