"""Where the embedded demos lie: tiny trained targets. Inside the first: a small draft and an EAGLE-3 head."""

from __future__ import annotations

from functools import partial
from pathlib import Path

DEMOS = (
    "demo",
    "demo-hybrid",
)  # their names, accepted wherever a model is named; they share a tokenizer


def demo_folder(name: str = "demo") -> Path:
    return Path(__file__).parent / name


demo_draft_folder, demo_eagle3_folder = (
    partial(demo_folder, f"demo/{name}") for name in ("draft", "eagle3")
)
