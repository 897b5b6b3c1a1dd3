"""Defaults of options from a TOML file, for all commands or for one.

They apply to options that are neither typed nor in the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.commands import COMMANDS
from spd.errors import UsageError
from spd.formats.files import read_input

if TYPE_CHECKING:
    from typer.core import TyperOption

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND_LINE_ONLY = frozenset(
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
    | {"resume", "version", "yes", "host", "detach", "status", "no-server", "tools"}
)
"""Options of a single run, and every consent: no file may set them."""
MAX_CONFIG_BYTES = 65_536  # bytes: a system message or two

OptionValue = list[str] | bool | str
"""A value of an option as Typer takes it from a map of defaults."""


def read_defaults(command: str, path: Path) -> dict[str, OptionValue]:
    """Read a file and return its defaults for a command, by parameter name.

    The command's own table takes precedence over the top level. Raises UsageError for a file that
    cannot be read, an unknown option, and one that has to be typed.
    """
    loaded = _load_toml(path)
    if not loaded:
        return {}
    params = _options_by_name(command)
    table = loaded.get(command)
    command_table = table if isinstance(table, dict) else {}  # `verify` is a command and an option
    values: dict[str, object] = {}
    for key, value in loaded.items():
        if isinstance(value, dict):
            if key not in COMMANDS:
                raise _config_error(path, f"[{key}] is not a command")
        elif key in params.keys() | COMMAND_LINE_ONLY:
            values[key] = value
        elif not any(key in _options_by_name(name) for name in COMMANDS):
            all_options = {option for name in COMMANDS for option in _options_by_name(name)}
            raise _unknown_key_error(path, f"no command has an option --{key}", key, all_options)
    for key in command_table:
        if key not in params:
            raise _unknown_key_error(path, f"spd {command} has no option --{key}", key, params)
    values |= command_table
    typed_only = sorted(values.keys() & COMMAND_LINE_ONLY)
    if typed_only:
        raise _config_error(path, f"--{typed_only[0]} has to be typed")
    return {str(params[key].name): _as_typed(params[key], value) for key, value in values.items()}


def _as_typed(param: TyperOption, value: object) -> OptionValue:
    """Return a TOML value as if it had been typed for an option."""
    if isinstance(value, list) and param.multiple:
        return list(map(str, value))
    if isinstance(value, bool) and param.is_flag:
        return value
    return str(value)


def _options_by_name(name: str) -> dict[str, TyperOption]:
    """Import a command and return its options by their long names without dashes."""
    from typer.core import TyperGroup, TyperOption
    from typer.main import get_command

    from spd.cli.typer_app import build_app

    group = get_command(build_app((name,)))
    assert isinstance(group, TyperGroup)
    params = [param for param in group.commands[name].params if isinstance(param, TyperOption)]
    return {
        option[2:]: param for param in params for option in param.opts if option.startswith("--")
    }


def _load_toml(path: Path) -> dict[str, object]:
    """Read a TOML file and return its tables and keys. Raises UsageError."""
    try:
        data = read_input(path, "SPD_CONFIG=FILE that is there", MAX_CONFIG_BYTES)
        return dict(tomllib.loads(data.decode("utf-8-sig")))
    except UnicodeDecodeError:
        raise _config_error(path, "is not TOML: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _config_error(path, f"cannot be read: {error}") from None


def _unknown_key_error(
    path: Path, message: str, key: str, option_names: Iterable[str]
) -> UsageError:
    """Return the error for a key that is no option; the fix names the closest of `option_names`."""
    from difflib import get_close_matches

    close_matches = get_close_matches(key, sorted(option_names), n=1)
    fix = f"edit {path}: {close_matches[0]} in the place of {key}" if close_matches else ""
    return _config_error(path, message, fix)


def _config_error(path: Path, message: str, fix: str = "") -> UsageError:
    """Return the error for a file of options; long messages are cut."""
    message = message if len(message) <= 300 else f"{message[:297]}..."
    return UsageError(f"{path}: {message}", fix=[fix or f"edit {path}"], code="config")
