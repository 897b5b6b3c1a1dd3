"""Detection of GGUF files, and of the files of a model."""

from __future__ import annotations

import re
from pathlib import Path

MAGIC = b"GGUF"
"""The first bytes of every GGUF file."""
MAX_SPLITS = 1024
"""Files of one model."""
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
"""The name of one file of several: the model's, the count of files, the ending."""


def is_gguf(path: Path) -> bool:
    """True if a path is that of a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def model_files(model: Path) -> list[Path]:
    """Return a model's files: those in its folder, or its GGUF file with all splits, in order."""
    if model.is_dir():
        return [path for path in sorted(model.iterdir()) if path.is_file()]
    split = _SPLIT.fullmatch(model.name)
    if split is None:
        return [model]
    numbers = range(1, min(int(split[2]), MAX_SPLITS) + 1)
    names = [f"{split[1]}-{number:05d}-of-{split[2]}{split[3]}" for number in numbers]
    return [path for name in names if (path := model.with_name(name)).is_file()]
