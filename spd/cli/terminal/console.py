"""Words for people, on standard error: notes, details and errors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spd.cli.terminal.plain_text import as_line, fit_lines, printable
from spd.cli.terminal.sink import OutputClosed, Sink, to_json
from spd.cli.terminal.streams import columns_of, paint
from spd.errors import CheckFailedError, SpdError

if TYPE_CHECKING:
    from spd.cli.signals import SignalGuard

REPORT = "run it again with -vv, and report what it prints"

USUAL_FIXES = {
    "internal": REPORT,
    "engine": REPORT,
    "checkpoint": "give another model folder, or download this one again",
    "not_found": "check the name or the path",
    "resources": "ask for less (--ctx, --draft-max), or free memory",
}
"""What helps against an error of such a kind that says nothing itself; against others, the help."""


@dataclass(frozen=True)
class Console:
    """How this run talks to standard error."""

    color: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    help: str = "spd --help"
    """What to type where an error knows no better."""

    def note(self, text: str) -> None:
        """One line about something the user may not expect; silent with --quiet."""
        if not self.quiet:
            line = fit_lines(f"note: {as_line(text)}", columns_of(sys.stderr))
            write_stderr(
                f"{paint('note:', '36', self.color)}{line.removeprefix('note:')}\n", styled=True
            )

    def detail(self, text: str) -> None:
        """One line that only --verbose shows."""
        if self.verbose:
            tell(text)


@dataclass
class Session:
    """What a command gets from the application: where to talk and to keep state, the guard of the signals."""

    console: Console
    guard: SignalGuard
    state_folder: Path
    runtime_folder: Path
    """Where servers of this user are found."""
    dumb_terminal: bool = False
    rendezvous: int | None = None
    """How many ranks torchrun has started."""
    told: list[str] = field(default_factory=list)
    """Which file set what, for a verbose run and for refusals."""

    def listen(self, values: Mapping[str, Any]) -> None:
        """Talk as the options of the command say."""
        color = {"always": True, "never": False}.get(values["color"], self.console.color)
        quiet = values["quiet"]
        verbose = values["verbose"]
        changes = {"color": color, "quiet": quiet, "verbose": verbose > 0, "debug": verbose > 1}
        self.console = replace(self.console, **changes)
        for line in self.told:
            self.console.detail(f"config  {line}")


def tell(text: str, style: str = "") -> None:
    """Write a line for people to standard error, broken between words where its terminal is too narrow."""
    fitted = fit_lines(as_line(text), columns_of(sys.stderr))
    write_stderr(paint(fitted, style, bool(style)) + "\n", styled=True)


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write to standard error, whatever the text, or what is meant for a terminal; a closed one loses it."""
    stream = getattr(sys.stderr, "raw", sys.stderr)
    if stream is None:
        return
    text = text if styled else printable(text)
    encoding = stream.encoding or "utf-8"
    with suppress(OSError, ValueError):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


class PrintableStderr:
    """Standard error for all that is not written here: logs of libraries, warnings, tracebacks."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw
        self.write = lambda text: raw.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def write_error(error: SpdError, console: Console, as_json: bool = False) -> None:
    """Show what is wrong, why, and what to type instead: as lines, or as one JSON object on stdout."""
    fixes = list(error.fix or [USUAL_FIXES.get(error.default_code, console.help)])
    if as_json and not isinstance(
        error, CheckFailedError
    ):  # whose object is on standard output already
        shown = {"code": error.code, "exit": error.exit_code, "message": error.message}
        with suppress(OutputClosed, SpdError):
            shown = {"error": {**shown, "reason": error.reason, "fix": fixes}}
            Sink.stdout().write(to_json(shown) + "\n")
            return
    lines = [f"error: {as_line(error.message)}", *(f"  {as_line(line)}" for line in error.reason)]
    lines += [
        f"  {'    ' if number else 'fix:'} {as_line(fix)}" for number, fix in enumerate(fixes)
    ]
    words = fit_lines("\n".join(lines), columns_of(sys.stderr))
    words = words.replace("error:", paint("error:", "1;31", console.color), 1)
    words = words.replace("\n  fix:", f"\n  {paint('fix:', '32', console.color)}", 1)
    write_stderr(words + "\n", styled=True)
