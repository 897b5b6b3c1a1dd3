"""Launch helpers of the Triton kernels: device limits, sizes, and programmatic dependent launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """The limits of a device that launch configs depend on.

    The defaults are for a CPU, whose interpreter takes any config.
    """

    capability: tuple[int, int] = (0, 0)
    shared: int = 99 * 1024
    """Bytes of shared memory that a program may use; the default is the least of all devices'."""
    processors: int = 132


@cache
def device_properties(device: torch.device) -> Device:
    """Return the limits of the device that tensors lie on."""
    if device.type == "cpu":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    # Not every build of torch has this property.
    shared = getattr(properties, "shared_memory_per_block_optin", Device.shared)
    return Device((properties.major, properties.minor), shared, properties.multi_processor_count)


def ceil_div(amount: int, size: int) -> int:
    """Return amount / size, rounded up."""
    return -(-amount // size)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


@cache
def pdl_options(device: torch.device) -> dict[str, int]:
    """Return the launch options of a kernel that may begin before the previous one has ended.

    Such a kernel has the constant PDL and waits, in every program, before its first access to what
    another kernel reads or writes. Source: programmatic dependent launch, compute capability 9.0.
    """
    if device_properties(device).capability >= (9, 0):
        return {"PDL": 1, "launch_pdl": True}
    return {"PDL": 0}
