# mypy: disable-error-code="no-untyped-call"
"""Programs on the CPU, recorded once and replayed without their Python, as CUDA graphs are on a
GPU.

A program is a sequence of C functions and of torch's operations on tensors at fixed addresses.
Recording writes nothing to them: no C function and no in-place operation runs, and the results of
steps are zeros. The results of steps are allocated in one pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spd.kernels.native.calls import NativeCalls, Step

Result = TypeVar("Result")

POOL_BYTES = 64 << 20
"""Bytes of a pool. Programs with larger results are not recorded: Python is a small part of their
time."""
ALIGNMENT = 64
SYNCHRONIZING = frozenset({"nonzero", "masked_select", "lift_fresh"})
"""Operations whose result's size depends on values, or that copy a value of the host."""
ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty"})
COPIES = frozenset({"to", "_to_copy", "clone", "contiguous"})


class NotRecordable(Exception):
    """The program reads a value, or its results are larger than the pool."""


class Recording(TorchDispatchMode):
    """A mode that records a program's steps: functions with their arguments, in order."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.pool = pool
        self.used_bytes = 0
        self.steps: list[Step] = []
        self.constants: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's default would import its compiler, which is not used, for two
        seconds."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = op.overloadpacket.__name__
        if op._schema.is_mutable:
            self.steps.append((partial(op, **options), args))
            return options.get("out", args[0])
        result = op(*args, **options)
        results = result if isinstance(result, (tuple, list)) else [result]
        has_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in SYNCHRONIZING or has_mask:
            raise NotRecordable(name)
        if not all(isinstance(output, Tensor) for output in results):
            raise NotRecordable(name)
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if all(output.untyped_storage().data_ptr() in storages for output in results):
            return result  # a view
        if name == "arange":
            self.constants.append(result)
            return result
        outputs = [self._allocate(output) for output in results]
        if name not in ALLOCATIONS:
            self.steps.append(
                _write_step(op=op, name=name, args=args, options=options, outputs=outputs)
            )
        return outputs[0] if isinstance(result, Tensor) else type(result)(outputs)

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Return memory of the pool for a tensor, zeroed."""
        begin = -(-self.used_bytes // ALIGNMENT) * ALIGNMENT
        size = tensor.untyped_storage().nbytes()
        self.used_bytes = begin + size
        if self.used_bytes > self.pool.shape[0]:
            raise NotRecordable("pool")
        memory = self.pool[begin : self.used_bytes].zero_().view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride())


@cache
def _out_overload(op: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the overload of an operation with out arguments, and their names; or None and ()."""
    arguments = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        outs = []
        inputs = []
        for argument in other._schema.arguments:
            if argument.is_out:
                outs.append(argument.name)
            else:
                inputs.append((argument.name, str(argument.type)))
        if outs and inputs == arguments:
            return other, tuple(outs)
    return None, ()


def _write_step(
    op: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], outputs: list[Tensor]
) -> Step:
    """Return the step that writes an operation's results to its outputs."""
    if name in COPIES:
        return outputs[0].copy_, (args[0],)
    overload, names = _out_overload(op)
    if overload is not None:
        return partial(overload, **options, **dict(zip(names, outputs, strict=True))), args

    def run_and_copy(*args: Any) -> None:
        """Run the operation and copy its results to the outputs."""
        result = op(*args, **options)
        results = [result] if isinstance(result, Tensor) else result
        for output, value in zip(outputs, results, strict=True):
            output.copy_(value)

    return run_and_copy, args


def record(
    program: Callable[[], Result], library: NativeCalls, pool: Tensor
) -> tuple[Callable[[], None], Result]:
    """Return a function that replays a program, and the result, which each replay overwrites.

    pool: uint8 [N], which any number of recordings that run in turn may share. Raises
    NotRecordable.
    """
    recording = Recording(pool)
    with torch.inference_mode(), library.record_calls(recording.steps), recording:
        result = program()

    @torch.inference_mode()
    def run() -> None:
        for function, args in recording.steps:
            function(*args)

    return run, result
