"""Standard streams: whether they are terminals, how wide they are, and what a closed one would break."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO


def paint(text: str, style: str, color: bool) -> str:
    """Text in an ANSI style where colour is wanted."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def wants_color(stream: IO[str] | None, environ: Mapping[str, str]) -> bool:
    """NO_COLOR, then FORCE_COLOR or CLICOLOR_FORCE, then TERM=dumb, then the terminal."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is there, open and a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def columns_of(stream: IO[str] | None) -> int | None:
    """The current width of a stream's terminal; None if it is not a terminal."""
    return terminal_size(stream).columns if is_terminal(stream) else None


def terminal_size(stream: IO[str] | None) -> os.terminal_size:
    """Columns and lines of a stream's terminal now; 80 by 24 where it does not say."""
    columns = lines = 0
    with suppress(OSError, ValueError, AttributeError):
        columns, lines = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
    return os.terminal_size((columns or 80, lines or 24))


def hold_standard_descriptors() -> None:
    """Put the null device where 0, 1 or 2 are closed, so that no opened file takes their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def release_streams() -> None:
    """Send what cannot be flushed nowhere: the interpreter's own last try would make the exit status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
