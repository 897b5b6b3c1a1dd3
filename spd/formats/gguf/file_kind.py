"""Which files are GGUF."""

from __future__ import annotations

from pathlib import Path

MAGIC = b"GGUF"
"""How every such file begins."""


def is_gguf(path: Path) -> bool:
    """True if a path leads to a file that is GGUF, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
