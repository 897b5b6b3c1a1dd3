"""The prompts that spd is measured with, and their token ids: random ones without a tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from spd.errors import UsageError
from spd.formats.chat_template import encode_rendered, render_chat
from spd.formats.files import read_input_text
from spd.formats.folder import ModelFolder
from spd.runtime.engine.request import Request, derived_seed
from spd.runtime.round.sampling_params import SamplingParams

BUILTIN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One question: its name, its category, and the user's message."""

    name: str
    category: str
    text: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the text, shortened."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in token ids."""

    prompt: Prompt
    ids: tuple[int, ...]
    requested_length: int | None = None
    """The length in tokens that was requested; None: the prompt's own."""

    def request(
        self,
        name: str,
        number: int,
        *,
        temperature: float,
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> Request:
        """Return a request for the reply of this number, with a seed of its own."""
        seed = derived_seed(0, self.prompt.name, number)
        params = SamplingParams(
            seed=seed, temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        return Request(name, self.ids, params)


def read_prompts(path: Path = BUILTIN_PROMPTS) -> tuple[Prompt, ...]:
    """Read prompts from lines: JSON with `prompt` and `category`, or plain. Raises UsageError."""
    lines = read_input_text(path, "name a file of prompts").splitlines()
    counts: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, category = _parse_prompt_line(
            line, f"{path.name}, line {number}", json_lines=path.suffix == ".jsonl"
        )
        counts[category] = counts.get(category, 0) + 1
        prompts.append(Prompt(f"{category}/{counts[category]}", category, text))
    if not prompts:
        raise UsageError(
            f"{path} holds no prompts", fix=['one JSON object a line: {"prompt": "..."}']
        )
    return tuple(prompts)


def _parse_prompt_line(line: str, location: str, *, json_lines: bool) -> tuple[str, str]:
    """Return the text and the category of a line: its JSON fields, or the line itself and "file".

    Raises UsageError, which names `location`, for JSON that is no prompt.
    """
    if not json_lines:
        return line, "file"
    try:
        value = json.loads(line)
        text = value["prompt"]
        category = value.get("category", "file")
        f"{text}{category}".encode()  # half of a surrogate pair is no text
        is_valid = (
            isinstance(text, str)
            and text
            and isinstance(category, str)
            and category not in ("", "all")
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        reason = "One JSON object a line; all stands for every category together."
        raise UsageError(
            f"{location} is no prompt",
            reason=[reason],
            fix=['{"prompt": "...", "category": "..."}'],
        )
    return text, category


def select_prompts(
    prompts: Sequence[Prompt], categories: Iterable[str] | None, count: int | None
) -> tuple[Prompt, ...]:
    """Return the prompts of some categories, `count` of every one.

    Raises UsageError for an unknown category.
    """
    available = list(dict.fromkeys(prompt.category for prompt in prompts))
    requested = list(categories) if categories is not None else available
    if unknown := [name for name in requested if name not in available]:
        raise UsageError(
            f"no prompts of category {unknown[0]}", reason=[f"there are: {', '.join(available)}"]
        )
    selected: list[Prompt] = []
    for name in requested:
        selected += [prompt for prompt in prompts if prompt.category == name][:count]
    return tuple(selected)


NO_TEXT_LENGTH = 64
"""Random ids of a prompt without a tokenizer, where no length was requested."""


def encode_prompts(
    folder: Path | ModelFolder,
    prompts: Sequence[Prompt],
    lengths: Sequence[int | None],
    max_tokens: int,
) -> list[EncodedPrompt]:
    """Encode prompts at every length in tokens (None: their own), filled up in front.

    Reads the folder's tokenizer.

    Raises UsageError for one that is too long.
    """
    if 0 in lengths:
        raise UsageError("--prompt-tokens 0 is out of range", reason=["valid: 1 or more"])
    model = ModelFolder.from_path(folder)
    context = model.config.max_positions
    encoded = []
    for length, prompt in product(lengths, prompts):
        ids = (
            _encode_at_length(
                folder=model, prompt=prompt, prompts=prompts, length=length, context=context
            )
            if (length or 0) <= context
            else []
        )
        if (count := max(length or 0, len(ids))) > context - max_tokens:
            message = f"with -n {max_tokens} they do not fit the context of {context:,}"
            fix = ["a smaller -n or --prompt-tokens"]
            raise UsageError(f"prompt {prompt.name} is {count:,} tokens; {message}", fix=fix)
        encoded.append(EncodedPrompt(prompt, tuple(ids), length))
    return encoded


def _encode_at_length(
    folder: ModelFolder, prompt: Prompt, prompts: Sequence[Prompt], length: int | None, context: int
) -> list[int]:
    """Return a prompt's ids in the chat template, cut or filled up in front to `length` tokens.

    The filler is the texts of its category. Without a tokenizer the ids are random. length: None
    for the prompt's own.
    """
    tokenizer = folder.tokenizer
    template = folder.template
    if tokenizer is None:
        draws = random.Random(prompt.digest)
        return [draws.randrange(folder.config.vocab_size) for _ in range(length or NO_TEXT_LENGTH)]
    text = tokenizer.limit_length(prompt.text, length or context, cut=length is not None)

    def encode_full(text: str) -> list[int]:
        chat = template and render_chat(tokenizer, template, [{"role": "user", "content": text}])
        return (
            encode_rendered(tokenizer, chat) if chat else tokenizer.encode(text, add_special=True)
        )

    ids = encode_full(text)
    if length is None:
        return ids
    if len(ids) > length:  # cut the beginning: the question stands at the end
        return encode_full(tokenizer.decode(tokenizer.encode(text)[len(ids) - length :]))[-length:]
    alike_texts = [other.text for other in prompts if other.category == prompt.category]
    filler_text = "\n\n".join(alike_texts)[: 100 * length]  # far more characters than needed
    filler = tokenizer.encode(filler_text)
    filler = (filler * (length // max(1, len(filler)) + 1))[: length - len(ids)]
    return encode_full(tokenizer.decode(filler) + text)
