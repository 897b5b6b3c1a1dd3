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
    tensor = torch.tensor(values, dtype=dtype)
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
