"""The file of an MTP head that stands beside a model's file, by their names."""

from __future__ import annotations

import re
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.json_file import list_folder

PREFIX = "mtp-"
"""What the converter puts before the name of a file that holds a head alone."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(r"[-.](?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
"""The types of a file's tensors, at the end of its name."""


def sidecar_of(path: Path) -> Path | None:
    """Return the file beside a model's that is called as its head's; None without one.

    Both names are compared without their types and without the numbers of splits.
    """
    try:
        names = list_folder(path.parent)
    except CheckpointError:
        return None
    wanted = _stem(path.name)
    for name in names:
        known = name.lower().startswith(PREFIX) and name.lower().endswith(".gguf")
        if known and _stem(name[len(PREFIX) :]) == wanted:
            return path.parent / name
    return None


def _stem(name: str) -> str:
    """Return what a file's name says of its model alone."""
    bare = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    return _TYPE.sub("", _SPLIT.sub("", bare)).lower()
