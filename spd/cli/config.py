"""Options from a file: defaults, for all commands or one, of what is neither typed nor in the environment."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.main import get_command

from spd.cli.commands import COMMANDS, build_app
from spd.errors import UsageError
from spd.formats.files import read_input

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TYPED = frozenset(
    {
        "continue",
        "dry-run",
        "file",
        "help",
        "json",
        "jsonl",
        "messages",
        "output",
        "plot",
        "prompt-ids",
    }
    | {"pull", "resume", "version", "yes", "host", "detach", "status", "no-server", "tools"}
)
"""What a single run is about, and every consent: no file may set it."""
LIMIT = 65_536  # bytes: a system message or two


def read_defaults(command: str, path: Path) -> dict[str, Any]:
    """What a file holds for a command, its table before the rest. Raises UsageError naming file and key."""
    params = _options_of(command)
    loaded = _load(path)
    found = loaded.get(command)
    own = found if isinstance(found, dict) else {}  # `verify` is a command and an option
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        if isinstance(value, dict):
            if key not in COMMANDS:
                raise _fault(path, f"[{key}] is not a command")
        elif key in params.keys() | TYPED:
            values[key] = value
        elif not any(key in _options_of(name) for name in COMMANDS):
            known = {option for name in COMMANDS for option in _options_of(name)}
            raise _unknown(path, f"no command has an option --{key}", key, known)
    for key in own:
        if key not in params:
            raise _unknown(path, f"spd {command} has no option --{key}", key, params)
    values |= own
    if typed := sorted(values.keys() & TYPED):
        raise _fault(path, f"--{typed[0]} has to be typed")
    found = {}
    for param, value in (
        (params[key], value) for key, value in values.items()
    ):  # as if it had been typed
        listed = isinstance(value, list) and param.multiple
        switch = param.is_flag and isinstance(value, bool)
        found[param.name] = list(map(str, value)) if listed else value if switch else str(value)
    return found


def _options_of(name: str) -> dict[str, Any]:
    """A command's options by their long names."""
    command: Any = get_command(build_app((name,)))
    params = command.commands[name].params
    return {
        option[2:]: param for param in params for option in param.opts if option.startswith("--")
    }


def _load(path: Path) -> dict[str, Any]:
    try:
        data = read_input(path, "SPD_CONFIG=FILE that is there", LIMIT)
        return dict(tomllib.loads(data.decode("utf-8-sig")))
    except UnicodeDecodeError:
        raise _fault(path, "is not TOML: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"cannot be read: {error}") from None


def _unknown(path: Path, words: str, key: str, known: Iterable[str]) -> UsageError:
    """Return the error for a key that is no option; the fix names the nearest of `known`."""
    near = get_close_matches(key, sorted(known), n=1)
    fix = f"edit {path}: {near[0]} in the place of {key}" if near else ""
    return _fault(path, words, fix)


def _fault(path: Path, words: str, fix: str = "") -> UsageError:
    words = words if len(words) <= 300 else f"{words[:297]}..."
    return UsageError(f"{path}: {words}", fix=[fix or f"edit {path}"], code="config")
