"""The energy counter of an NVIDIA GPU, where its management library is there and counts. No torch here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
OK = 0


def energy_counter(index: int = 0, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float | None]:
    """A function that returns the joules a GPU has used since its driver was loaded; None if unknown.

    index: the device as the driver counts them. load: opens the library by name.
    """
    try:
        library = load(LIBRARY)
        device = ctypes.c_void_p()
        if library.nvmlInit_v2() != OK:
            return _unknown
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != OK:
            return _unknown
    except (OSError, AttributeError):
        return _unknown

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        status = library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
        return millijoules.value / 1000 if status == OK else None

    return joules if joules() is not None else _unknown


def _unknown() -> None:
    return None
