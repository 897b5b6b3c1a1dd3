"""Where the embedded demo lies: a tiny trained target, and its small draft in a folder inside it."""

from __future__ import annotations

from pathlib import Path


def demo_folder() -> Path:
    """The folder of the embedded demo target."""
    return Path(__file__).parent / "demo"


def demo_draft_folder() -> Path:
    """The folder of the embedded demo draft model."""
    return demo_folder() / "draft"
