"""The application: commands, the one error boundary, the environment, and the end of the process."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from spd.cli.commands import COMMANDS, build_app, complete
from spd.cli.parser import ELSEWHERE
from spd.cli.signals import Interrupted, SignalGuard, die_by, end_when_lost
from spd.cli.terminal.console import Console, PrintableStderr, Session, write_error, write_stderr
from spd.cli.terminal.sink import DISK_FULL, OutputClosed, Sink, cannot_write
from spd.cli.terminal.streams import hold_standard_descriptors, release_streams, wants_color
from spd.errors import NotFoundError, ResourceError, SpdError, UsageError
from spd.runtime.ranks.rendezvous import torchrun_rank

PIPE_CLOSED = 141
SEARCH_PATHS = frozenset({"PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"})
"""Where a compiler and its parts are looked for: never in the working folder, so never in a relative one."""
COMPLETION_VARIABLE = "_SPD_COMPLETE"
HELP = frozenset({"-h", "--help", "-V", "--version"})
SHARED = ("--json", "-q", "--quiet", "-v", "-vv", "--verbose")
"""Flags that may also stand before the command."""


def main(argv: Sequence[str]) -> int:
    """Run `spd` with these arguments and return its exit status; ends by the signal if one came."""
    hold_standard_descriptors()
    for name in SEARCH_PATHS & os.environ.keys():
        os.environ[name] = os.pathsep.join(
            filter(os.path.isabs, os.environ[name].split(os.pathsep))
        )
    if (stderr := sys.stderr) is not None:
        sys.stderr = PrintableStderr(stderr)
    # torch says so on import where NumPy is absent; spd does not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    guard = SignalGuard()
    try:
        guard.install()
        with suppress(AttributeError, ValueError):  # for help where the locale has fewer letters
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        status = _run(list(argv), guard)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except Interrupted as stop:
        return die_by(stop.signum)
    except (OutputClosed, BrokenPipeError):
        return PIPE_CLOSED
    except OSError as error:  # help into a full disk, known only when it is flushed
        failure = cannot_write("standard output", error, opened=True)
        write_error(failure, Console(), as_json=False)
        return failure.exit_code
    finally:
        guard.uninstall()
        release_streams()
        sys.stderr = stderr


def _run(argv: list[str], guard: SignalGuard) -> int:
    """Parse and run; every error becomes lines (or one JSON object) and an exit status."""
    before = next((i for i, word in enumerate(argv) if word not in SHARED), 0)
    argv = [*argv[before : before + 1], *argv[:before], *argv[before + 1 :]] or ["--help"]
    as_json = "--json" in argv[: argv.index("--") if "--" in argv else None]
    rank, started = torchrun_rank(os.environ) or (0, None)
    words = f"spd {argv[0]} --help" if argv[0] in COMMANDS else "spd --help"
    console = Console(wants_color(sys.stderr, os.environ), help=words)
    state = _folder("XDG_STATE_HOME", "~/.local/state/spd")
    sockets = _folder("XDG_RUNTIME_DIR", f"/tmp/spd-{os.getuid()}")
    dumb = os.environ.get("TERM") in ("dumb", None)
    session = Session(console, guard, state, sockets, dumb_terminal=dumb, rendezvous=started)
    try:
        if os.environ.get(COMPLETION_VARIABLE):
            typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
            return complete(build_app(typed.split()), COMPLETION_VARIABLE)
        if rank:
            from spd.cli.rank import stand_by

            return stand_by(rank, argv, os.environ.get("LOCAL_RANK", "0"))
        end_when_lost(lambda error: write_error(_explain(error, console), session.console, as_json))
        defaults: dict[str, Any] = {}
        _check_working_folder(argv)
        named = os.environ.get("SPD_CONFIG")
        path = Path(named) if named else _folder("XDG_CONFIG_HOME", "~/.config/spd") / "config.toml"
        is_there, session.told = (True, []) if named else _look_for(path)
        if not HELP.isdisjoint(argv):
            Sink.stdout()  # raises where it is closed
        elif argv[0] in COMMANDS and is_there:
            from spd.cli.config import read_defaults

            defaults = read_defaults(argv[0], path)
            names = ", ".join(name.replace("_", "-") for name in defaults)
            session.told = [f"{path} sets {names}"] * bool(names)
        command = get_command(build_app((argv[0],)))
        told = {argv[0]: defaults} if defaults else None  # `help` is a name of a flag, too
        result = command(
            args=argv, prog_name="spd", standalone_mode=False, obj=session, default_map=told
        )
        return result if isinstance(result, int) else 0
    except SystemExit as stop:  # how Typer ends when standard output breaks under its help
        return PIPE_CLOSED if stop.code == 1 else int(stop.code or 0)
    except Exception as error:
        if isinstance(error, OutputClosed) or getattr(error, "errno", None) in DISK_FULL:
            raise
        if session.console.debug:
            write_stderr("".join(traceback.format_exception(error)))
        failure = _explain(error, session.console)
        if failure.exit_code in (2, 3, 4):
            failure.reason = (*failure.reason, *session.told)
        write_error(failure, session.console, as_json)
        return failure.exit_code
    finally:
        if started is not None and not rank:
            from spd.cli.rank import dismiss

            dismiss()


def _check_working_folder(argv: Sequence[str]) -> None:
    """Raise NotFoundError where a command would run in a deleted folder: torch's libraries abort there."""
    if argv[0] not in COMMANDS or not HELP.isdisjoint(argv):
        return
    try:
        os.getcwd()
    except OSError as error:
        why = f"the working folder cannot be used: {error.strerror}"
        raise NotFoundError(why, fix=["cd to a folder that exists"]) from None


def _folder(variable: str, usual: str) -> Path:
    """Where the XDG rules say that a kind of files is kept."""
    home = os.environ.get(variable, "")
    return Path(home) / "spd" if os.path.isabs(home) else Path(usual).expanduser()


def _look_for(path: Path) -> tuple[bool, list[str]]:
    """Return whether a file of options is there, or why that cannot be known, for a verbose run."""
    try:
        path.lstat()  # a link that leads nowhere is there: what it was to set is not set
    except (FileNotFoundError, NotADirectoryError):
        return False, []
    except OSError as error:
        return False, [f"{path} is not read: {error.strerror}"]
    return True, []


def _explain(error: Exception, console: Console) -> SpdError:
    """The refusal to show for an exception."""
    if isinstance(error, SpdError):
        return error
    if isinstance(error, typer.TyperException):
        message = " ".join(error.format_message().split())
        message = message[:1].lower() + message[1:].rstrip(".")
        fix = [words for name, words in ELSEWHERE.items() if message == f"no such command '{name}'"]
        if "unexpected extra" in message and console.help == "spd generate --help":
            fix = ['quote the prompt: spd generate "several words"']
        return UsageError(message, fix=[*fix, console.help])
    if os.strerror(errno.EMFILE) in str(error):  # torch's errors have no number
        return ResourceError("too many open files", fix=["ulimit -n 1024"])
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        fix = [
            "--ctx 4k for a smaller cache, --spec off or --spec ngram to do without a draft model"
        ]
        reason = str(error).splitlines()[:1]
        return ResourceError("out of memory", reason=reason, fix=fix, code="out_of_memory")
    return SpdError(f"unexpected {type(error).__name__}: {error}")
