"""The value of --spec: a method, or one and prompt lookup beside it."""

from __future__ import annotations

import re

import typer


def parse_spec(text: str) -> str:
    """`mtp` or, in any order, `mtp,ngram` or `mtp+ngram`, as the engine calls it. Raises BadParameter."""
    known = spec_names("")
    asked = [part.strip() for part in re.split("[,+]", text)]
    method = "+".join(sorted(asked, key="ngram".__eq__))
    if method not in known:
        alone = ", ".join(repr(name) for name in known if "+" not in name)
        raise typer.BadParameter(
            f"{text!r} is not one of {alone}, nor one of these beside lookup: 'mtp,ngram'"
        )
    return method


def spec_names(incomplete: str) -> list[str]:
    """What TAB offers for a method."""
    from spd.runtime.config import ARBITRATED, SPEC_METHODS

    return [*SPEC_METHODS, *ARBITRATED]
