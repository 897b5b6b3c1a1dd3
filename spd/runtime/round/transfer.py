"""Transfers of small values from the host to the device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: str) -> Tensor:
    """Return values as a tensor [n] on the device.

    On CUDA they are copied from pinned memory. The allocator reuses that memory only once the copy
    has run, so nothing is written over values in flight.
    """
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(tensor: Tensor, device: str) -> Tensor:
    """Return a host tensor's copy on the device, by way of pinned memory; on a CPU the tensor
    itself.

    The copy is enqueued, not awaited.
    """
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
