# mypy: disable-error-code="no-untyped-call"
"""A program on the CPU recorded once and run again without its Python: what a CUDA graph is to a GPU.

A program is a chain of C functions and of torch's operations on tensors that stay where they are. While it is
recorded nothing is written to them: no C function runs, no operation in place, and what a step would make is
zeros. The results of steps have places in one pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spd.kernels.native.library import NativeKernels, Step

Result = TypeVar("Result")

POOL_BYTES = (
    64 << 20
)  # a program that makes more is not recorded: there, Python is not what takes the time
ALIGNMENT = 64
ASKING = frozenset({"nonzero", "masked_select", "lift_fresh"})
"""Operations whose result has a size that values decide, or brings a value of the host's."""
EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty"})
COPIES = frozenset({"to", "_to_copy", "clone", "contiguous"})


class NotRecordable(Exception):
    """The program asks for a value, or makes more than the pool holds."""


class Recording(TorchDispatchMode):
    """Notes what a program does. The steps are functions with their arguments, in order."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.pool = pool
        self.used = 0
        self.steps: list[Step] = []
        self.constants: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: to say so to torch's compiler, which is not used, would import it for two seconds."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = op.overloadpacket.__name__
        if op._schema.is_mutable:
            self.steps.append((partial(op, **given), args))
            return given.get("out", args[0])
        made = op(*args, **given)
        results = made if isinstance(made, (tuple, list)) else [made]
        masked = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if name in ASKING or masked or not all(isinstance(each, Tensor) for each in results):
            raise NotRecordable(name)
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        known = {each.untyped_storage().data_ptr() for each in tensors}
        if all(each.untyped_storage().data_ptr() in known for each in results):
            return made  # a view
        if name == "arange":
            self.constants.append(made)
            return made
        places = [self._place(each) for each in results]
        if name not in EMPTY:
            self.steps.append(_into(op, name, args, given, places))
        return places[0] if isinstance(made, Tensor) else type(made)(places)

    def _place(self, made: Tensor) -> Tensor:
        """Room in the pool for a tensor, zeroed."""
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        size = made.untyped_storage().nbytes()
        self.used = begin + size
        if self.used > self.pool.shape[0]:
            raise NotRecordable("pool")
        room = self.pool[begin : self.used].zero_().view(made.dtype)
        return room.as_strided(made.shape, made.stride())


@cache
def _out_form(op: Any) -> tuple[Any, tuple[str, ...]]:
    """The overload of an operation that writes into given tensors, and their names; or nothing."""
    wanted = [(each.name, str(each.type)) for each in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        outs = tuple(each.name for each in other._schema.arguments if each.is_out)
        plain = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if outs and plain == wanted:
            return other, outs
    return None, ()


def _into(
    op: Any, name: str, args: tuple[Any, ...], given: dict[str, Any], places: list[Tensor]
) -> Step:
    """The step that makes an operation's results in their places."""
    if name in COPIES:
        return places[0].copy_, (args[0],)
    written, names = _out_form(op)
    if written is not None:
        return partial(written, **given, **dict(zip(names, places, strict=True))), args

    def copied(*args: Any) -> None:
        made = op(*args, **given)
        for place, each in zip(places, [made] if isinstance(made, Tensor) else made, strict=True):
            place.copy_(each)

    return copied, args


def record(
    program: Callable[[], Result], library: NativeKernels, pool: Tensor
) -> tuple[Callable[[], None], Result]:
    """What runs a program again, and its result, whose tensors each run writes anew. Raises NotRecordable.

    pool: uint8 [N], which any number of recordings may share that run in turn.
    """
    recording = Recording(pool)
    with torch.inference_mode(), library.record_calls(recording.steps), recording:
        result = program()

    @torch.inference_mode()
    def run() -> None:
        for function, args in recording.steps:
            function(*args)

    return run, result
