"""Where words go: the answer to standard output, everything else to standard error.

Owns the encodings, colour, closed and full pipes, and the shape of an error. Decides by each
stream's own terminal state; what is not a terminal gets no escape byte from here.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import select
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spd.cli.wrap import fit_lines
from spd.errors import CheckpointError, EngineError, NotFoundError, ResourceError, SpdError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Control characters except tab and line ends: on a terminal they could move the cursor or worse."""


class OutputClosed(Exception):
    """The reader of standard output has gone: nothing more can be delivered, and nothing is wrong."""


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
            line = fit_lines(f"note: {printable(text)}", columns_of(sys.stderr))
            write_stderr(f"{paint('note:', '36', self.color)}{line.removeprefix('note:')}\n")

    def detail(self, text: str) -> None:
        """One line that only --verbose shows."""
        if self.verbose:
            tell(printable(text))


def printable(text: str) -> str:
    """Text with control characters and lone surrogates spelled out."""
    spelled = CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)
    return spelled.encode("utf-8", "backslashreplace").decode("utf-8")


def paint(text: str, style: str, color: bool) -> str:
    """Text in an ANSI style where colour is wanted."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def wants_color(stream: IO[Any] | None, environ: Mapping[str, str], choice: str | None) -> bool:
    """Flag, then NO_COLOR, then FORCE_COLOR or CLICOLOR_FORCE, then TERM=dumb, then the terminal."""
    if choice in ("always", "never"):
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: IO[Any] | None) -> bool:
    """Whether a stream is there, open and a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def columns_of(stream: IO[Any] | None) -> int | None:
    """How wide a stream's terminal is now; None where it is none."""
    if stream is None or not is_terminal(stream):
        return None
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def terminal_columns() -> int:
    """How wide the terminal of standard output is now."""
    return columns_of(sys.stdout) or 80


def tell(text: str) -> None:
    """Write lines for people to standard error, broken between words where its terminal is too narrow."""
    write_stderr(fit_lines(text, columns_of(sys.stderr)) + "\n")


def write_stderr(text: str) -> None:
    """Write to standard error what its encoding can hold; a closed standard error loses it."""
    if sys.stderr is None:
        return
    encoding = sys.stderr.encoding or "utf-8"
    with suppress(OSError, ValueError):
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stderr.flush()


def write_error(error: SpdError, console: Console, *, as_json: bool) -> None:
    """Show what is wrong, why, and what to type instead: as lines, or as one JSON object on stdout."""
    fixes = list(error.fix or [usual_fix(error, console.help)])
    if as_json:
        shown = {
            "code": error.code,
            "exit": error.exit_code,
            "message": error.message,
            "reason": list(error.reason),
            "fix": fixes,
        }
        with suppress(OutputClosed, SpdError):
            sink = Sink.stdout()
            sink.write(to_json({"error": shown}) + "\n")
            return
    first, *more = error.message.splitlines() or [""]
    lines = [f"error: {printable(first)}"]
    lines += [f"  {printable(line)}" for text in (*more, *error.reason) for line in text.splitlines()]
    lines += [f"  {'    ' if number else 'fix:'} {printable(fix)}" for number, fix in enumerate(fixes)]
    words = fit_lines("\n".join(lines), columns_of(sys.stderr))
    words = words.replace("error:", paint("error:", "1;31", console.color), 1)
    write_stderr(words.replace("\n  fix:", f"\n  {paint('fix:', '32', console.color)}", 1) + "\n")


def usual_fix(error: SpdError, help_words: str) -> str:
    """What helps against an error of this kind, where the error itself does not say."""
    if isinstance(error, CheckpointError):
        return "give another model folder, or download this one again"
    if isinstance(error, NotFoundError):
        return "check the name or the path"
    if isinstance(error, ResourceError):
        return "ask for less (--ctx, --draft-max), or free memory"
    unforeseen = isinstance(error, EngineError) or type(error) is SpdError
    return "run it again with --debug, and report what it prints" if unforeseen else help_words


