"""Standard streams: terminal tests, widths and colour, and precautions for closed ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO


def paint(text: str, style: str, color: bool) -> str:
    """Return text in an ANSI style if `color` is set."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def is_color_enabled(stream: IO[str] | None, environ: Mapping[str, str]) -> bool:
    """True if the stream gets colour.

    The first of NO_COLOR, FORCE_COLOR or CLICOLOR_FORCE, TERM=dumb, and a terminal decides.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: IO[str] | None) -> bool:
    """True if a stream exists, is open and is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def columns_of(stream: IO[str] | None) -> int | None:
    """Return the current width of a stream's terminal; None if it is not a terminal."""
    return terminal_size(stream).columns if is_terminal(stream) else None


def terminal_size(stream: IO[str] | None) -> os.terminal_size:
    """Return the current columns and lines of a stream's terminal; 80 by 24 if it does not say."""
    size = os.terminal_size((0, 0))
    if stream is not None:
        with suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(stream.fileno())
    return os.terminal_size((size.columns or 80, size.lines or 24))


def reserve_standard_descriptors() -> None:
    """Open the null device for closed descriptors 0 to 2, so that no file gets their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def flush_streams() -> None:
    """Flush stdout and stderr; redirect one that fails to the null device.

    Otherwise the interpreter's last flush would fail and make the exit status 120.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
