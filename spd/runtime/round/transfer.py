"""Small values between host and device, without the host ever waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: str) -> Tensor:
    """The values as a tensor [n] on the device.

    On CUDA they pass through pinned memory of their own: the allocator hands it out again only once the
    copy has run, so that nothing can be written over values in flight.
    """
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(tensor: Tensor, device: str) -> Tensor:
    """A host tensor on the device, by way of pinned memory of its own; on CPU the tensor itself."""
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
