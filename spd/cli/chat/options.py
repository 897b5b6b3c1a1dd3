"""Options of `spd chat`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from spd.cli.help import FIRST
from spd.cli.options import (
    AdvancedOptions,
    CommonOptions,
    ContextOption,
    DraftContextOption,
    MemoryOption,
    ModelOptions,
    PullOption,
    SamplingOptions,
    SpeculationOptions,
    TemplateOptions,
    model_names,
)

_chat = functools.partial(typer.Option, rich_help_panel="Chat")
_first = functools.partial(typer.Option, rich_help_panel=FIRST)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatOptions(
    MemoryOption,
    AdvancedOptions,
    CommonOptions,
    SamplingOptions,
    DraftContextOption,
    SpeculationOptions,
    PullOption,
    ContextOption,
    ModelOptions,
    TemplateOptions,
):
    """Everything `spd chat` takes."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", autocompletion=model_names, help="A folder, org/name, or demo. Default: demo."
        ),
    ] = None
    model: Annotated[
        str | None,
        _first(
            "-m", "--model", envvar="SPD_MODEL", autocompletion=model_names, help="As the MODEL argument."
        ),
    ] = None  # type: ignore[assignment]
    system: Annotated[str | None, _first("-s", "--system", metavar="TEXT|@FILE", help="System message.")] = (
        None
    )
    file: Annotated[
        list[str] | None,
        _first("-f", "--file", metavar="FILE", help="Goes with the first message. Repeatable."),
    ] = None
    continue_: Annotated[
        str | None,
        _first(
            "-c", "--continue", metavar="[NAME]", help="Continue the latest chat, or the one of this name."
        ),
    ] = None
    no_save: Annotated[bool, _chat("--no-save", help="Keep this chat in memory only.")] = False
    markdown: Annotated[
        Literal["auto", "on", "off"],
        _chat(metavar="MODE", help="auto, on or off. auto: unless drafts are shown."),
    ] = "auto"
    show_drafts: Annotated[bool, _chat("--show-drafts", help="Colour accepted draft tokens.")] = False
    stats: Annotated[
        bool | None, _chat("--stats/--no-stats", help="Figures after each reply. Default: on a terminal.")
    ] = None
    typed: frozenset[str] = frozenset()
    """Names of these fields that stood on the command line, not in a file or the environment."""

    def continuing(self, model: str) -> ChatOptions:
        """What is typed, then what a chat with this model was saved with, then files and environment."""
        typed = self.typed
        named = bool(typed & {"model", "model_argument"})
        return dataclasses.replace(
            self,
            model=self.model if named else model,
            system=self.system if "system" in typed else None,
            seed=self.seed if "seed" in typed else None,
        )
