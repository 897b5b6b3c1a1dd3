"""What an engine tries at load, tried once for all tiny models of a shape: most of their load is spent on it.

Weights' values are not looked at. Where several processes try together, nothing is taken as known.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.runtime.ranks.communicator import ProcessGroup
from spd.runtime.round.arithmetic_probe import admitted_parts
from spd.runtime.round.model_runner import ModelRunner

FEW_ROWS = (5, 12)
"""The numbers of rows that are tried, of a run's seven: a third of the passes."""
known_parts = cache(admitted_parts)
"""Parts of blocks of keys follow from the heads alone, of which tiny models have few kinds."""
honest = ModelRunner._try_arithmetic
FOUND = ("buckets", "context_parts")
KNOWN: dict[Any, tuple[Any, ...]] = {}
"""What was found, by all that a trial depends on."""


def structure(thing: Any) -> Any:
    """Shapes, dtypes and kinds of all that a model is made of; operations without what listens to them."""
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype, thing.is_mkldnn
    if isinstance(thing, Kernels):
        operations = (inspect.unwrap(each) for each in vars(thing).values() if callable(each))
        return thing.name, tuple(map(id, operations))
    if isinstance(thing, ProcessGroup):
        return thing.size
    if isinstance(thing, list | tuple):
        return type(thing).__name__, *map(structure, thing)
    if isinstance(thing, dict):
        return tuple((key, structure(value)) for key, value in thing.items())
    if type(thing).__module__.startswith("spd.") and hasattr(thing, "__dict__"):
        return type(thing).__name__, structure(vars(thing))
    return thing if isinstance(thing, int | float | str | torch.dtype | None) else type(thing).__name__


def tried_once(runner: ModelRunner, alone: bool) -> None:
    """See `ModelRunner._try_arithmetic`."""
    if alone:
        tried_together(runner, alone)
    else:
        honest(runner, alone)


def tried_together(runner: ModelRunner, alone: bool) -> None:
    """Of ranks that are threads: none has tried a shape before all have begun to, so all know it or none."""
    around = runner.dtype, runner.device, runner.chunk, runner.cache.page_size, torch.get_num_threads()
    key = alone, around, structure(runner.kernels), structure(runner.model)
    if key not in KNOWN:
        honest(runner, alone)
        KNOWN[key] = tuple(getattr(runner, name) for name in FOUND)
    for name, value in zip(FOUND, KNOWN[key], strict=True):
        setattr(runner, name, value)
