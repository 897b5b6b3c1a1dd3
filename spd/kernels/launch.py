"""What the Triton kernels share: how one is described for compilation ahead of time, and small sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

NEVER, AFTER_PRODUCTS, AT_ONCE = 0, 1, 2
OVERLAP = AFTER_PRODUCTS
"""When a dense product lets the next kernel begin, on devices that can.

At once hides more of a kernel's beginning behind the end of the one before, but takes its room: the GPU suite
times both.
"""


@dataclass(frozen=True)
class Signature:
    """One compilation of a kernel: argument types, constants and launch options.

    types maps every argument that is not constant to Triton's name of it ("*bf16", "i32", "fp32");
    `unspecialized` names arguments whose divisibility by 16 must not be assumed.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    unspecialized: tuple[str, ...] = ()
    hot: bool = True
    """Whether it runs in every round, so that a spill would be paid for every token."""


def ceil_div(amount: int, size: int) -> int:
    """How many pieces of `size` hold `amount`."""
    return -(-amount // size)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that may begin before the previous one has ended.

    Such a kernel has the constant PDL and waits, in every program, before it touches anything that
    another kernel reads or writes. Source: programmatic dependent launch, compute capability 9.0.
    """
    if OVERLAP and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": OVERLAP, "launch_pdl": True}
    return {"PDL": NEVER}
