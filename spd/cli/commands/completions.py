"""`spd completions`: the scripts beside this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spd.cli.options import CommonOptions, argument
from spd.cli.text.output import Session, Sink

FILES = {"bash": "spd.bash", "zsh": "_spd", "fish": "spd.fish"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOptions(CommonOptions):
    """Everything `spd completions` takes."""

    shell: Literal["bash", "zsh", "fish"] = argument("SHELL", "The shell whose script is printed.")


def completions(session: Session, options: CompletionOptions) -> None:
    """Print the completion script of a shell."""
    script = Path(__file__).parent.with_name("completions") / FILES[options.shell]
    Sink.stdout().write(script.read_text(encoding="utf-8"))
