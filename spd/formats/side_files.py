"""The files beside a model's weights that go along into a folder made of it: tokenizer, templates, words.

A folder is untrusted: a link in it may lead to a device or to any file of the user, who then publishes what
was written. Only regular files are copied, and links that stay in the folder or in its repository's part of
the hub's cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.chat_template import TEMPLATES_FOLDER
from spd.formats.files import FILE_LIMIT
from spd.formats.hub import model_name_of_snapshot
from spd.formats.json_file import convert_os_errors, list_folder, open_regular_file

ENDINGS = (".json", ".jinja", ".txt", ".model")
TOTAL_LIMIT = 512_000_000  # bytes of all of them


@dataclass(frozen=True)
class SideFile:
    """A file to copy: its path below the folder, and where its content lies."""

    name: Path
    source: Path


def side_files(folder: Path, without: Sequence[str]) -> tuple[list[SideFile], list[str]]:
    """Return the files that go along, and a note for each that does not though it is called like one."""
    root = _root(folder)
    files: list[SideFile] = []
    notes: list[str] = []
    left = TOTAL_LIMIT
    for name in _candidates(folder, without):
        try:
            source = _copyable(folder / name, root, left)
        except CheckpointError as refusal:
            notes.append(f"not copied: {refusal.message.removeprefix(f'{folder}/')}")
            continue
        left -= source.stat().st_size
        files.append(SideFile(name, source))
    return files, notes


def copy_side_files(files: Sequence[SideFile], destination: Path) -> None:
    """Copy files into a new folder. Raises CheckpointError where one is no longer what it was."""
    for file in files:
        target = destination / file.name
        target.parent.mkdir(exist_ok=True)
        if os.path.realpath(file.source) != str(file.source):
            raise CheckpointError(f"{file.source}: changed while in use")
        with open_regular_file(file.source) as source, open(target, "xb") as written:
            with convert_os_errors(file.source):
                data = source.read(FILE_LIMIT + 1)
            if len(data) > FILE_LIMIT:
                raise CheckpointError(f"{file.source}: changed while in use")
            written.write(data)


def _candidates(folder: Path, without: Sequence[str]) -> Iterator[Path]:
    """Yield the paths below a folder whose names say that they go along."""
    for name in list_folder(folder):
        if name.endswith(ENDINGS) and ".safetensors" not in name and name not in without:
            yield Path(name)
    templates = folder / TEMPLATES_FOLDER
    if templates.is_dir() and not templates.is_symlink():
        for name in list_folder(templates):
            if name.endswith(".jinja"):
                yield Path(TEMPLATES_FOLDER, name)


def _root(folder: Path) -> Path:
    """Return what links may lead into: the folder, or for a snapshot of the hub's cache its repository."""
    real = Path(os.path.realpath(folder))
    return real.parent.parent if model_name_of_snapshot(real) is not None else real


def _copyable(path: Path, root: Path, left: int) -> Path:
    """Return where a file's content lies. Raises CheckpointError where it must not be copied.

    root: what a link may lead into. left: bytes that all further files may have together.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise CheckpointError(f"{path}: is a link that leads out of the folder")
    with open_regular_file(real) as file:
        size = os.fstat(file.fileno()).st_size
    if size > min(FILE_LIMIT, left):
        most = f"{FILE_LIMIT:,} bytes, or all of them over {TOTAL_LIMIT:,}"
        raise CheckpointError(f"{path}: is larger than {most}")
    return real
