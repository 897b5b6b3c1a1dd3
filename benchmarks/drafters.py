"""The drafters of a checkpoint: its MTP head, folders `eagle3` and `draft` beside it, lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.mtp import find_mtp_source


def model_folder(name: str) -> Path:
    """Return the folder of a model that is named on a command line."""
    return demo_folder() if name == "demo" else Path(name).resolve()


def drafters(model: Path) -> dict[str, dict[str, Any]]:
    """Return the options of an `EngineConfig` by method, the learned ones first."""
    methods: dict[str, dict[str, Any]] = {}
    if find_mtp_source(ModelFolder(model)) is not None:
        methods["mtp"] = {"spec": "mtp"}
    if (model / "eagle3").is_dir():
        methods["eagle3"] = {"spec": "eagle3", "draft_model": model / "eagle3"}
    if (model / "draft").is_dir():
        methods["draft"] = {"spec": "draft", "draft_model": model / "draft"}
    return {**methods, "ngram": {"spec": "ngram"}}
