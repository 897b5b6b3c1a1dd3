"""What an engine tries at load, tried once for all tiny models of a shape: most of their load goes there."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.interface import OPERATION_NAMES, Kernels
from spd.runtime.ranks.communicator import ProcessGroup
from spd.runtime.round import arithmetic_probe, model_runner
from spd.runtime.round.model_runner import ModelRunner
from tests.helpers import Patch

# Numbers of rows: a fifth of the passes.
EVERY_ROW = arithmetic_probe.CANDIDATES
FEW_ROWS = (5, 12)
honest = ModelRunner._try_arithmetic
KNOWN: dict[
    Any, tuple[int, ...] | None
] = {}  # The buckets that were found, by all that a trial depends on.


def structure(thing: Any) -> Any:
    """Shapes, dtypes and kinds of all that a model is made of; operations without what listens to them."""
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype, thing.is_mkldnn
    if isinstance(thing, Kernels):
        operations = (getattr(thing, name) for name in OPERATION_NAMES)
        functions = (getattr(operation, "__func__", operation) for operation in operations)
        return thing.name, tuple(id(inspect.unwrap(function)) for function in functions)
    if isinstance(thing, ProcessGroup):
        return thing.size
    if isinstance(thing, list | tuple):
        return type(thing).__name__, *map(structure, thing)
    if isinstance(thing, dict):
        return tuple((key, structure(value)) for key, value in thing.items())
    if type(thing).__module__.startswith("spd.") and hasattr(thing, "__dict__"):
        return type(thing).__name__, structure(vars(thing))
    return (
        thing if isinstance(thing, int | float | str | torch.dtype | None) else type(thing).__name__
    )


def tried_once(runner: ModelRunner, alone: bool) -> None:
    if alone:
        tried_together(runner, alone)
        return
    with pytest.MonkeyPatch.context() as patch:  # other processes know nothing of few rows
        try_rows(patch, EVERY_ROW)
        honest(runner, alone)


def try_rows(patch: Patch, numbers: tuple[int, ...]) -> None:
    for module in (model_runner, arithmetic_probe):
        patch.setattr(module, "CANDIDATES", numbers)


def tried_together(runner: ModelRunner, alone: bool) -> None:
    """Of ranks that are threads: none has tried a shape before all have begun to, so all know it or none."""
    around = (
        runner.dtype,
        runner.device,
        runner.chunk,
        runner.cache.page_size,
        torch.get_num_threads(),
    )
    key = alone, around, structure(runner.kernels), structure(runner.model)
    if key not in KNOWN:
        honest(runner, alone)
        KNOWN[key] = runner.buckets
    runner.buckets = KNOWN[key]
