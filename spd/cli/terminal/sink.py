"""Where an answer goes: standard output or a file, whole or not at all; JSON as it is written there."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spd.cli.terminal.bars import ASCII, UNICODE, BarGlyphs
from spd.cli.terminal.plain_text import CONTROL, MISLEADING, as_line, fit_lines, printable
from spd.cli.terminal.streams import columns_of, is_terminal
from spd.cli.terminal.tables import PIPE_COLUMNS, fact_lines
from spd.errors import ResourceError, SpdError, UsageError
from spd.formats.files import open_output

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputClosed(Exception):
    """The reader of standard output has gone: nothing more can be delivered, and nothing is wrong."""


def to_json(value: object) -> str:
    """One line of strict JSON, harmless on a terminal too; what is not a finite number becomes null."""
    line = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return MISLEADING.sub(lambda match: f"\\u{ord(match.group()):04x}", line)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_finite(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return value


class Sink:
    """Where the answer goes: every write reaches the file descriptor before it returns.

    A file is locked and, unless `append`, emptied by the first write, not before. Raises OutputClosed when a
    pipe's reader has gone and ResourceError when nothing can be written; a file that stayed empty is removed.
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
        self._made = False

    @classmethod
    def stdout(cls) -> Sink:
        """Standard output: UTF-8 unless it is a terminal of another encoding."""
        stream = sys.stdout
        if stream is None or stream.closed:
            raise ResourceError("standard output is closed", fix=["-o FILE"], code="stdout_closed")
        terminal = is_terminal(stream)
        encoding = (stream.encoding or "utf-8") if terminal else "utf-8"
        return cls(stream.fileno(), encoding=encoding, terminal=terminal)

    def open(self) -> int:
        """The descriptor; a file is opened and locked the first time. Raises UsageError and ResourceError."""
        if self._descriptor is None:
            assert self._path is not None
            self._made = not self._path.exists()
            try:
                self._descriptor = open_output(self._path, append=self._append)
            except OSError as error:
                raise cannot_write(self._path, error) from error
        return self._descriptor

    def close(self) -> None:
        """Unlock a file that was opened here."""
        if self._path is not None and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, text: str) -> None:
        """Write a reply as it is; on a terminal its control characters are spelled out."""
        self.write_styled(printable(text, CONTROL) if self.is_terminal else text)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write lines for people, broken between words where a terminal is too narrow for them."""
        columns = columns_of(sys.stdout) if self.is_terminal else None
        self.write_styled("".join(fit_lines(as_line(line), columns) + "\n" for line in lines))

    def answer(
        self, as_json: bool, shown: Mapping[str, Any], lines: Iterable[str] | None = None
    ) -> None:
        """Write what a command found: as one JSON object, or as lines for people, else all its facts."""
        if as_json:
            self.write(to_json(shown) + "\n")
        else:
            columns = None if self.is_terminal else PIPE_COLUMNS
            self.write_lines(fact_lines(shown, columns=columns) if lines is None else lines)

    def glyphs(self) -> BarGlyphs | None:
        """Return the characters of bars that this terminal shows; None where it is no terminal."""
        if not self.is_terminal:
            return None
        try:
            "".join(vars(UNICODE).values()).encode(self._encoding)
        except UnicodeEncodeError:
            return ASCII
        return UNICODE

    def check_reader(self) -> None:
        """Raise OutputClosed where a pipe's reader has gone, though there is nothing to write yet."""
        poll = select.poll()
        if self._descriptor is not None and not self.is_terminal:
            poll.register(self._descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            raise OutputClosed

    def write_styled(self, text: str) -> None:
        """Write text whose control characters are meant."""
        descriptor = self.open()
        try:
            _write_all(descriptor, text.encode(self._encoding, "replace"))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            if self._path is not None and self._made and not os.fstat(descriptor).st_size:
                self._path.unlink(missing_ok=True)
            raise cannot_write(self._path or "standard output", error, opened=True) from error


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def check_writable(path: Path) -> None:
    """Refuse early what could not be written after minutes of work; leaves no file. Raises UsageError."""
    try:
        is_new = not os.path.lexists(path)
        os.close(open_output(path, append=True))
        if is_new:
            path.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


def check_new_folder(path: Path) -> None:
    """Refuse early a folder that holds something, or that cannot be had. Raises UsageError."""
    try:
        with suppress(FileNotFoundError):
            if path.is_symlink() or any(path.iterdir()):
                raise UsageError(f"{path} exists already", fix=["name a new folder"])
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path | str, error: OSError, *, opened: bool = False) -> SpdError:
    """The error for a file that cannot be opened for writing, or that was `opened` and takes no more."""
    words = f"cannot write to {path}: {error.strerror}"
    if opened or error.errno in DISK_FULL:
        fix = f"{free_space(error)}name another file"
        return ResourceError(words, fix=[fix], code="write_failed")
    return UsageError(words, fix=["name a file in a folder you can write to"])


def free_space(error: OSError) -> str:
    """Return the beginning of a fix that frees space; empty where that does not help."""
    return "free some space, or " if error.errno in DISK_FULL else ""
