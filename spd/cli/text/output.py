"""Where words go: the answer to standard output, the rest to standard error; escapes to terminals only."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from spd.errors import CheckFailedError, ResourceError, SpdError, UsageError
from spd.formats.files import open_output
from spd.runtime.plan.config import show_size

if TYPE_CHECKING:
    from spd.cli.signals import SignalGuard
    from spd.runtime import LoadProgress

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Control characters except tab and line ends: on a terminal they could move the cursor or worse."""
MISLEADING = re.compile(CONTROL.pattern + r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Those, other line ends, and marks of direction: what follows them is shown in another order."""
REPORT = "run it again with -vv, and report what it prints"
USUAL_FIXES = {
    "internal": REPORT,
    "engine": REPORT,
    "checkpoint": "give another model folder, or download this one again",
    "not_found": "check the name or the path",
    "resources": "ask for less (--ctx, --draft-max), or free memory",
}
"""What helps against an error of such a kind that says nothing itself; against others, the help."""


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
        quiet, verbose = values["quiet"], values["verbose"]
        changes = {"color": color, "quiet": quiet, "verbose": verbose > 0, "debug": verbose > 1}
        self.console = replace(self.console, **changes)
        for line in self.told:
            self.console.detail(f"config  {line}")


def printable(text: str, misleading: re.Pattern[str] = MISLEADING) -> str:
    """Text from outside, with what is misleading spelled out; for a model's own reply CONTROL is enough."""
    spelled = misleading.sub(lambda match: ascii(match.group())[1:-1], text)
    return spelled.encode("utf-8", "backslashreplace").decode("utf-8")


def as_line(text: str) -> str:
    """The same on one line: a name with a line end must not pass for a line of ours."""
    return printable(text.replace("\n", "\\n"))


def shortened(text: str, size: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= size else line[: size - 1] + "…"


def paint(text: str, style: str, color: bool) -> str:
    """Text in an ANSI style where colour is wanted."""
    return f"\x1b[{style}m{text}\x1b[0m" if color else text


def wants_color(stream: IO[Any] | None, environ: Mapping[str, str]) -> bool:
    """NO_COLOR, then FORCE_COLOR or CLICOLOR_FORCE, then TERM=dumb, then the terminal."""
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
    """The current width of a stream's terminal; None if it is not a terminal."""
    return terminal_size(stream).columns if is_terminal(stream) else None


def terminal_size(stream: IO[Any] | None) -> os.terminal_size:
    """Columns and lines of a stream's terminal now; 80 by 24 where it does not say."""
    columns = lines = 0
    with suppress(OSError, ValueError, AttributeError):
        columns, lines = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
    return os.terminal_size((columns or 80, lines or 24))


def tell(text: str, style: str = "") -> None:
    """Write a line for people to standard error, broken between words where its terminal is too narrow."""
    fitted = fit_lines(as_line(text), columns_of(sys.stderr))
    write_stderr(paint(fitted, style, bool(style)) + "\n", styled=True)


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write to standard error, whatever the text, or what is meant for a terminal; a closed one loses it."""
    stream = getattr(sys.stderr, "raw", sys.stderr)
    if stream is None:
        return
    text, encoding = text if styled else printable(text), stream.encoding or "utf-8"
    with suppress(OSError, ValueError):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


class PrintableStderr:
    """Standard error for all that is not written here: logs of libraries, warnings, tracebacks."""

    def __init__(self, raw: TextIO) -> None:
        self.raw, self.write = raw, lambda text: raw.write(printable(text))

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
        self._encoding, self.is_terminal, self._append = encoding, terminal, append
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
            self.write_lines(fact_lines(shown) if lines is None else lines)

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


WIDTH = 80
LABEL = 16
"""Columns of a name, or as many as the longest needs."""
LISTED = 8
"""Members of a list that are spelled out."""
_LABEL = re.compile(r" *(?:\S+ )?\S+ {2,}(?=\S)")
"""What stands in front of a fact: one or two words and a gap."""
_PASTED = re.compile(
    r" *(?:fix: )?(?:spd|echo|export|hf|iconv|jq|pip|torchrun|unset|[A-Z_]+=\S*|[-/{]\S*)(?: (?! )|$)"
)
"""The beginning of a line that is typed as it stands."""


def fit_lines(text: str, columns: int | None) -> str:
    """Wrap text to `columns`; None stands for no terminal, where nothing is wrapped.

    Further rows of a line are indented below its fact or by two blanks. A word longer than a row, and a line
    to be pasted, are left to the terminal, which copies them whole.
    """
    return (
        text if columns is None else "\n".join(_wrapped(line, columns) for line in text.split("\n"))
    )


def _wrapped(line: str, columns: int) -> str:
    if cells(line) < columns or _PASTED.match(line):
        return line
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    hang = " " * (indent if indent <= columns // 3 else 2)
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, columns - 1, subsequent_indent=hang, **whole)


def cells(text: str) -> int:
    """Columns that a text takes at most."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


class Size(int):
    """Bytes: a number in JSON, and in the unit that suits them for people."""

    def __str__(self) -> str:
        return show_size(int(self))


def fact_lines(facts: Mapping[str, Any], indent: str = "", width: int = 0) -> Iterator[str]:
    """A JSON object for people: `name  field value · field value`, what is nested below, nothing empty."""
    width = width or max(LABEL, *map(len, facts))
    for name, value in facts.items():
        if name == "schema" or _is_empty(value):
            continue
        label = f"{indent + name.replace('_', ' '):<{width}}  "
        for each in value if _is_nested(value) and not isinstance(value, Mapping) else (value,):
            if not isinstance(each, Mapping):
                yield label + _words(each)
                continue
            own = {key: one for key, one in each.items() if not (_is_empty(one) or _is_nested(one))}
            fields = " · ".join(
                f"{key.replace('_', ' ')} {_words(one)}" for key, one in own.items()
            )
            yield (label + fields).rstrip()
            below = {key: one for key, one in each.items() if key not in own}
            yield from fact_lines(below, indent + "  ", width)


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], (), {}) or (isinstance(value, Size) and not value)


