"""Shell completion: the scripts beside this folder, and the answers behind TAB.

Typer answers the question "what fits here"; its own installer, which
edits people's start-up files, is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from typer.main import get_command

from spd.cli.options import CommonOptions, Session, argument

FILES = {"bash": "spd.bash", "zsh": "_spd", "fish": "spd.fish", "powershell": "spd.ps1"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOptions(CommonOptions):
    """Everything `spd completions` takes."""

    shell: Literal["bash", "zsh", "fish", "powershell"] = argument(
        "SHELL", "The shell whose script is printed."
    )


def completions(session: Session, options: CompletionOptions) -> None:
    """Print the completion script of a shell."""
    from spd.cli.text.output import Sink

    script = Path(__file__).parent.with_name("completions") / FILES[options.shell]
    Sink.stdout().write(script.read_text(encoding="utf-8"))


def complete(app: typer.Typer, variable: str) -> int:
    """Answer a shell's question from the environment and end; Typer's installer stays hidden."""
    command = get_command(app)
    hidden = ("install_completion", "show_completion")
    command.params[:] = [param for param in command.params if param.name not in hidden]
    try:
        command(args=[], prog_name="spd", complete_var=variable, standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:  # a broken answer must never spill into a shell's prompt
        return 1
    return 1
