"""The device of a run, as a plan sees it. Imports torch only to query a device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.errors import ResourceError
from spd.kernels.native.build import processor_features

NVML_LIBRARY = "libnvidia-ml.so.1"
"""NVIDIA's management library."""
NVML_SUCCESS = 0
"""The status of a call of that library that succeeded."""
FAST_BFLOAT16_FEATURES = {"amx_tile", "avx512_bf16"}
"""Features of processors on which torch multiplies bfloat16 quickly."""


@dataclass(frozen=True)
class Machine:
    """One device of a machine: its name for torch, its free memory, and its capability."""

    device: str
    free_bytes: int
    capability: tuple[int, int] = (0, 0)
    """CUDA's; (0, 0) without one, or where the driver does not say."""
    is_foreseen: bool = False
    """True: a plan for it compiles nothing, since this process does not run there, or not yet."""

    @property
    def on_cpu(self) -> bool:
        """True if the device is the CPU."""
        return self.device == "cpu"

    @property
    def has_fast_bfloat16(self) -> bool:
        """True if torch multiplies bfloat16 quickly: by AMX or AVX512-BF16 on a CPU."""
        return not self.on_cpu or bool(processor_features() & FAST_BFLOAT16_FEATURES)

    def count_sharing_ranks(self, ranks: int) -> int:
        """Return how many of `ranks` share this device's memory and cores.

        All do on a CPU; else one, for each rank has a GPU of its own.
        """
        return ranks if self.on_cpu else 1


def find_machine(requested: str) -> Machine:
    """Return the machine for a value of `--device`, with the memory that is free now.

    Imports torch to query the device. Raises ResourceError for a device that is absent.
    """
    import torch

    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return Machine("cpu", free_memory_bytes("cpu"))
    if not torch.cuda.is_available():
        raise ResourceError(
            f"--device {requested}, but torch sees no CUDA device", fix=["--device cpu"]
        )
    device = "cuda" if requested == "auto" else requested
    if device != "cuda" and int(device[5:]) >= torch.cuda.device_count():
        raise ResourceError(
            f"--device {requested}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    return Machine(device, free_memory_bytes(device), torch.cuda.get_device_capability(device))


def machine_from_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Machine:
    """Return the first GPU that the driver lists, else the CPU; imports no torch.

    load: opens the driver's library.
    """
    device = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    major = ctypes.c_int()
    minor = ctypes.c_int()
    with suppress(OSError, AttributeError):
        library = load(NVML_LIBRARY)
        status = (
            library.nvmlInit_v2()
            or library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device))
            or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        )
        if status == NVML_SUCCESS:
            library.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            return Machine("cuda", memory[1], (major.value, minor.value), is_foreseen=True)
    return Machine("cpu", free_memory_bytes("cpu"), is_foreseen=True)


def free_memory_bytes(device: str) -> int:
    """Return the bytes that are free on a device, or that torch holds unused; 2**62 if not
    known.
    """
    if device == "cpu":
        meminfo = Path("/proc/meminfo")  # on Linux
        match = re.search(
            r"MemAvailable: *(\d+) kB", meminfo.read_text() if meminfo.exists() else ""
        )
        return int(match[1]) * 1024 if match else 2**62
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    # Torch hands out what it has reserved and does not use before it takes more.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
