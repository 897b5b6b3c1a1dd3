"""What a figure depends on and a reader cannot see: the machine. No torch here."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from spd.kernels.native.build import processor_features

CPU_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm"}


def describe_machine() -> dict[str, Any]:
    """The CPU's model and relevant features, its cores, memory and system; the GPU where torch has one."""
    cpuinfo = Path("/proc/cpuinfo")
    said = re.search(r"^model name\s*:\s*(.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    described = {
        "cpu": said[1] if said else platform.processor(),
        "cpu_features": sorted(processor_features() & CPU_FEATURES),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        described |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": str(torch.version.cuda),
            "triton": getattr(sys.modules.get("triton"), "__version__", None),
        }
    return described
