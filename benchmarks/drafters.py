"""The drafters of a checkpoint: its MTP head, folders `eagle3` and `draft` beside it, lookup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.mtp import find_mtp_source
from spd.runtime.plan.config import EngineConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EngineOptions(TypedDict, total=False):
    """Fields of an `EngineConfig`, given as keywords."""

    model: Path | ModelFolder
    dtype: str
    quantize: str
    activations: str
    kv: str
    spec: str
    lag: int | None
    prefix_sharing: bool
    draft_model: Path | ModelFolder | None
    draft_max: int | None
    adaptive: bool | None
    ngram_min: int | None
    synthetic_acceptance: float | None
    graphs: bool | None
    threads: int | None
    slots: int
    pool_tokens: int
    cache_pages: int | None
    ctx: int | None
    tp: int
    device: str
    verify: str
    kernels: str


def model_folder(name: str) -> Path:
    """Return the folder of a model that is named on a command line."""
    return demo_folder() if name == "demo" else Path(name).resolve()


def engine_config(options: EngineOptions, **overriding: Unpack[EngineOptions]) -> EngineConfig:
    """Return the configuration of some options, of which the keywords override the first ones."""
    merged: EngineOptions = {**options, **overriding}
    return EngineConfig(**merged)


def drafters(model: Path) -> dict[str, EngineOptions]:
    """Return the options of an `EngineConfig` by method, the learned ones first."""
    methods: dict[str, EngineOptions] = {}
    if find_mtp_source(ModelFolder(model)) is not None:
        methods["mtp"] = {"spec": "mtp"}
    if (model / "eagle3").is_dir():
        methods["eagle3"] = {"spec": "eagle3", "draft_model": model / "eagle3"}
    if (model / "draft").is_dir():
        methods["draft"] = {"spec": "draft", "draft_model": model / "draft"}
    return {**methods, "ngram": {"spec": "ngram"}}
