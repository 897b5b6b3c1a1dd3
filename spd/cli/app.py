"""The application: commands, the error boundary, the environment and the exit status."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.commands import COMMANDS, CommandBody, run_command
from spd.cli.parser import COMMAND_FIXES
from spd.cli.plain_arguments import option_names, parse_plain
from spd.cli.signals import Interrupted, SignalGuard, exit_by_signal, exit_on_engine_error
from spd.cli.terminal.console import Console, PrintableStderr, Session, write_error, write_stderr
from spd.cli.terminal.sink import DISK_FULL_ERRNOS, OutputClosed, Sink, output_error
from spd.cli.terminal.streams import flush_streams, is_color_enabled, reserve_standard_descriptors
from spd.errors import NotFoundError, ResourceError, SpdError, UsageError
from spd.runtime.ranks.rendezvous import torchrun_rank

if TYPE_CHECKING:
    from spd.cli.config import OptionValue

PIPE_CLOSED_STATUS = 141
"""The exit status where a reader closed standard output: the shell's for SIGPIPE."""
SEARCH_PATHS = frozenset({"PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"})
"""Variables with search paths of programs and compilers.

Relative entries are removed from them, as they lie in the working folder.
"""
OPENMP_WAITING = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
"""Variables that say how torch's threads wait for each other."""
SHORT_SPIN = "1000"
"""Tries of a thread of torch's before it sleeps. With OpenMP's default, of several milliseconds, a
core that another program keeps busy makes torch's kernels ten times as slow."""
COMPLETION_VARIABLE = "_SPD_COMPLETE"
"""The variable in which a shell's completion script says what it wants printed."""
HELP_AND_VERSION_FLAGS = frozenset({"-h", "--help", "-V", "--version"})
SHARED_FLAGS = ("--json", "-q", "--quiet", "-v", "-vv", "--verbose")
"""Flags that may also stand before the command."""


def main(argv: Sequence[str]) -> int:
    """Run `spd` with these arguments and return its exit status; end by the signal if one came.

    Errors are printed. Removes relative entries from `SEARCH_PATHS` in the environment and sets how
    long torch's threads spin; signal handlers and `sys.stderr` are replaced until the end.
    """
    reserve_standard_descriptors()
    for name in SEARCH_PATHS & os.environ.keys():
        os.environ[name] = os.pathsep.join(
            filter(os.path.isabs, os.environ[name].split(os.pathsep))
        )
    if not OPENMP_WAITING & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SHORT_SPIN  # read when torch is imported
    stderr = sys.stderr
    if stderr is not None:
        sys.stderr = PrintableStderr(stderr)
    # torch warns on import if NumPy is missing; spd does not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    guard = SignalGuard()
    try:
        guard.install()
        if isinstance(sys.stdout, TextIOWrapper):
            with suppress(ValueError):
                sys.stdout.reconfigure(errors="replace")  # for help in a locale that lacks letters
        status = _run_or_report(list(argv), guard)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except Interrupted as stop:
        return exit_by_signal(stop.signum)
    except (OutputClosed, BrokenPipeError):
        return PIPE_CLOSED_STATUS
    except OSError as error:  # help into a full disk fails only when it is flushed
        failure = output_error("standard output", error, was_opened=True)
        write_error(failure, Console(), as_json=False)
        return failure.exit_code
    finally:
        guard.uninstall()
        flush_streams()
        sys.stderr = stderr


def _run_or_report(argv: list[str], guard: SignalGuard) -> int:
    """Run a command, a shell's completion or a rank of torchrun, and return the exit status.

    Prints an error as lines or as one JSON object. Raises Interrupted, and OutputClosed and
    BrokenPipeError where standard output is closed.
    """
    num_flags = next((i for i, word in enumerate(argv) if word not in SHARED_FLAGS), 0)
    command_first = [*argv[num_flags : num_flags + 1], *argv[:num_flags], *argv[num_flags + 1 :]]
    argv = command_first or ["--help"]
    as_json = "--json" in argv[: argv.index("--") if "--" in argv else None]
    rank, num_ranks = torchrun_rank(os.environ) or (0, None)
    help_command = f"spd {argv[0]} --help" if argv[0] in COMMANDS else "spd --help"
    console = Console(is_color_enabled(sys.stderr, os.environ), help=help_command)
    state = _xdg_folder("XDG_STATE_HOME", "~/.local/state/spd")
    sockets = _xdg_folder("XDG_RUNTIME_DIR", f"/tmp/spd-{os.getuid()}")
    dumb = os.environ.get("TERM") in ("dumb", None)
    session = Session(console, guard, state, sockets, dumb_terminal=dumb, rendezvous=num_ranks)
    try:
        if os.environ.get(COMPLETION_VARIABLE):
            from spd.cli.typer_app import build_app, print_completions

            typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
            return print_completions(build_app(typed.split()), COMPLETION_VARIABLE)
        if rank:
            from spd.cli.rank import run_rank

            return run_rank(rank, argv, os.environ.get("LOCAL_RANK", "0"))
        exit_on_engine_error(
            lambda error: write_error(_as_spd_error(error, console), session.console, as_json)
        )
        _check_working_folder(argv)
        result = _run_command(argv, session)
        return result if isinstance(result, int) else 0
    except SystemExit as stop:  # Typer exits so when writing its help fails
        return PIPE_CLOSED_STATUS if stop.code == 1 else int(stop.code or 0)
    except Exception as error:
        if (
            isinstance(error, OutputClosed | BrokenPipeError)
            or getattr(error, "errno", None) in DISK_FULL_ERRNOS
        ):
            raise
        if session.console.debug:
            import traceback

            write_stderr("".join(traceback.format_exception(error)))
        failure = _as_spd_error(error, session.console)
        if failure.exit_code in (2, 3, 4):
            failure.reason = (*failure.reason, *session.config_notes)
        if argv[0] in COMMANDS:
            failure.fix = _fixes_of_command(failure.fix, argv[0])
        write_error(failure, session.console, as_json)
        return failure.exit_code
    finally:
        if num_ranks is not None and not rank:
            from spd.cli.rank import release_ranks

            release_ranks()


