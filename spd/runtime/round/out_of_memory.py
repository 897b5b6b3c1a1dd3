"""Memory that runs out on the device: told apart, and let go of."""

from __future__ import annotations

import errno
import traceback

import torch

WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""How libraries say it that have no exception of their own for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch, the driver or the system means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def release_memory(error: BaseException) -> None:
    """Free what an exception's frames hold, and give unused device memory back to the driver."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
