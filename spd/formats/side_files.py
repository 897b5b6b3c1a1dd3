"""Files that are copied with a model's weights: tokenizer, templates, texts.

A folder is untrusted: a link in it may lead to a device or to any file of the user, who then
publishes the copy. Only regular files are copied, and links that stay in the folder or in its
repository's part of the hub's cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.chat_template import TEMPLATES_FOLDER
from spd.formats.files import MAX_FILE_BYTES
from spd.formats.hub import model_name_of_snapshot
from spd.formats.json_file import convert_os_errors, list_folder, open_regular_file

SIDE_FILE_ENDINGS = (".json", ".jinja", ".txt", ".model")
MAX_TOTAL_BYTES = 512_000_000
"""Bytes of all files together."""


@dataclass(frozen=True)
class SideFile:
    """A file to copy."""

    name: Path
    """Its path below the folder."""
    source: Path
    """The file that has its content, where it is a link."""


def find_side_files(folder: Path, excluded: Sequence[str]) -> tuple[list[SideFile], list[str]]:
    """Return the files to copy, and a note for each file of such a name that is not copied.

    excluded: names that are not copied, without a note.
    """
    root = _link_root(folder)
    files: list[SideFile] = []
    notes: list[str] = []
    remaining = MAX_TOTAL_BYTES
    for name in _candidate_names(folder, excluded):
        try:
            source = _resolve_copyable(folder / name, root, remaining)
        except CheckpointError as refusal:
            notes.append(f"not copied: {refusal.message.removeprefix(f'{folder}/')}")
            continue
        remaining -= source.stat().st_size
        files.append(SideFile(name, source))
    return files, notes


def copy_side_files(files: Sequence[SideFile], destination: Path) -> None:
    """Copy files into a new folder, the templates' folder included.

    Raises CheckpointError for a file that has changed or become too large.
    """
    for file in files:
        target = destination / file.name
        target.parent.mkdir(exist_ok=True)
        if os.path.realpath(file.source) != str(file.source):
            raise CheckpointError(f"{file.source}: changed while in use")
        with open_regular_file(file.source) as source, open(target, "xb") as copy:
            with convert_os_errors(file.source):
                data = source.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise CheckpointError(f"{file.source}: changed while in use")
            copy.write(data)


def _candidate_names(folder: Path, excluded: Sequence[str]) -> Iterator[Path]:
    """Yield the paths below a folder whose names are those of files to copy."""
    for name in list_folder(folder):
        if name.endswith(SIDE_FILE_ENDINGS) and ".safetensors" not in name and name not in excluded:
            yield Path(name)
    templates = folder / TEMPLATES_FOLDER
    if templates.is_dir() and not templates.is_symlink():
        for name in list_folder(templates):
            if name.endswith(".jinja"):
                yield Path(TEMPLATES_FOLDER, name)


def _link_root(model_folder: Path) -> Path:
    """Return the folder that links may not leave; for a snapshot of the hub, its repository."""
    target = Path(os.path.realpath(model_folder))
    return target.parent.parent if model_name_of_snapshot(target) is not None else target


def _resolve_copyable(path: Path, root: Path, remaining: int) -> Path:
    """Return the file with a path's content. Raises CheckpointError where it must not be copied.

    root: the folder that a link may not leave. remaining: bytes that all further files may have
    together.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise CheckpointError(f"{path}: is a link that leads out of the folder")
    with open_regular_file(target) as file:
        size = os.fstat(file.fileno()).st_size
    if size > min(MAX_FILE_BYTES, remaining):
        limit = f"{MAX_FILE_BYTES:,} bytes, or all of them over {MAX_TOTAL_BYTES:,}"
        raise CheckpointError(f"{path}: is larger than {limit}")
    return target
