"""What the commands that measure and judge share: comma lists and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spd.cli.options import parse_as
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.runtime.lab import Prompt

EACH = 2
"""Prompts of each of spd's own categories."""


def split(text: str, flag: str) -> list[str]:
    """The members of a comma list, each once. Raises UsageError for an empty member."""
    members = [member.strip() for member in text.split(",")]
    if not all(members):
        raise UsageError(f"{flag} {text!r} has an empty member", fix=[f"{flag} A,B"])
    return list(dict.fromkeys(members))


def numbers(text: str, flag: str, kind: Literal["int", "float"], low: float, high: float) -> list[float]:
    """A comma list of numbers within bounds. Raises UsageError naming the one that is not."""
    found = []
    for member in split(text, flag):
        value = float(parse_as(flag, kind, member))
        if not low <= value <= high:
            raise UsageError(f"{flag} {member} is out of range", reason=[f"valid: {low:g} to {high:g}"])
        found.append(value)
    return list(dict.fromkeys(found))


def chosen_prompts(path: Path | None, category: str | None = None) -> tuple[Prompt, ...]:
    """The prompts asked for: of a file all, of spd's own a few of each category."""
    from spd.runtime.lab import OWN, choose, read_prompts

    categories = split(category, "--category") if category is not None else None
    chosen: tuple[Prompt, ...] = choose(read_prompts(path or OWN), categories, EACH if path is None else None)
    return chosen