def _is_nested(value: Any) -> bool:
    """Whether it is an object or a list of them."""
    return isinstance(value, Mapping) or (isinstance(value, list) and isinstance(value[0], Mapping))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        more = len(value) - LISTED
        return ", ".join(map(_words, value[:LISTED])) + (f" and {more:,} more" if more > 0 else "")
    return (
        f"{value:,}"
        if type(value) is int
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    turned = []
    for column in zip(header, *rows, strict=True):
        numbers = any(cell[:1].isdigit() and " " not in cell for cell in column[1:])
        width = max(map(len, column))
        turned.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*turned, strict=True)]


DELAY = 0.5
"""Seconds before a bar is worth its while."""
INTERVAL = 0.2
BAR = 20
WORDS = {"read": "reading weights", "pack": "packing weights", "download": "downloading"}


class Ticker(AbstractContextManager["Ticker"]):
    """Rewrites its line at most five times a second, and takes it away at the end."""

    def __init__(self, console: Console) -> None:
        self._shows = not console.quiet and is_terminal(sys.stderr)
        self._drawn, self._width = float("-inf"), 0
        self._counted, self._began, self._first = "", 0.0, 0

    def __exit__(self, *_: object) -> None:
        self.write("")

    def count(self, what: str, done: int, total: int, amount: Callable[[int], str]) -> None:
        """As far as the row has room: `reading 40% [##..] 0:03 left · 8 tok of 20 tok · 4 tok/s`."""
        now = time.perf_counter()
        if what != self._counted:
            self._counted, self._began, self._first = what, now, done
        if (passed := now - self._began) < DELAY or done <= self._first:
            return
        if done >= total:
            self.write("")
            return
        rate = (done - self._first) / passed
        begin, left = f"{what} {100 * done // total}%", f"{clock((total - done) / rate)} left"
        facts = [left, f"{amount(done)} of {amount(total)}", f"{amount(round(rate))}/s"]
        room = (columns_of(sys.stderr) or 80) - len(begin) - 2
        while len(words := " · ".join(facts)) > room and len(facts) > 1:
            facts.pop()
        width = min(BAR, room - len(words) - 3)
        bar = f"[{'#' * (width * done // total):.<{width}}] " if width > 3 else ""
        self.write(f"{begin} {bar}{words}")

    def write(self, text: str) -> None:
        """Put a text in the line's place; an empty one clears it."""
        now = time.perf_counter()
        if (
            not self._shows
            or now - self._drawn < INTERVAL * bool(text)
            or not (text or self._width)
        ):
            return
        text = as_line(text)[: (columns_of(sys.stderr) or 80) - 1]
        write_stderr("\r" + text.ljust(self._width) + ("" if text else "\r"), styled=True)
        self._drawn, self._width = now, len(text)


@contextmanager
def compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Let `say` hear that kernels are compiled, which happens inside at a first run."""
    import logging

    logger, handler = logging.getLogger("spd.kernels.native.build.compiling"), logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def loading(text: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """Say on a terminal what takes its time, until it is done; yields what is to be told of the progress."""
    with Ticker(console) as ticker, compiling(lambda words: ticker.write(f"{words} …")):
        ticker.write(f"{text} …")
        yield lambda progress: ticker.count(
            WORDS[progress.phase], progress.done, progress.total, show_size
        )


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
