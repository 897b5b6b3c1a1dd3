"""The prompts that spd is measured with, and their token ids: random ones where there is no tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from spd.errors import UsageError
from spd.formats.chat_template import encode_rendered, render_chat
from spd.formats.files import read_input_text
from spd.formats.folder import ModelFolder
from spd.runtime.engine.request import Request, derived_seed
from spd.runtime.round.sampling_params import SamplingParams

BUILTIN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One question: its name, its kind, and the user's message."""

    name: str
    category: str
    text: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the text, short."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in token ids; `prompt_tokens` is the length that was wished for."""

    prompt: Prompt
    ids: tuple[int, ...]
    prompt_tokens: int | None = None

    def request(self, name: str, number: int, **params: Any) -> Request:
        """A request for the reply of this number, whose seed no other question or number has."""
        seed = derived_seed(0, self.prompt.name, number)
        return Request(name, self.ids, SamplingParams(seed=seed, **params))


def read_prompts(path: Path = BUILTIN_PROMPTS) -> tuple[Prompt, ...]:
    """Prompts from lines: JSON with `prompt` and `category`, or plain. Raises UsageError."""
    lines = read_input_text(path, "name a file of prompts").splitlines()
    counts: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, category = _parse(
            line, f"{path.name}, line {number}", json_lines=path.suffix == ".jsonl"
        )
        counts[category] = counts.get(category, 0) + 1
        prompts.append(Prompt(f"{category}/{counts[category]}", category, text))
    if not prompts:
        raise UsageError(
            f"{path} holds no prompts", fix=['one JSON object a line: {"prompt": "..."}']
        )
    return tuple(prompts)


def _parse(line: str, where: str, *, json_lines: bool) -> tuple[str, str]:
    if not json_lines:
        return line, "file"
    try:
        value = json.loads(line)
        text = value["prompt"]
        category = value.get("category", "file")
        f"{text}{category}".encode()  # half of a surrogate pair is no text
        whole = (
            isinstance(text, str)
            and text
            and isinstance(category, str)
            and category not in ("", "all")
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        why = "One JSON object a line; all stands for every category together."
        raise UsageError(
            f"{where} is no prompt", reason=[why], fix=['{"prompt": "...", "category": "..."}']
        )
    return text, category


def select_prompts(
    prompts: Sequence[Prompt], named: Iterable[str] | None, each: int | None
) -> tuple[Prompt, ...]:
    """The prompts of some categories, `each` of every one. Raises UsageError for an unknown category."""
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = list(named) if named is not None else known
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(
            f"no prompts of category {unknown[0]}", reason=[f"there are: {', '.join(known)}"]
        )
    chosen: list[Prompt] = []
    for name in wanted:
        chosen += [prompt for prompt in prompts if prompt.category == name][:each]
    return tuple(chosen)


NO_TEXT_LENGTH = 64  # random ids a prompt, where no length was wished for


def encode_prompts(
    folder: Path | ModelFolder,
    prompts: Sequence[Prompt],
    lengths: Sequence[int | None],
    max_tokens: int,
) -> list[EncodedPrompt]:
    """Prompts at every length (None: their own), filled up in front. Raises UsageError for one too long."""
    if 0 in lengths:
        raise UsageError("--prompt-tokens 0 is out of range", reason=["valid: 1 or more"])
    files = ModelFolder.from_path(folder)
    most = files.config.max_positions
    questions = []
    for length, prompt in product(lengths, prompts):
        ids = _encode(files, prompt, prompts, length, most) if (length or 0) <= most else []
        if (count := max(length or 0, len(ids))) > most - max_tokens:
            why = f"with -n {max_tokens} they do not fit the context of {most:,}"
            fix = ["a smaller -n or --prompt-tokens"]
            raise UsageError(f"prompt {prompt.name} is {count:,} tokens; {why}", fix=fix)
        questions.append(EncodedPrompt(prompt, tuple(ids), length))
    return questions


def _encode(
    files: ModelFolder, prompt: Prompt, prompts: Sequence[Prompt], length: int | None, context: int
) -> list[int]:
    tokenizer = files.tokenizer
    template = files.template
    if tokenizer is None:
        draws = random.Random(prompt.digest)
        return [draws.randrange(files.config.vocab_size) for _ in range(length or NO_TEXT_LENGTH)]
    text = tokenizer.limit_length(prompt.text, length or context, cut=length is not None)

    def whole(text: str) -> list[int]:
        chat = template and render_chat(tokenizer, template, [{"role": "user", "content": text}])
        return (
            encode_rendered(tokenizer, chat) if chat else tokenizer.encode(text, add_special=True)
        )

    ids = whole(text)
    if length is None:
        return ids
    if len(ids) > length:  # what asks stands at the end
        return whole(tokenizer.decode(tokenizer.encode(text)[len(ids) - length :]))[-length:]
    others = [other.text for other in prompts if other.category == prompt.category]
    filler = tokenizer.encode(
        "\n\n".join(others)[: 100 * length]
    )  # far more than tokens of text have
    filler = (filler * (length // max(1, len(filler)) + 1))[: length - len(ids)]
    return whole(tokenizer.decode(filler) + text)
