"""Options of runs with many prompts, and of replies with a given shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

_prompt = functools.partial(typer.Option, rich_help_panel="Prompt")
_output = functools.partial(typer.Option, rich_help_panel="Output")
_advanced = functools.partial(typer.Option, rich_help_panel="Advanced")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class GrammarOptions:
    """What the reply must look like."""

    schema: Annotated[
        str | None, _output(metavar="FILE|JSON", help="The reply is JSON that follows this JSON schema.")
    ] = None
    regex: Annotated[str | None, _output(metavar="REGEX", help="The whole reply matches this.")] = None
    grammar: Annotated[
        str | None, _output(metavar="FILE|LARK", help="The whole reply follows this Lark grammar.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class BatchOptions:
    """Many prompts in one run."""

    jsonl: Annotated[
        bool,
        _prompt("--jsonl", help="A prompt a line on stdin or in -f FILE, as JSON; a JSON line each back."),
    ] = False
    concurrency: Annotated[
        int | None, _advanced(metavar="N", help="Lines of --jsonl that decode together. Default: 8.")
    ] = None
    resume: Annotated[
        bool, _output("--resume", help="With --jsonl -o FILE: go on behind what FILE holds.")
    ] = False
