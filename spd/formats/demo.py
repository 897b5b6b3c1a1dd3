"""Where the embedded demos lie: tiny trained targets. Inside the first: a small draft and an EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path

DEMOS = ("demo", "demo-hybrid")  # their names, accepted wherever a model is named; they share a tokenizer


def demo_folder(name: str = "demo") -> Path:
    return Path(__file__).parent / name


def demo_draft_folder() -> Path:
    return demo_folder() / "draft"


def demo_eagle3_folder() -> Path:
    return demo_folder() / "eagle3"
