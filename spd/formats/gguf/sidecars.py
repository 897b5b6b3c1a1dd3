"""The file of an MTP head next to a model's file, by their names."""

from __future__ import annotations

import re
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.json_file import list_folder

PREFIX = "mtp-"
"""The converter's prefix of the name of a file that holds a head alone."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(r"[-.](?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
"""The types of a file's tensors, at the end of its name."""


def find_sidecar(path: Path) -> Path | None:
    """Return the file of a model's MTP head in the same folder; None without one.

    Both names are compared without their types and without the numbers of splits.
    """
    try:
        names = list_folder(path.parent)
    except CheckpointError:
        return None
    model_stem = _stem(path.name)
    for name in names:
        is_head = name.lower().startswith(PREFIX) and name.lower().endswith(".gguf")
        if is_head and _stem(name[len(PREFIX) :]) == model_stem:
            return path.parent / name
    return None


def _stem(name: str) -> str:
    """Return the part of a file's name that is the model's name."""
    base_name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    return _TYPE.sub("", _SPLIT.sub("", base_name)).lower()
