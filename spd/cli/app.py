"""The application: commands, the one error boundary, and the end of the process.

The only file of the command line that reads environment variables. Imports stay thin: a command's
body loads what it needs when it runs.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from spd import __version__
from spd.cli.argv import Invocation, prepare
from spd.cli.commands import COMMANDS, build_app
from spd.cli.lost import end_when_lost
from spd.cli.options import Session
from spd.cli.rank import dismiss, stand_by
from spd.cli.signals import Interrupted, SignalGuard, die_by
from spd.cli.text.output import (
    DISK_FULL,
    Console,
    OutputClosed,
    PrintableStderr,
    Sink,
    hold_standard_descriptors,
    release_streams,
    wants_color,
    write_error,
    write_stderr,
)
from spd.errors import ResourceError, SpdError, UsageError
from spd.runtime.ranks.rendezvous import Rendezvous

PIPE_CLOSED = 141
SEARCH_PATHS = frozenset({"PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"})
"""Where a compiler and its parts are looked for: never in the working folder, so never in a relative one."""
COMPLETION_VARIABLE = "_SPD_COMPLETE"


def main(argv: Sequence[str]) -> int:
    """Run `spd` with these arguments and return its exit status; ends by the signal if one came."""
    hold_standard_descriptors()
    for name in SEARCH_PATHS & os.environ.keys():
        os.environ[name] = os.pathsep.join(filter(os.path.isabs, os.environ[name].split(os.pathsep)))
    if (stderr := sys.stderr) is not None:
        sys.stderr = PrintableStderr(stderr)
    # torch says so on import where NumPy is absent; spd does not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    guard = SignalGuard()
    try:
        guard.install()
        status = _run(list(argv), guard)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except Interrupted as stop:
        return die_by(stop.signum)
    except (OutputClosed, BrokenPipeError):
        return PIPE_CLOSED
    except OSError as error:  # help into a full disk, known only when it is flushed
        full = ResourceError(f"cannot write: {error.strerror}", fix=["free some space"], code="write_failed")
        write_error(full, Console(), as_json=False)
        return full.exit_code
    finally:
        guard.uninstall()
        release_streams()
        sys.stderr = stderr


def _run(argv: list[str], guard: SignalGuard) -> int:
    """Parse and run; every error becomes lines (or one JSON object) and an exit status."""
    session: Session | None = None
    console, as_json = Console(help=_help_for(argv)), "--json" in argv
    place, meeting = Rendezvous.found(os.environ), None
    try:
        if os.environ.get(COMPLETION_VARIABLE):
            from spd.cli.commands.completions import complete

            typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
            return complete(build_app(typed.split(), completing=True), COMPLETION_VARIABLE)
        if place is not None and place[0]:
            return stand_by(place[0], argv, place[1], os.environ.get("LOCAL_RANK", "0"))
        if place is not None:
            meeting = str(place[1])
        invocation = prepare(argv or ["--help"])
        console, as_json = _console(invocation), invocation.json
        end_when_lost(lambda error: write_error(_explain(error, console), console, as_json=as_json))
        for note in invocation.notes:
            console.note(note)
        asked = next(iter(invocation.args), "")
        command = get_command(build_app((asked,)))
        defaults: dict[str, Any] = {}
        session = _session(console, guard, meeting)
        if not {"-h", "--help", "-V", "--version"}.isdisjoint(invocation.args):
            Sink.stdout()  # raises where it is closed
        elif asked in COMMANDS and (files := _config_files()):
            from spd.cli.config import read_defaults

            found = read_defaults(asked, files)
            console = _console(invocation, found.values)
            session = dataclasses.replace(session, console=console, told=tuple(found.words()))
            defaults = {asked: found.values}
        result = command(
            args=list(invocation.args),
            prog_name="spd",
            standalone_mode=False,
            obj=session,
            default_map=defaults,
        )
        return result if isinstance(result, int) else 0
    except SystemExit as stop:  # how Typer and rich end when standard output breaks under their help
        return PIPE_CLOSED if stop.code == 1 else int(stop.code or 0)
    except Exception as error:
        if isinstance(error, OutputClosed) or (isinstance(error, OSError) and error.errno in DISK_FULL):
            raise
        if console.debug:
            write_stderr("".join(traceback.format_exception(error)))
        failure = _explain(error, console)
        if session is not None and failure.exit_code in (2, 3, 4):
            failure.reason = (*failure.reason, *session.told)
        write_error(failure, console, as_json=as_json)
        return failure.exit_code
    finally:
        if place is not None and not place[0]:
            dismiss(place[1])


def _console(invocation: Invocation, defaults: Mapping[str, Any] | None = None) -> Console:
    """How this run talks, from its flags and the environment; rich reads the choice from the latter."""
    files = defaults or {}
    color = invocation.color or files.get("color")
    if color == "never":
        os.environ["NO_COLOR"] = "1"
    return Console(
        color=wants_color(sys.stderr, os.environ, color),
        quiet=invocation.quiet or files.get("quiet", False),
        debug=invocation.debug or os.environ.get("SPD_DEBUG", "0") not in ("", "0"),
        help=_help_for(invocation.args),
    )


def _config_files() -> list[tuple[Path, bool]]:
    """The person's file and the project's, or the one of SPD_CONFIG; whether each is a project's."""
    if named := os.environ.get("SPD_CONFIG"):
        return [(Path(named), False)]
    home = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()
    files = [(folder / "spd" / "config.toml", False), (Path("spd.toml"), True)]
    return [(path, is_project) for path, is_project in files if path.is_file()]


def _session(console: Console, guard: SignalGuard, rendezvous: str | None) -> Session:
    """What a command gets; chats are kept where the XDG rules say."""
    home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(home) if os.path.isabs(home) else Path("~/.local/state").expanduser()
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    runtime = Path(own) / "spd" if os.path.isabs(own) else Path(f"/tmp/spd-{os.getuid()}")
    dumb = os.environ.get("TERM") in ("dumb", None)
    return Session(console, guard, state / "spd", runtime, dumb_terminal=dumb, rendezvous=rendezvous)


def _explain(error: Exception, console: Console) -> SpdError:
    """The refusal to show for an exception; an unexpected one goes to a log file."""
    if isinstance(error, SpdError):
        return error
    if isinstance(error, typer.TyperException):
        message = error.format_message()
        unquoted = "unexpected extra" in message and console.help == "spd generate --help"
        fix = ['quote the prompt: spd generate "several words"', console.help] if unquoted else []
        return UsageError(message[:1].lower() + message[1:].rstrip("."), fix=fix)
    if os.strerror(errno.EMFILE) in str(error):  # torch's errors have no number
        return ResourceError("too many open files", fix=["ulimit -n 1024"])
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ResourceError(
            "out of memory",
            reason=[str(error).splitlines()[0]] if str(error) else [],
            fix=["--ctx 4k for a smaller cache, --spec off or --spec ngram to do without a draft model"],
            code="out_of_memory",
        )
    return SpdError(
        f"unexpected {type(error).__name__}: {error}",
        reason=() if console.debug else _write_log(error),
    )


def _help_for(argv: Sequence[str]) -> str:
    command = next((word for word in argv if word in COMMANDS), "")
    return f"spd {command} --help".replace("  ", " ")


def _write_log(error: Exception) -> list[str]:
    """Keep the traceback in a private temporary file: code lines and the message, no prompt."""
    import tempfile

    try:
        descriptor, path = tempfile.mkstemp(prefix="spd-error-", suffix=".log")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"spd {__version__}, Python {sys.version}\n")
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return []
    return [f"details: {path}"]
