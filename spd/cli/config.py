"""Options from files: defaults of those that are neither typed nor in the environment.

A file holds long names of options without their dashes, for every command that has them or, in a table of its
name, for one. What a single run is about, and every consent, has to be typed.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from spd.cli.commands import COMMANDS, build_app
from spd.cli.parser import CUT
from spd.errors import UsageError
from spd.formats.files import read_input
from spd.formats.json_file import open_regular_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TYPED = frozenset(
    {"continue", "dry-run", "file", "force", "help", "json", "jsonl", "messages", "output", "prompt-ids"}
    | {"pull", "resume", "version", "yes", "host", "detach", "status", "no-server"}
)
"""Options that no file may set."""
FOLDERS = frozenset({"draft-model", "model", "mtp"})
PROJECT = FOLDERS | {"color", "markdown", "quiet", "revision", "show-drafts", "stats", "verbose"}
"""Options that a project's own file may set, which comes with whatever was downloaded: models and looks."""
LIMIT = 65_536  # bytes: a system message or two
MAX_PARTS = 1000
"""Dots in a line: for a key of so many parts the parser takes time and memory by their square."""


def read_defaults(command: str, files: Sequence[tuple[Path, bool]]) -> tuple[dict[str, Any], list[str]]:
    """Values by parameter that files hold for a command, a later one before an earlier; which set what.

    The second of a pair says whether the file is a project's. Raises UsageError naming file and key.
    """
    params = _options_of(command)
    values: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for path, is_project in files:
        for key, value in _settings(path, is_project, command, params).items():
            if key in TYPED:
                raise _fault(path, f"--{key} has to be typed", [f"leave {key} out"])
            if is_project and key not in PROJECT:
                raise _fault(path, f"a project's file may not set {key}", ["set it in your own config.toml"])
            if is_project and key in FOLDERS and (str(value)[:1] in "/~" or ".." in Path(str(value)).parts):
                fix = ["org/name, or a folder in it"]
                raise _fault(path, f"{key} = {value!r} leads out of the project", fix)
            values[params[key].name] = _converted(path, key, value, params[key])
            origins[key] = path
    named = {path: [key for key, origin in origins.items() if origin == path] for path, _ in files}
    return values, [f"{path} sets {', '.join(keys)}" for path, keys in named.items() if keys]


def _settings(path: Path, is_project: bool, command: str, params: dict[str, Any]) -> dict[str, Any]:
    """A file's keys for one command, its table before the rest. Raises UsageError for what no command has."""
    loaded = _load(path, is_project)
    tables = {key: value for key, value in loaded.items() if isinstance(value, dict)}
    shared = {key: value for key, value in loaded.items() if key not in tables}
    for key in tables.keys() - set(COMMANDS):
        raise _fault(path, f"[{key}] is not a command", _close(key, COMMANDS))
    own = tables.get(command, {})
    for key in own.keys() - params.keys():
        raise _fault(path, f"spd {command} has no option --{key}", _close(key, params))
    if unknown := shared.keys() - params.keys() - TYPED:
        known = {option for name in COMMANDS for option in _options_of(name)}
        for key in sorted(unknown - known):
            raise _fault(path, f"no command has an option --{key}", _close(key, known))
    return {key: value for key, value in (shared | own).items() if key not in unknown}


def _options_of(name: str) -> dict[str, Any]:
    """A command's options by their long names."""
    command: Any = get_command(build_app((name,)))
    params = command.commands[name].params
    return {option[2:]: param for param in params for option in param.opts if option.startswith("--")}


def _load(path: Path, is_project: bool) -> dict[str, Any]:
    try:
        # The person's own may well be a pipe's: SPD_CONFIG=<(...)
        if is_project:
            with open_regular_file(path) as file:
                data = file.read(LIMIT + 1)
        else:
            data = read_input(path, "SPD_CONFIG=FILE that is there", LIMIT)
        if len(data) > LIMIT:
            raise ValueError(f"it is longer than {LIMIT:,} bytes")
        text = data.decode("utf-8-sig")
        if any(line.count(".") > MAX_PARTS for line in text.split("\n")):
            raise ValueError(f"a line has more than {MAX_PARTS:,} dots")
        return dict(tomllib.loads(text))
    except UnicodeDecodeError:
        raise _fault(path, "is not TOML: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"cannot be read: {error}") from None


def _converted(path: Path, key: str, value: object, param: Any) -> Any:
    """A value as if it had been typed. Raises UsageError where it could not have been."""
    items = value if isinstance(value, list) else [value]
    is_flag = bool(param.is_flag or param.count)
    fits = all(isinstance(item, (str, int, float)) and isinstance(item, bool) == is_flag for item in items)
    if not fits or (items is value and not param.multiple):
        wanted = "true or false" if is_flag else "a number or a text"
        raise _fault(path, f"{key} = {value!r} is not {wanted}", [f"spd --help says what --{key} takes"])
    shown: Any = value if is_flag else [str(item) for item in items] if param.multiple else str(value)
    try:
        param.type_cast_value(None, shown)
    except (typer.TyperException, UsageError) as error:
        words = error.message if isinstance(error, UsageError) else error.format_message()
        raise _fault(path, f"{key} = {value!r}: {words}") from None
    return shown


def _fault(path: Path, words: str, fix: Sequence[str] = ()) -> UsageError:
    words = words if len(words) <= 300 else f"{words[:297]}..."
    return UsageError(f"{path}: {words}", fix=fix or [f"edit {path}"], code="config")


def _close(word: str, known: Iterable[str]) -> list[str]:
    cut = CUT.get(f"--{word}")
    return [cut] if cut else difflib.get_close_matches(word, list(known), n=1)
