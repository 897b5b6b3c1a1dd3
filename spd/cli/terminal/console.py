"""Messages for people on standard error: notes, details and errors."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spd.cli.terminal.plain_text import as_line, escape_controls, fit_lines
from spd.cli.terminal.sink import OutputClosed, Sink, to_json
from spd.cli.terminal.streams import columns_of, paint
from spd.errors import CheckFailedError, SpdError

if TYPE_CHECKING:
    from spd.cli.signals import SignalGuard

REPORT_FIX = "run it again with -vv, and report what it prints"
"""The fix of an internal error."""

DEFAULT_FIXES = {
    "internal": REPORT_FIX,
    "engine": REPORT_FIX,
    "checkpoint": "give another model, or download this one again",
    "not_found": "check the name or the path",
    "resources": "ask for less (--ctx, --draft-max), or free memory",
}
"""The fix shown for an error that has none, by its code; other codes get the command's help."""


@dataclass(frozen=True, eq=False, repr=False)
class Console:
    """The settings for messages on standard error, and the methods that write notes and details."""

    color: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    """True with -vv: tracebacks of unexpected errors are printed."""
    help: str = "spd --help"
    """The fix of an error that has none."""

    def note(self, text: str) -> None:
        """Write one line about something the user may not expect, unless --quiet is set."""
        if not self.quiet:
            line = fit_lines(f"note: {as_line(text)}", columns_of(sys.stderr))
            write_stderr(
                f"{paint('note:', '36', self.color)}{line.removeprefix('note:')}\n", styled=True
            )

    def detail(self, text: str) -> None:
        """Write one line if --verbose is set."""
        if self.verbose:
            write_stderr_line(text)


@dataclass(eq=False, repr=False)
class Session:
    """The context of a command: console, signal guard, and folders of state and sockets."""

    console: Console
    guard: SignalGuard
    state_folder: Path
    runtime_folder: Path
    """The folder of the sockets of this user's servers."""
    dumb_terminal: bool = False
    rendezvous: int | None = None
    """The number of ranks that torchrun has started; None without torchrun."""
    config_notes: list[str] = field(default_factory=list)
    """Lines of what the file of options sets, or why it is not read: for -v and for errors of use."""
    noted: set[str] = field(default_factory=set)
    """Kinds of notes that `note_once` has written."""

    def note_once(self, kind: str, text: str | None) -> None:
        """Write a note if there is one and none of its kind was written before."""
        if text is not None and kind not in self.noted:
            self.noted.add(kind)
            self.console.note(text)

    def apply_output_options(self, color: str, quiet: bool, verbose: int) -> None:
        """Replace the console by one with the command's --color, -q and -v.

        With -v print `config_notes`. color: "auto" keeps the present choice. verbose: how often -v
        was typed.
        """
        self.console = replace(
            self.console,
            color={"always": True, "never": False}.get(color, self.console.color),
            quiet=quiet,
            verbose=verbose > 0,
            debug=verbose > 1,
        )
        for line in self.config_notes:
            self.console.detail(f"config  {line}")


def write_stderr_line(text: str, style: str = "") -> None:
    """Write a line for people to standard error, wrapped between words to the terminal's width."""
    fitted = fit_lines(as_line(text), columns_of(sys.stderr))
    write_stderr(paint(fitted, style, bool(style)) + "\n", styled=True)


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write text to standard error; a closed stream loses it.

    Control characters are escaped unless the text is `styled`. Characters that the encoding lacks
    are written as backslash escapes.
    """
    stream = getattr(sys.stderr, "raw", sys.stderr)
    if stream is None:
        return
    text = text if styled else escape_controls(text)
    encoding = stream.encoding or "utf-8"
    with suppress(OSError, ValueError):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


class PrintableStderr:
    """A stderr that escapes control characters, for logs of libraries, warnings and tracebacks."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw
        self.write = lambda text: raw.write(escape_controls(text))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream itself."""
        return getattr(self.raw, name)


def write_error(error: SpdError, console: Console, as_json: bool = False) -> None:
    """Write an error, its reasons and fixes: as lines on stderr, or as one JSON object on stdout.

    A failed check is always written as lines, and what stdout cannot take too.
    """
    fixes = list(error.fix or [DEFAULT_FIXES.get(error.default_code, console.help)])
    # The JSON object of a failed check is on standard output already.
    if as_json and not isinstance(error, CheckFailedError):
        description = {
            "code": error.code,
            "exit": error.exit_code,
            "message": error.message,
            "reason": error.reason,
            "fix": fixes,
        }
        with suppress(OutputClosed, SpdError):
            Sink.stdout().write(to_json({"error": description}) + "\n")
            return
    lines = [f"error: {as_line(error.message)}"]
    lines += [f"  {as_line(line)}" for line in error.reason]
    lines += [
        f"  {'    ' if number else 'fix:'} {as_line(fix)}" for number, fix in enumerate(fixes)
    ]
    text = fit_lines("\n".join(lines), columns_of(sys.stderr))
    text = text.replace("error:", paint("error:", "1;31", console.color), 1)
    text = text.replace("\n  fix:", f"\n  {paint('fix:', '32', console.color)}", 1)
    write_stderr(text + "\n", styled=True)
