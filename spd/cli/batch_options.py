"""Options of runs with many prompts, of replies with a given shape, and of thinking."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Annotated

import typer

from spd.cli.help import FIRST, IN, LAST
from spd.errors import UsageError

_prompt = functools.partial(typer.Option, rich_help_panel=IN)
_output = functools.partial(typer.Option, rich_help_panel="Output")
_first = functools.partial(typer.Option, rich_help_panel=FIRST)
_advanced = functools.partial(typer.Option, rich_help_panel=LAST)


def parse_think(text: str, name: str = "--think") -> str:
    """The value of --think, or of /think: a word, or tokens at most. Raises UsageError."""
    if text not in ("auto", "on", "off", "hide") and not re.fullmatch("[0-9]{1,9}", text):
        said = f"{name} {text}".rstrip()
        raise UsageError(f"{said}: on, off, hide or a number of tokens?", fix=[f"{name} on|off|hide|N"])
    return text


def think_words(incomplete: str) -> list[str]:
    """What TAB offers for --think."""
    return ["on", "off", "hide"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class TemplateOptions:
    """What the chat template is told, and what becomes of thinking."""

    template_arg: Annotated[
        list[str] | None, _prompt(metavar="K=V", help="A variable for the chat template. Repeatable.")
    ] = None
    think: Annotated[
        str,
        _first(
            parser=parse_think,
            autocompletion=think_words,
            metavar="on|off|hide|N",
            help="Thinking or none; hide: do not show it; N tokens at most.",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class GrammarOptions:
    """What the reply must look like."""

    schema: Annotated[
        str | None, _output(metavar="FILE|JSON", help="The reply is JSON that follows this JSON schema.")
    ] = None
    grammar: Annotated[
        str | None,
        _output(
            metavar="LARK|/REGEX/", help="The whole reply follows a Lark grammar (or its file), or matches."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class BatchOptions:
    """Many prompts in one run."""

    jsonl: Annotated[
        bool,
        _prompt("--jsonl", help="A prompt a line on stdin or in -f FILE, a JSON line each back."),
    ] = False
    concurrency: Annotated[
        int | None, _advanced(metavar="N", help="Lines of --jsonl that decode together. Default: 8.")
    ] = None
    resume: Annotated[
        bool, _output("--resume", help="With --jsonl -o FILE: go on behind what FILE holds.")
    ] = False
