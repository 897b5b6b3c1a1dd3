"""Assertions that a round's program neither waits for a device nor does what a capture cannot
contain.

Three kinds of calls are watched, since no kind includes all: methods of a tensor (some never reach
the dispatcher), operations below them (an index by a mask reads how many are set), and waits for a
stream, event or device.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spd.kernels.attention import paged_attention, rotary_store
from spd.runtime.round.round import Round

HOST_READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
    "__contains__",
)
WAITS = (
    *((owner, "synchronize") for owner in (torch.cuda, torch.accelerator, torch.cpu)),
    *(
        (owner, name)
        for owner in (torch.cuda.Stream, torch.cuda.Event)
        for name in ("synchronize", "query")
    ),
)
"""Functions that wait for devices, streams or events, or query them."""


def _overloads(names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names.split()]
    return frozenset(
        getattr(packet, overload) for packet in packets for overload in packet.overloads()
    )


ASK = _overloads(
    "item _local_scalar_dense is_nonzero equal allclose nonzero nonzero_numpy argwhere "
    "masked_select _unique2 unique_dim unique_consecutive bincount repeat_interleave"
) | {torch.ops.aten.where.default}
"""Operations whose result, or its shape, the host reads.

Compound ones are seen undivided in a round.
"""
INDEX = _overloads("index index_put index_put_ _index_put_impl_")


class HostWatch:
    """Raises AssertionError where a round's program reads from the device, for kernels of these `forms`."""

    def __init__(self, *forms: str) -> None:
        self.forms = forms
        self.running = False
        self.rounds = 0
        self._programs = Counter[Any]()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watch every round from now on, of engines created from now on."""
        original = Round.run
        watch = self

        @functools.wraps(original)
        def run(
            self: Round, k: int, views: Any, needs: Any, num_logprobs: int | None, *drafts: int
        ) -> Any:
            if self.kernels.name not in watch.forms:
                return original(self, k, views, needs, num_logprobs, *drafts)
            watch.rounds += 1
            program = (self, k, needs, num_logprobs, *drafts)
            watch._programs[program] += 1
            watch.running = True
            try:
                # Operations are looked at in two rounds of each program: that takes a tenth of their time.
                with _Operations(watch) if watch._programs[program] <= 2 else nullcontext():
                    return original(self, k, views, needs, num_logprobs, *drafts)
            finally:
                watch.running = False

        patch.setattr(Round, "run", run)
        for kernels in (
            rotary_store,
            paged_attention,
        ):  # they look on a CPU, which is to be a GPU here
            patch.setattr(kernels, "is_known_finite", lambda x: False)
        for owner, name in (*((Tensor, name) for name in HOST_READS), *WAITS):
            patch.setattr(owner, name, self._refusing(owner, name))

    def refuse(self, operation: str) -> None:
        """Fail with the caller's place while a round runs.

        Calls of Triton's interpreter do not count.
        """
        if not self.running:
            return
        frame = sys._getframe(1)
        while (
            frame.f_code.co_filename == __file__
            or f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
        ):
            assert frame.f_back is not None
            frame = frame.f_back
        caller = frame.f_code.co_filename
        if f"{os.sep}triton{os.sep}" not in caller:
            raise AssertionError(
                f"a round waits for the device: {operation} in {caller}:{frame.f_lineno}"
            )

    def _refusing(self, owner: Any, name: str) -> Any:
        honest = getattr(owner, name)

        @functools.wraps(honest)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.refuse(f"{owner.__name__}.{name}")
            return honest(*args, **kwargs)

        return call


class _Operations(TorchDispatchMode):
    """Watches the operations that reach the dispatcher."""

    def __init__(self, watch: HostWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [index for index in args[1] if index is not None] if func in INDEX else []
        if func in ASK or any(index.dtype in (torch.bool, torch.uint8) for index in masks):
            self.watch.refuse(str(func))
        return func(*args, **(kwargs or {}))
