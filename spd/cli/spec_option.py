"""The value of --spec: a method, or one and prompt lookup beside it."""

from __future__ import annotations

import re

import typer


def parse_spec(text: str) -> str:
    """`mtp` or, in any order, `mtp,ngram` or `mtp+ngram`, as the engine calls it. Raises BadParameter."""
    known, method = spec_names(""), in_order(text)
    if method not in known:
        alone = ", ".join(repr(name) for name in known if "+" not in name)
        raise typer.BadParameter(
            f"{text!r} is not one of {alone}, nor one of these beside lookup: 'mtp,ngram'"
        )
    return method


def in_order(text: str) -> str:
    """Two methods with lookup as the second, joined by a plus; whether there are such is not asked."""
    return "+".join(sorted((part.strip() for part in re.split("[,+]", text)), key="ngram".__eq__))


def spec_names(incomplete: str) -> list[str]:
    """What TAB offers for a method."""
    from spd.runtime.plan.config import ARBITRATED, SPEC_METHODS

    return [*SPEC_METHODS, *ARBITRATED]
