"""Output of a command to standard output or a file, and its JSON."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.terminal.plain_text import CONTROL, MISLEADING, as_line, escape_controls, fit_lines
from spd.cli.terminal.streams import columns_of, is_terminal
from spd.errors import ResourceError, SpdError, UsageError
from spd.formats.files import open_output

if TYPE_CHECKING:
    from spd.cli.terminal.bars import BarGlyphs

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing for which freeing space is the fix."""


class OutputClosed(Exception):
    """The reader of standard output has closed the pipe.

    This is the end of the output, not a fault.
    """


def to_json(value: object) -> str:
    """Return one line of strict JSON, safe on a terminal too; non-finite numbers become null."""
    line = json.dumps(_replace_non_finite(value), ensure_ascii=False, allow_nan=False)
    return MISLEADING.sub(lambda match: f"\\u{ord(match.group()):04x}", line)


def _replace_non_finite(value: object) -> object:
    """Return a JSON value with None for non-finite numbers, and paths as texts."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_replace_non_finite(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return value


class Sink:
    """The output of a command: every write reaches the file descriptor before it returns.

    target: a descriptor or a file. The first write, or `open` before it, locks a file and, unless
    `append`, empties it. Raises OutputClosed when a pipe's reader has closed it and ResourceError
    when nothing can be written; a new file that stayed empty is removed.
    """

    def __init__(
        self,
        target: int | Path,
        *,
        encoding: str = "utf-8",
        terminal: bool = False,
        append: bool = False,
    ) -> None:
        self._path = target if isinstance(target, Path) else None
        self._descriptor = None if isinstance(target, Path) else target
        self._encoding = encoding
        self.is_terminal = terminal
        self._append = append
        self._is_new_file = False

    @classmethod
    def stdout(cls) -> Sink:
        """Return the sink of standard output: UTF-8 unless it is a terminal of another encoding.

        Raises ResourceError if standard output is closed.
        """
        stream = sys.stdout
        if stream is None or stream.closed:
            raise ResourceError("standard output is closed", fix=["-o FILE"], code="stdout_closed")
        terminal = is_terminal(stream)
        encoding = (stream.encoding or "utf-8") if terminal else "utf-8"
        return cls(stream.fileno(), encoding=encoding, terminal=terminal)

    def open(self) -> int:
        """Return the descriptor; the first call opens, locks and, unless `append`, empties a file.

        Raises UsageError where it cannot be was_opened or another process has the lock,
        ResourceError where the disk is full.
        """
        if self._descriptor is None:
            assert self._path is not None
            self._is_new_file = not self._path.exists()
            try:
                self._descriptor = open_output(self._path, append=self._append)
            except OSError as error:
                raise output_error(self._path, error) from error
        return self._descriptor

    def close(self) -> None:
        """Close, and so unlock, a file that was opened here."""
        if self._path is not None and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, text: str) -> None:
        """Write text unchanged; on a terminal its control characters are escaped."""
        self.write_styled(escape_controls(text, CONTROL) if self.is_terminal else text)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines for people, wrapped between words to the width of a terminal."""
        columns = columns_of(sys.stdout) if self.is_terminal else None
        self.write_styled("".join(fit_lines(as_line(line), columns) + "\n" for line in lines))

    def write_result(
        self, as_json: bool, result: Mapping[str, object], lines: Iterable[str] | None = None
    ) -> None:
        """Write a result as one JSON object, or as `lines` for people.

        Without these, its fields.
        """
        if as_json:
            self.write(to_json(result) + "\n")
        else:
            from spd.cli.terminal.tables import PIPE_COLUMNS, fact_lines

            columns = None if self.is_terminal else PIPE_COLUMNS
            self.write_lines(fact_lines(result, columns=columns) if lines is None else lines)

    def glyphs(self) -> BarGlyphs | None:
        """Return the bar characters that this terminal can show; None if it is no terminal."""
        if not self.is_terminal:
            return None
        from spd.cli.terminal.bars import ASCII_GLYPHS, UNICODE_GLYPHS

        try:
            "".join(vars(UNICODE_GLYPHS).values()).encode(self._encoding)
        except UnicodeEncodeError:
            return ASCII_GLYPHS
        return UNICODE_GLYPHS

    def check_reader(self) -> None:
        """Raise OutputClosed if a pipe's reader has closed it, without writing anything."""
        poll = select.poll()
        if self._descriptor is not None and not self.is_terminal:
            poll.register(self._descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            raise OutputClosed

    def write_styled(self, text: str) -> None:
        """Write text whose control characters are intended."""
        descriptor = self.open()
        try:
            _write_all(descriptor, text.encode(self._encoding, "replace"))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            if self._path is not None and self._is_new_file and not os.fstat(descriptor).st_size:
                self._path.unlink(missing_ok=True)
            raise output_error(self._path or "standard output", error, was_opened=True) from error


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor, and wait where it takes none. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def check_writable(path: Path) -> None:
    """Raise an error early for a file that could not be written after minutes of work.

    Opens it to try, and removes it if it was not there. Raises UsageError or ResourceError.
    """
    try:
        is_new = not os.path.lexists(path)
        os.close(open_output(path, append=True))
        if is_new:
            path.unlink()
    except OSError as error:
        raise output_error(path, error) from None


def check_new_folder(path: Path) -> None:
    """Raise UsageError early for a link, or a folder that holds files or cannot be read."""
    try:
        with suppress(FileNotFoundError):
            if path.is_symlink() or any(path.iterdir()):
                raise UsageError(f"{path} exists already", fix=["name a new folder"])
    except OSError as error:
        raise output_error(path, error) from None


def output_error(path: Path | str, error: OSError, *, was_opened: bool = False) -> SpdError:
    """Return the error for a file that cannot be opened, or was `was_opened` but not written."""
    message = f"cannot write to {path}: {error.strerror}"
    if was_opened or error.errno in DISK_FULL_ERRNOS:
        fix = f"{free_space_hint(error)}name another file"
        return ResourceError(message, fix=[fix], code="write_failed")
    return UsageError(message, fix=["name a file in a folder you can write to"])


def free_space_hint(error: OSError) -> str:
    """Return the beginning of a fix that frees space if the disk is full, else nothing."""
    return "free some space, or " if error.errno in DISK_FULL_ERRNOS else ""
