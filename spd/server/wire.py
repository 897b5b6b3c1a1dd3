"""What goes over the socket between commands and a server: lines of JSON."""

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


LINE_LIMIT = 64 << 20


def runtime_folder(folder: Path) -> Path:
    """The folder of sockets, made if it is missing. Raises ResourceError if others could reach it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ResourceError(
            f"cannot use {folder}: {error.strerror}", fix=["set XDG_RUNTIME_DIR"]
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        words = f"{folder} is not a folder of yours alone"
        why = ["Another user could answer in its place."]
        fix = [f"rm -r {folder}", "--no-server"]
        raise ResourceError(words, reason=why, fix=fix, code="runtime_folder")
    return folder


def identity(config: EngineConfig) -> dict[str, Any]:
    """What an engine is made of, as JSON: this version, its wishes but for slots, and its models' files."""
    shown = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del shown["slots"]
    for name in ("model", "draft_model", "mtp"):
        if (folder := shown[name]) is not None:
            files = {path.name: path.stat() for path in model_files(Path(folder))}
            stamps = [
                [file, each.st_size, each.st_mtime_ns, each.st_ino] for file, each in files.items()
            ]
            shown[name] = [os.path.realpath(folder), *stamps]
    made_of: dict[str, Any] = json.loads(json.dumps({"version": __version__, **shown}))
    return made_of


def as_tuples(value: Any) -> Any:
    """A JSON value with tuples for its lists, as requests and events have them."""
    if isinstance(value, dict):
        return {name: as_tuples(one) for name, one in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def read_marks(said: dict[str, Any]) -> ThinkingMarks:
    """Marks of thinking from the JSON of their fields."""
    pairs = {name: tuple(MarkPair(**pair) for pair in found) for name, found in said.items()}
    return ThinkingMarks(**pairs)


def read_request(said: dict[str, Any]) -> Request:
    """A request from the JSON of its fields. Raises what its parts refuse."""
    fields = as_tuples(said)
    parts = {"params": SamplingParams, "grammar": GrammarSpec, "thinking": ThinkingBudget}
    for name, kind in parts.items():
        fields[name] = fields[name] and kind(**fields[name])
    if (grammar := fields["grammar"]) and grammar.thinking:
        tokens = ThinkingTokens(**grammar.thinking)
        fields["grammar"] = dataclasses.replace(grammar, thinking=tokens)
    return Request(**fields)
