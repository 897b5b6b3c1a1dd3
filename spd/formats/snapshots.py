"""Snapshots of a model in the hub's cache."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.json_file import read_text
from spd.formats.names import INDEX_FILE, WEIGHTS_FILE


def current_snapshot(folder: Path) -> Path | None:
    """Return the snapshot of `main` in a model's cached folder, else the only one, else None."""
    main = ""
    with suppress(CheckpointError):
        main = read_text(folder / "refs" / "main", 1000).strip()
    with suppress(OSError):
        snapshots = sorted((folder / "snapshots").iterdir())
        chosen = [snapshot for snapshot in snapshots if snapshot.name == main] or snapshots
        return chosen[0] if len(chosen) == 1 else None
    return None


def has_safetensors(folder: Path) -> bool:
    """True if a folder has `model.safetensors` or the index of its shards."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()
