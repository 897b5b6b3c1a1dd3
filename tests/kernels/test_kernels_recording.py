"""Programs of C functions and torch's operations, recorded and run again, against the programs as
written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.native.library import NativeKernels
from spd.kernels.native.recording import NotRecordable, record
from tests.kernels.forms import HERE, needs_compiled

pytestmark = needs_compiled

K = 40
N = 48


@pytest.fixture
def library(native_with: Callable[[str], NativeKernels]) -> NativeKernels:
    return native_with(HERE[0])


@pytest.fixture
def pool() -> Tensor:
    return torch.full((1 << 20,), 77, dtype=torch.uint8)


class Machine:
    """Static tensors, and a program over them that has a step of every kind."""

    def __init__(self, library: NativeKernels) -> None:
        generator = torch.Generator().manual_seed(1)
        self.library = library
        self.dtype = library.dtype
        self.x = torch.randn(3, K, generator=generator).to(self.dtype)
        self.weight = library.pack(torch.randn(N, K, generator=generator))
        self.table = torch.randn(9, N, generator=generator)
        self.sums = torch.zeros(3, N)
        self.count = torch.zeros(3, dtype=torch.int64)

    def program(self) -> tuple[Tensor, Tensor]:
        y = self.library.packed_linear(
            self.x.t().contiguous().t(), self.weight, None
        )  # copied, turned, viewed
        places = torch.where(y.float().sum(-1) > 0, self.count + torch.arange(3), 7) % 9
        picked = self.table[places].to(self.dtype) + y
        parts = torch.cat((picked[:, : N // 2], y.narrow(1, N // 2, N // 2)), 1)
        values, ids = parts.float().topk(2, dim=-1)
        self.sums.view(-1).add_(parts.float().flatten())
        self.count += ids.sum(-1).clamp(max=5)
        self.count += 1
        return torch.stack((values[:, 0], values[:, 1])), places

    def changed(self, seed: int) -> None:
        self.x.copy_(torch.randn(3, K, generator=torch.Generator().manual_seed(seed)))


def state(machine: Machine) -> list[Tensor]:
    return [tensor.clone() for tensor in (machine.x, machine.table, machine.sums, machine.count)]


def test_a_recording_does_what_the_program_does(library: NativeKernels, pool: Tensor) -> None:
    """A product's room is no part of the pool: it grows while the first is recorded, and again
    behind it."""
    library.scratch_storages[:] = [torch.UntypedStorage(0)]
    written = Machine(library)
    machine = Machine(library)
    other, result = record(
        lambda: library.packed_linear(machine.x, machine.weight, None), library, pool
    )
    before = state(machine)
    run, results = record(machine.program, library, pool)
    assert all(map(torch.equal, state(machine), before)), "recording wrote"
    wide = library.pack(torch.ones(32, 64 * K))
    library.packed_linear(torch.ones(64, 64 * K, dtype=library.dtype), wide, None)
    constants = [
        torch.full((1 << 12,), float("nan")) for _ in range(64)
    ]  # where freed memory would be used again
    for seed in range(5):
        for changed in (written, machine):
            changed.changed(seed)
        expected = written.program()
        run()
        assert all(map(torch.equal, results, expected)) and constants
        assert all(map(torch.equal, state(machine), state(written)))
        other()  # it writes where the first one has its results
        assert torch.equal(result, library.packed_linear(written.x, written.weight, None))


ASKING: dict[str, Callable[[Machine], Any]] = {
    "item": lambda m: m.count[0].item(),
    "truth": lambda m: bool(m.count.any()),
    "equal": lambda m: torch.equal(m.count, m.count),
    "nonzero": lambda m: m.count.nonzero(),
    "mask": lambda m: m.table[m.table[:, 0] > 0],
    "selected": lambda m: m.table.masked_select(m.table > 0),
    "host value": lambda m: m.count + torch.tensor([1, 2, 3]),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_depends_on_values_is_not_recorded(
    library: NativeKernels, pool: Tensor, name: str
) -> None:
    machine = Machine(library)
    with pytest.raises(NotRecordable):
        record(lambda: ASKING[name](machine), library, pool)
    plain = library.packed_linear(machine.x, machine.weight, None)
    assert plain.isfinite().all(), "the library's functions run again"


def test_a_program_larger_than_the_pool_is_not_recorded(library: NativeKernels) -> None:
    machine = Machine(library)
    record(machine.program, library, torch.empty(1 << 16, dtype=torch.uint8))
    with pytest.raises(NotRecordable, match="pool"):
        record(machine.program, library, torch.empty(1 << 10, dtype=torch.uint8))
