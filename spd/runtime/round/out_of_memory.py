"""Exhausted memory: recognising its errors, and releasing what they hold."""

from __future__ import annotations

import errno
import traceback

import torch

MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""Parts of the messages of libraries that have no exception class for exhausted memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception of Python, torch, the driver or the system means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(part in message for part in MESSAGES)


def release_memory(error: BaseException) -> None:
    """Free what an exception's frames hold, and give unused device memory back to the driver."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
