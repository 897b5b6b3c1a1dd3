"""What a figure depends on and a reader cannot see: the machine. No torch here."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm")


def describe_machine() -> dict[str, Any]:
    """The CPU's model and relevant features, its cores, memory and system; the GPU where torch has one."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    meminfo = Path("/proc/meminfo")
    memory = int(meminfo.read_text().split()[1]) * 1024 if meminfo.exists() else None
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpu_features": [feature for feature in CPU_FEATURES if feature in flags],
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **_gpu(),
    }


def _gpu() -> dict[str, Any]:
    """Name, memory and driver-facing version of the current GPU, if torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "cuda": str(torch.version.cuda),
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
    }