def _run_command(argv: Sequence[str], session: Session) -> object:
    """Parse the arguments, by Typer unless they are plain; run the command, return its result."""
    default_map = _read_config_file(argv, session)
    if default_map is None and argv[0] in COMMANDS:
        body = CommandBody.find(argv[0])
        plain = parse_plain(body.options, argv[1:], os.environ)
        if plain is not None:
            return run_command(session, body, plain.values, plain.typed)
    from typer.main import get_command

    from spd.cli.typer_app import build_app

    command = get_command(build_app((argv[0],)))
    return command(
        args=argv, prog_name="spd", standalone_mode=False, obj=session, default_map=default_map
    )


def _read_config_file(
    argv: Sequence[str], session: Session
) -> dict[str, dict[str, OptionValue]] | None:
    """Return the options of the user's TOML file as Typer's map of defaults; None without any.

    None also where help or the version is asked for: a closed standard output raises OutputClosed
    then. Sets `config_notes` of the session. Raises UsageError for a faulty file.
    """
    variable = os.environ.get("SPD_CONFIG")
    path = _xdg_folder("XDG_CONFIG_HOME", "~/.config/spd") / "config.toml"
    has_config = True
    if variable:
        path = Path(variable)
    else:
        has_config, session.config_notes = _find_config_file(path)
    if not HELP_AND_VERSION_FLAGS.isdisjoint(argv):
        Sink.stdout()  # raises if it is closed
        return None
    if argv[0] not in COMMANDS or not has_config:
        return None
    from spd.cli.config import read_defaults

    defaults = read_defaults(argv[0], path)
    if not defaults:
        session.config_notes = []
        return None
    names = ", ".join(name.replace("_", "-") for name in defaults)
    session.config_notes = [f"{path} sets {names}"]
    return {argv[0]: defaults}  # nested, as `help` is a flag too


def _check_working_folder(argv: Sequence[str]) -> None:
    """Raise NotFoundError if a command would run in a deleted folder, where torch aborts."""
    if argv[0] not in COMMANDS or not HELP_AND_VERSION_FLAGS.isdisjoint(argv):
        return
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working folder cannot be used: {error.strerror}"
        raise NotFoundError(message, fix=["cd to a folder that exists"]) from None


def _xdg_folder(variable: str, default: str) -> Path:
    """Return spd's folder below that of an XDG variable, `default` if that is no absolute path."""
    home = os.environ.get(variable, "")
    return Path(home) / "spd" if os.path.isabs(home) else Path(default).expanduser()


def _find_config_file(path: Path) -> tuple[bool, list[str]]:
    """Return True and no lines if a file of options exists; else False.

    The list holds a line for -v where the system does not tell if the file exists.
    """
    try:
        path.lstat()  # a dangling link exists: reading it raises the error
    except (FileNotFoundError, NotADirectoryError):
        return False, []
    except OSError as error:
        return False, [f"{path} is not read: {error.strerror}"]
    return True, []


def _fixes_of_command(fixes: Sequence[str], command: str) -> tuple[str, ...]:
    """Return the fixes without those that begin with an option which the command lacks."""
    if not any(fix.startswith("--") for fix in fixes):
        return tuple(fixes)  # the fault may be that the command cannot be imported
    names = option_names(CommandBody.find(command).options)
    first_words = [fix.partition(" ")[0].partition("=")[0] for fix in fixes]
    return tuple(
        fix
        for fix, word in zip(fixes, first_words, strict=True)
        if not word.startswith("--") or word in names
    )


def _as_spd_error(error: Exception, console: Console) -> SpdError:
    """Return an SpdError as it is, and for any other exception the SpdError to show."""
    if isinstance(error, SpdError):
        return error
    typer = sys.modules.get("typer")  # only where Typer has parsed
    if typer is not None and isinstance(error, typer.TyperException):
        message = " ".join(error.format_message().split())
        message = message[:1].lower() + message[1:].rstrip(".")
        fix = [
            command
            for name, command in COMMAND_FIXES.items()
            if message == f"no such command '{name}'"
        ]
        if "unexpected extra" in message and console.help == "spd generate --help":
            fix = ['quote the prompt: spd generate "several words"']
        return UsageError(message, fix=[*fix, console.help])
    if os.strerror(errno.EMFILE) in str(error):  # torch's errors have no errno
        return ResourceError("too many open files", fix=["ulimit -n 1024"])
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        fix = [
            "--ctx 4k for a smaller cache, --spec off or --spec ngram to do without a draft model"
        ]
        reason = str(error).splitlines()[:1]
        return ResourceError("out of memory", reason=reason, fix=fix, code="out_of_memory")
    return SpdError(f"unexpected {type(error).__name__}: {error}")
