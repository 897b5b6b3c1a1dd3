"""The protocol of the socket between commands and a server: lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.errors import ResourceError
from spd.formats.gguf.file_kind import model_files
from spd.formats.thinking import MarkPair, ThinkingMarks
from spd.runtime.engine.request import GrammarSpec, Request, ThinkingBudget, ThinkingTokens
from spd.runtime.round.sampling_params import SamplingParams
from spd.version import __version__

if TYPE_CHECKING:
    from spd.runtime import EngineConfig


MAX_LINE_BYTES = 64 << 20
"""Bytes of a line that a server reads."""


def make_runtime_folder(folder: Path) -> Path:
    """Make the folder of sockets if it is missing, and return it.

    Raises ResourceError if it cannot be made, or other users can access it.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        stat_result = folder.lstat()
    except OSError as error:
        raise ResourceError(
            f"cannot use {folder}: {error.strerror}", fix=["set XDG_RUNTIME_DIR"]
        ) from None
    if (
        not stat.S_ISDIR(stat_result.st_mode)
        or stat_result.st_uid != os.geteuid()
        or stat_result.st_mode & 0o077
    ):
        message = f"{folder} is not a folder of yours alone"
        reason = ["Another user could answer in its place."]
        fix = [f"rm -r {folder}", "--no-server"]
        raise ResourceError(message, reason=reason, fix=fix, code="runtime_folder")
    return folder


def engine_identity(config: EngineConfig) -> dict[str, Any]:
    """Return an engine's identity as JSON: this version, its options and its models' files.

    Of the options slots and what lookup keeps do not count, of the files sizes, times and inodes.
    """
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in ("slots", "pool_tokens", "lookup"):
        del fields[name]
    for name in ("model", "draft_model"):
        if (folder := fields[name]) is not None:
            files = {path.name: path.stat() for path in model_files(Path(folder))}
            stamps = [
                [file, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ino]
                for file, file_stat in files.items()
            ]
            fields[name] = [os.path.realpath(folder), *stamps]
    parsed: dict[str, Any] = json.loads(json.dumps({"version": __version__, **fields}))
    return parsed


def as_tuples(value: Any) -> Any:
    """Return a JSON value with tuples for its lists, as requests and events have them."""
    if isinstance(value, dict):
        return {name: as_tuples(item) for name, item in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def read_marks(fields: dict[str, Any]) -> ThinkingMarks:
    """Return marks of thinking from the JSON of their fields."""
    pairs = {
        name: tuple(MarkPair(**pair) for pair in kind_pairs) for name, kind_pairs in fields.items()
    }
    return ThinkingMarks(**pairs)


def read_request(message: dict[str, Any]) -> Request:
    """Return a request from the JSON of its fields. Raises what its parts raise."""
    fields = as_tuples(message)
    parts = {"params": SamplingParams, "grammar": GrammarSpec, "thinking": ThinkingBudget}
    for name, kind in parts.items():
        fields[name] = fields[name] and kind(**fields[name])
    if (grammar := fields["grammar"]) and grammar.thinking:
        tokens = ThinkingTokens(**grammar.thinking)
        fields["grammar"] = dataclasses.replace(grammar, thinking=tokens)
    return Request(**fields)
