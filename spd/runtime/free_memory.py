"""How much memory can be had now. Imports torch only to ask a device."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes of main memory that can be had; beyond all bounds where nobody can say."""
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 2**62
    return available


def free_memory(device: str) -> int:
    """Bytes that can be had on a device."""
    if device == "cpu":
        return available_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds and does not use is handed out before anything new.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