def to_json(value: object) -> str:
    """One line of strict JSON; what is not a finite number becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


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

    A file is emptied by the first write, not before. Raises OutputClosed when a pipe's reader has
    gone and ResourceError when nothing can be written.
    """

    def __init__(
        self,
        descriptor: int | Path,
        *,
        encoding: str = "utf-8",
        terminal: bool = False,
        append: bool = False,
    ) -> None:
        self._target = descriptor
        self._encoding = encoding
        self._terminal = terminal
        self._mode = os.O_APPEND if append else os.O_TRUNC

    @classmethod
    def stdout(cls) -> Sink:
        """Standard output: UTF-8 unless it is a terminal of another encoding."""
        stream = sys.stdout
        if stream is None or stream.closed:
            raise ResourceError("standard output is closed", fix=["-o FILE"], code="stdout_closed")
        terminal = is_terminal(stream)
        encoding = (stream.encoding or "utf-8") if terminal else "utf-8"
        return cls(stream.fileno(), encoding=encoding, terminal=terminal)

    @property
    def is_terminal(self) -> bool:
        """Whether people read it as it comes."""
        return self._terminal

    @property
    def columns(self) -> int | None:
        """How wide its terminal is now; None where it is none."""
        return columns_of(sys.stdout) if self._terminal else None

    @property
    def is_unicode(self) -> bool:
        """Whether it can show every character."""
        return "utf" in self._encoding.lower()

    @classmethod
    def file(cls, path: Path, *, append: bool = False) -> Sink:
        """A file of UTF-8 text, behind what it holds if `append`."""
        return cls(path, append=append)

    def write(self, text: str) -> None:
        """Write text as it is; on a terminal its control characters are spelled out."""
        self.write_styled(printable(text) if self._terminal else text)

    def write_lines(self, text: str) -> None:
        """Write lines for people, broken between words where a terminal is too narrow for them."""
        self.write(fit_lines(text, self.columns))

    def write_styled(self, text: str) -> None:
        """Write text whose control characters are meant."""
        data = text.encode(self._encoding, "replace")
        try:
            if isinstance(self._target, Path):
                self._target = os.open(self._target, os.O_WRONLY | os.O_CREAT | self._mode, 0o666)
            _write_all(self._target, data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed from error
            raise _write_failed("the answer", error) from error


class TraceFile:
    """A file of one JSON line a record; each line is complete when `write_record` returns."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise cannot_write(path, error) from error

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def write_record(self, record: DataclassInstance) -> None:
        """Append one record. Raises ResourceError when the disk is full."""
        try:
            _write_all(self._descriptor, (to_json(dataclasses.asdict(record)) + "\n").encode())
        except OSError as error:
            raise _write_failed("the trace", error) from error


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def _write_failed(what: str, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write {what}: {error.strerror}",
        fix=["free some space, or name another file"],
        code="write_failed",
    )


def check_writable(path: Path) -> None:
    """Refuse early what could not be written after minutes of work; touches nothing. Raises UsageError."""
    folder = path.parent
    if path.is_dir():
        number = errno.EISDIR
    elif path.exists():
        number = 0 if os.access(path, os.W_OK) else errno.EACCES
    elif not folder.is_dir():
        number = errno.ENOENT
    else:
        number = 0 if os.access(folder, os.W_OK) else errno.EACCES
    if number:
        raise cannot_write(path, OSError(number, os.strerror(number)))


def check_folder(path: Path) -> None:
    """Refuse early a folder in which nothing could be written, or that cannot be made. Raises UsageError."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise cannot_write(path, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(existing, os.W_OK):
        raise cannot_write(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def cannot_write(path: Path, error: OSError) -> SpdError:
    """The error for a file that cannot be opened for writing, or not filled."""
    if error.errno in DISK_FULL:
        return ResourceError(
            f"cannot write to {path}: {error.strerror}", fix=["free some space"], code="write_failed"
        )
    return UsageError(
        f"cannot write to {path}: {error.strerror}", fix=["name a file in a folder you can write to"]
    )


def write_result(path: Path | None, text: str) -> SpdError | None:
    """Write a file, if one was named; what kept it from being written, to be raised when all is printed."""
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        assert path is not None
        return cannot_write(path, error)
    return None


def hold_standard_descriptors() -> None:
    """Put the null device where 0, 1 or 2 are closed, so that no opened file takes their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def silence_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter's last flush cannot fail."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
