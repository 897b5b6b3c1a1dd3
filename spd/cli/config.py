"""Options from a file: defaults of those that are neither typed nor in the environment.

It holds long names of options without their dashes, for every command that has them or, in a table of its
name, for one. What a single run is about, and every consent, has to be typed.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from spd.cli.commands import COMMANDS, build_app
from spd.cli.parser import CUT
from spd.errors import UsageError
from spd.formats.files import read_input

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TYPED = frozenset(
    {"continue", "dry-run", "file", "help", "json", "jsonl", "messages", "output", "prompt-ids"}
    | {"pull", "resume", "version", "yes", "host", "detach", "status", "no-server"}
)
"""Options that no file may set."""
LIMIT = 65_536  # bytes: a system message or two


def read_defaults(command: str, path: Path) -> dict[str, Any]:
    """Values by parameter that a file holds for a command, its table before the rest.

    Raises UsageError naming file and key.
    """
    params, loaded = _options_of(command), _load(path)
    tables = {key: value for key, value in loaded.items() if isinstance(value, dict)}
    shared = {key: value for key, value in loaded.items() if key not in tables}
    for key in tables.keys() - set(COMMANDS):
        raise _fault(path, f"[{key}] is not a command", _close(key, COMMANDS))
    own = tables.get(command, {})
    for key in own.keys() - params.keys():
        raise _fault(path, f"spd {command} has no option --{key}", _close(key, params))
    if others := shared.keys() - params.keys() - TYPED:
        known = {option for name in COMMANDS for option in _options_of(name)}
        for key in sorted(others - known):
            raise _fault(path, f"no command has an option --{key}", _close(key, known))
    wanted = {key: value for key, value in (shared | own).items() if key not in others}
    for key in sorted(wanted.keys() & TYPED):
        raise _fault(path, f"--{key} has to be typed", [f"leave {key} out"])
    return {params[key].name: _as_typed(value, params[key]) for key, value in wanted.items()}


def _options_of(name: str) -> dict[str, Any]:
    """A command's options by their long names."""
    command: Any = get_command(build_app((name,)))
    params = command.commands[name].params
    return {option[2:]: param for param in params for option in param.opts if option.startswith("--")}


def _load(path: Path) -> dict[str, Any]:
    try:
        data = read_input(path, "SPD_CONFIG=FILE that is there", LIMIT)
        return dict(tomllib.loads(data.decode("utf-8-sig")))
    except UnicodeDecodeError:
        raise _fault(path, "is not TOML: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"cannot be read: {error}") from None


def _as_typed(value: object, param: Any) -> Any:
    """A value as if it had been typed, which the parser reads."""
    if isinstance(value, list) and param.multiple:
        return [str(item) for item in value]
    return value if param.is_flag and isinstance(value, bool) else str(value)


def _fault(path: Path, words: str, fix: Sequence[str] = ()) -> UsageError:
    words = words if len(words) <= 300 else f"{words[:297]}..."
    return UsageError(f"{path}: {words}", fix=fix or [f"edit {path}"], code="config")


def _close(word: str, known: Iterable[str]) -> list[str]:
    cut = CUT.get(f"--{word}")
    return [cut] if cut else difflib.get_close_matches(word, list(known), n=1)
