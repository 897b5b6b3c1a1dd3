"""What the Triton kernels share: how one is described for compilation ahead of time, and small sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
