"""Arithmetic probes cached by the shape of a tiny model: they take most of an engine's load."""

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

ALL_ROW_COUNTS = arithmetic_probe.CANDIDATE_BUCKETS
"""Row counts that an engine probes."""
FEW_ROW_COUNTS = (5, 12)
"""Row counts that tests probe: a fifth of the passes."""
try_arithmetic = ModelRunner._probe_row_counts
BUCKETS_BY_KEY: dict[Any, tuple[int, ...] | None] = {}
"""Row buckets that a probe gave, by all that it depends on."""


def describe_structure(value: Any) -> Any:
    """Return shapes, dtypes and types of all parts of a model, and its operations unwrapped."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.is_mkldnn
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(describe_structure, value)
    if isinstance(value, dict):
        return tuple((key, describe_structure(item)) for key, item in value.items())
    if value is None or isinstance(value, int | float | str | torch.dtype):
        return value
    if isinstance(value, Kernels):
        operations = (getattr(value, name) for name in OPERATION_NAMES)
        functions = (getattr(operation, "__func__", operation) for operation in operations)
        return value.name, tuple(id(inspect.unwrap(function)) for function in functions)
    if isinstance(value, ProcessGroup):
        return value.size
    if type(value).__module__.startswith("spd.") and hasattr(value, "__dict__"):
        return type(value).__name__, describe_structure(vars(value))
    return type(value).__name__


def probe_once(runner: ModelRunner, alone: bool) -> None:
    """Probe a runner's arithmetic, or take the buckets of an equal one that was probed before.

    A runner with other ranks is probed at all row counts: other processes do not know the few.
    """
    if alone:
        probe_on_all_ranks(runner, alone)
        return
    with pytest.MonkeyPatch.context() as patch:
        set_probed_row_counts(patch, ALL_ROW_COUNTS)
        try_arithmetic(runner, alone)


def set_probed_row_counts(patch: Patch, row_counts: tuple[int, ...]) -> None:
    for module in (model_runner, arithmetic_probe):
        patch.setattr(module, "CANDIDATE_BUCKETS", row_counts)


def probe_on_all_ranks(runner: ModelRunner, alone: bool) -> None:
    """Probe a runner, or take the cached buckets, where all ranks are threads of this process.

    No rank finishes a probe before all have begun it, so either all ranks find the key or none.
    """
    settings = (
        runner.dtype,
        runner.device,
        runner.chunk,
        runner.cache.page_size,
        torch.get_num_threads(),
    )
    key = alone, settings, describe_structure(runner.kernels), describe_structure(runner.model)
    if key not in BUCKETS_BY_KEY:
        try_arithmetic(runner, alone)
        BUCKETS_BY_KEY[key] = runner.buckets
    runner.buckets = BUCKETS_BY_KEY[key]
