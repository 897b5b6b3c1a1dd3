"""Where a run would go and what it may take there, told without torch: for looking before loading."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spd.formats.model_config import ModelConfig
from spd.runtime.free_memory import available_memory
from spd.runtime.kernel_choice import native_obstacle
from spd.runtime.measuring.energy import LIBRARY, OK
from spd.runtime.measuring.machine import describe_machine
from spd.runtime.models import family_layout

FAST_BFLOAT16 = {"amx_tile", "avx512_bf16"}


class _MemoryInfo(ctypes.Structure):
    """`nvmlMemory_t`: bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@dataclass(frozen=True)
class Foreseen:
    """The device that `auto` comes to, and its free bytes."""

    device: str
    free: int
    fast_bfloat16: bool
    capability: tuple[int, int] = (0, 0)
    """The CUDA compute capability."""

    @property
    def on_cpu(self) -> bool:
        """Whether no GPU takes part."""
        return self.device == "cpu"

    def kernels(self, config: ModelConfig, quantize: str) -> str:
        """What `--kernels auto` comes to for a checkpoint, if a compiler that is there works."""
        if not self.on_cpu:
            return "triton"
        layers = family_layout(config).layers
        return "torch" if native_obstacle(self.device, self.dtype(config), quantize, layers) else "native"

    def dtype(self, config: ModelConfig) -> str:
        """What `--dtype auto` comes to for a checkpoint."""
        if not self.on_cpu:
            return config.dtype
        return "bfloat16" if config.dtype != "float32" and self.fast_bfloat16 else "float32"


def foresee(load: Callable[[str], Any] = ctypes.CDLL) -> Foreseen:
    """The first GPU that the driver tells of, else the CPU. load: opens the driver's library by name."""
    free = _free_on_gpu(load)
    if free is not None:
        return Foreseen("cuda", free, True, _capability(load))
    features = set(describe_machine()["cpu_features"])
    return Foreseen("cpu", available_memory(), bool(features & FAST_BFLOAT16))


def _capability(load: Callable[[str], Any]) -> tuple[int, int]:
    """Of the first GPU, as its driver says; (0, 0) where it does not."""
    try:
        library = load(LIBRARY)
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        status = library.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(0), ctypes.byref(device)
        ) or library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        return (major.value, minor.value) if status == OK else (0, 0)
    except (OSError, AttributeError):
        return (0, 0)


def _free_on_gpu(load: Callable[[str], Any]) -> int | None:
    """Bytes free on the first GPU, as its driver says; None without one."""
    try:
        library = load(LIBRARY)
        device, memory = ctypes.c_void_p(), _MemoryInfo()
        status = (
            library.nvmlInit_v2()
            or library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device))
            or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        )
        return int(memory.free) if status == OK else None
    except (OSError, AttributeError):
        return None
