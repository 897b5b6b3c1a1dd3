"""What launches of the Triton kernels share: sizes, and whether one may begin before another has ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """What launch choices may follow; the defaults are a CPU's, whose interpreter takes any choice."""

    capability: tuple[int, int] = (0, 0)
    shared: int = (
        99 * 1024
    )  # bytes of shared memory that a program may use; the default is the least of all
    processors: int = 132


@cache
def device_properties(device: torch.device) -> Device:
    """Of the device that tensors lie on."""
    if device.type == "cpu":
        return Device()
    found = torch.cuda.get_device_properties(device)
    shared = getattr(
        found, "shared_memory_per_block_optin", Device.shared
    )  # not every build of torch tells
    return Device((found.major, found.minor), shared, found.multi_processor_count)


def ceil_div(amount: int, size: int) -> int:
    """How many pieces of `size` hold `amount`."""
    return -(-amount // size)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


@cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that may begin before the previous one has ended.

    Such a kernel has the constant PDL and waits, in every program, before it touches anything that
    another kernel reads or writes. Source: programmatic dependent launch, compute capability 9.0.
    """
    if device_properties(device).capability >= (9, 0):
        return {"PDL": 1, "launch_pdl": True}
    return {"PDL": 0}
