"""Which ranks exchange what: all of them for the target, groups of some for the drafter."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spd import __version__
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.communicator import ProcessGroup, Pulse, c10d
from spd.runtime.ranks.rendezvous import MEETING_SECONDS, Rendezvous


@dataclass(frozen=True)
class Ranks:
    """One rank's groups. Each group of `draft.size` ranks runs the whole drafter."""

    target: ProcessGroup
    draft: ProcessGroup | None
    """None: this rank drafts alone."""
    share: ProcessGroup | None
    """Hands rank 0's drafts to the other groups; None where all ranks draft together."""


def open_store(place: str) -> Any:
    """Where ranks leave their addresses: a file that only rank 0's user can open, or torchrun's store."""
    if not place.startswith("/"):
        return Rendezvous.parse(place).open()
    store = c10d.FileStore(place)
    store.set_timeout(timedelta(seconds=MEETING_SECONDS))
    return store


def open_ranks(store: Any, rank: int, plan: EnginePlan, host: str, pulse: Pulse) -> Ranks:
    """Meet the other ranks of a plan. Raises RuntimeError where one does not come."""
    size, draft_size = plan.shape.tp, plan.shape.draft_tp
    number, place = divmod(rank, draft_size)
    draft, pulse.waiting = None, True
    try:
        everyone = _group(store, "target", rank, size, plan.device, host)
        if 1 < draft_size < size:
            group = _group(store, f"draft {number}", place, draft_size, plan.device, host)
            draft = ProcessGroup(group, place, draft_size, pulse)
    finally:
        pulse.waiting = False
    target, all_ranks = (ProcessGroup(everyone, rank, size, pulse) for _ in range(2))
    return Ranks(target, all_ranks, None) if draft_size == size else Ranks(target, draft, all_ranks)


def _group(store: Any, name: str, rank: int, size: int, device: str, host: str) -> Any:
    """gloo over the interface of one address; on CUDA NCCL, which finds its own ways."""
    own = c10d.PrefixStore(name, store)
    if device == "cpu":
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=MEETING_SECONDS)
        return c10d.ProcessGroupGloo(own, rank, size, options)
    return c10d.ProcessGroupNCCL(own, rank, size, c10d.ProcessGroupNCCL.Options())


def describe_rank(device: str) -> dict[str, str]:
    """What must be the same on every rank, or their bits may part ways."""
    found = {"spd": __version__, "torch": torch.__version__}
    if device == "cpu":
        name = platform.processor() or platform.machine()
        with suppress(OSError):
            said = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
            name = name if said is None else said[1].strip()
        return {**found, "device": f"{name}, {torch.backends.cpu.get_cpu_capability()}"}
    found["device"] = torch.cuda.get_device_name(device)
    if find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    return found
