"""The prompts that spd is measured with: its own, by category, or a file of the user's. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spd.errors import UsageError
from spd.formats.files import read_input_text

CATEGORIES = ("code", "edit", "summarise", "reasoning", "creative")
OWN = Path(__file__).with_name("prompts.jsonl")


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


def read_prompts(path: Path = OWN) -> tuple[Prompt, ...]:
    """Prompts from JSON lines of `prompt` (or `text`) and, where given, `category`, or from plain lines.

    Raises NotFoundError, and UsageError naming the line that cannot be used.
    """
    lines = read_input_text(path, "name a file of prompts").splitlines()
    counts: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, category = _parse(line, f"{path.name}, line {number}", json_lines=path.suffix == ".jsonl")
        counts[category] = counts.get(category, 0) + 1
        prompts.append(Prompt(f"{category}/{counts[category]}", category, text))
    if not prompts:
        raise UsageError(f"{path} holds no prompts", fix=['one JSON object a line: {"prompt": "..."}'])
    return tuple(prompts)


def _parse(line: str, where: str, *, json_lines: bool) -> tuple[str, str]:
    if not json_lines:
        return line, "file"
    shape = '{"prompt": "...", "category": "..."}'
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON", fix=[f"one object a line: {shape}"]) from None
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where} has no prompt", fix=[f"one object a line: {shape}"])
    category = value.get("category", "file")
    if not isinstance(category, str) or category in ("", "all"):
        why = ["all stands for every category together"] if category else []
        raise UsageError(f"{where}: category {json.dumps(category)} is not a name", reason=why)
    return text, category


def choose(
    prompts: Sequence[Prompt], categories: Iterable[str] | None, each: int | None
) -> tuple[Prompt, ...]:
    """The prompts of some categories, `each` of every one. Raises UsageError for an unknown category."""
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = list(categories) if categories is not None else known
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"no prompts of category {unknown[0]}", reason=[f"there are: {', '.join(known)}"])
    chosen: list[Prompt] = []
    for name in wanted:
        chosen += [prompt for prompt in prompts if prompt.category == name][:each]
    return tuple(chosen)
