"""The file of an MTP head next to a model's file, by their names."""

from __future__ import annotations

import re
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.json_file import list_folder

MTP_FILE_PREFIX = "mtp-"
"""The converter's prefix of the name of a file that holds a head alone."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
"""The number of a split and their count, at the end of a file's name."""
_TYPE = re.compile(r"[-.](?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
"""The types of a file's tensors, at the end of its name."""


def find_sidecar(path: Path) -> Path | None:
    """List a model file's folder and return the file of the model's MTP head in it; None without.

    Both names are compared without their types and without the numbers of splits. None too for a
    folder that cannot be read.
    """
    try:
        names = list_folder(path.parent)
    except CheckpointError:
        return None
    model_stem = _model_stem(path.name)
    for name in names:
        is_head = name.lower().startswith(MTP_FILE_PREFIX) and name.lower().endswith(".gguf")
        if is_head and _model_stem(name[len(MTP_FILE_PREFIX) :]) == model_stem:
            return path.parent / name
    return None


def _model_stem(name: str) -> str:
    """Return the part of a GGUF file's name that is the model's name, in lower case."""
    base_name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    return _TYPE.sub("", _SPLIT.sub("", base_name)).lower()
