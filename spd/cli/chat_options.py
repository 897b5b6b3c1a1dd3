"""Options of `spd chat`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from spd.cli.batch_options import TemplateOptions
from spd.cli.options import (
    AdvancedOptions,
    CommonOptions,
    ModelOptions,
    PullOption,
    SamplingOptions,
    SpeculationOptions,
    model_names,
)

_chat = functools.partial(typer.Option, rich_help_panel="Chat")
_model = functools.partial(typer.Option, rich_help_panel="Model")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatOptions(
    AdvancedOptions,
    CommonOptions,
    SamplingOptions,
    SpeculationOptions,
    PullOption,
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
        _model(
            "-m", "--model", envvar="SPD_MODEL", autocompletion=model_names, help="As the MODEL argument."
        ),
    ] = None  # type: ignore[assignment]
    system: Annotated[str | None, _chat("-s", "--system", metavar="TEXT", help="System message.")] = None
    system_file: Annotated[str | None, _chat(metavar="FILE", help="System message from a file.")] = None
    file: Annotated[
        list[str] | None,
        _chat("-f", "--file", metavar="FILE", help="Goes with the first message. Repeatable."),
    ] = None
    continue_: Annotated[bool, _chat("-c", "--continue", help="Continue the latest chat.")] = False
    session: Annotated[str | None, _chat(metavar="NAME", help="Continue or begin the chat of this name.")] = (
        None
    )
    no_save: Annotated[bool, _chat("--no-save", help="Keep this chat in memory only.")] = False
    no_history: Annotated[bool, _chat("--no-history", help="Neither read nor write typed lines.")] = False
    markdown: Annotated[
        Literal["auto", "on", "off"], _chat(help="Show Markdown. auto: unless drafts are shown.")
    ] = "auto"
    show_drafts: Annotated[bool, _chat("--show-drafts", help="Colour accepted draft tokens.")] = False
    stats: Annotated[
        bool | None, _chat("--stats/--no-stats", help="Figures after each reply. Default: on a terminal.")
    ] = None
    explain: Annotated[bool, _chat("--explain", help="Why speculation pays or not, after each reply.")] = (
        False
    )
    vi: Annotated[bool, _chat("--vi", help="vi keys in the editor.")] = False
    typed: frozenset[str] = frozenset()
    """Names of these fields that stood on the command line, not in a file or the environment."""

    def continuing(self, model: str) -> ChatOptions:
        """What is typed, then what a chat with this model was saved with, then files and environment."""
        typed = self.typed
        named, said = bool(typed & {"model", "model_argument"}), bool(typed & {"system", "system_file"})
        return dataclasses.replace(
            self,
            model=self.model if named else model,
            system=self.system if said else None,
            system_file=self.system_file if said else None,
            seed=self.seed if "seed" in typed else None,
        )
