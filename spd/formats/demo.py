"""Where the embedded demos lie: tiny trained targets. Inside the first: a small draft and an EAGLE-3 head."""

from __future__ import annotations

import hashlib
from pathlib import Path

DEMOS = ("demo", "demo-hybrid")
"""Their names, accepted wherever a model is named. They share a tokenizer."""


def demo_folder(name: str = "demo") -> Path:
    return Path(__file__).parent / name


def demo_draft_folder() -> Path:
    return demo_folder() / "draft"


def demo_eagle3_folder() -> Path:
    return demo_folder() / "eagle3"


def demo_faults(folder: Path) -> list[str]:
    """Which of a demo folder's files are missing or not the ones in its SHA256SUMS, in words."""
    faults = []
    for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split(maxsplit=1)
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
        else:
            if found != digest:
                faults.append(f"{name}: sha256 {found[:16]}, expected {digest[:16]}")
    return faults
