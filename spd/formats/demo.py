"""Folders of the embedded demos: tiny targets, the first with a draft and an EAGLE-3 head."""

from __future__ import annotations

from functools import partial
from pathlib import Path

DEMOS = ("demo", "demo-hybrid")
"""Names of the demos, accepted wherever a model is named. They share a tokenizer."""


def demo_folder(name: str = "demo") -> Path:
    """Return the folder of a demo."""
    return Path(__file__).parent / name


demo_draft_folder = partial(demo_folder, "demo/draft")
demo_eagle3_folder = partial(demo_folder, "demo/eagle3")
"""Return the folders of the first demo's draft model and EAGLE-3 head."""
