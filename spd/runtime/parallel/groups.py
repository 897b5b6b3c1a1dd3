"""Which ranks exchange what: all of them for the target, groups of some for the drafter."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from spd import __version__
from spd.runtime.parallel.communicator import Communicator, Pulse, c10d

MEETING_SECONDS = 60
"""In which ranks that have said that they are there must have found each other."""


@dataclass(frozen=True)
class Ranks:
    """One rank's groups. Each group of `draft.size` ranks runs the whole drafter."""

    target: Communicator
    draft: Communicator | None
    """None: this rank drafts alone."""
    share: Communicator | None
    """Hands rank 0's drafts to the other groups; None where all ranks draft together."""

    @property
    def apart(self) -> bool:
        """Whether other ranks than the target's share the drafter."""
        return self.share is not None


def open_store(listener: socket.socket | None, host: str, port: int) -> Any:
    """Where ranks leave their addresses; on rank 0 behind a listening socket, which it takes over."""
    kept = {} if listener is None else {"master_listen_fd": listener.detach()}
    return c10d.TCPStore(
        host,
        port,
        None,
        listener is not None,
        timedelta(seconds=MEETING_SECONDS),
        wait_for_workers=False,
        **kept,
    )


def open_ranks(
    store: Any, rank: int, size: int, draft_size: int, device: str, host: str, pulse: Pulse
) -> Ranks:
    """Meet the other ranks. Raises RuntimeError where one does not come."""
    pulse.waiting = True
    try:
        return _open_groups(store, rank, size, draft_size, device, host, pulse)
    finally:
        pulse.waiting = False


def _open_groups(
    store: Any, rank: int, size: int, draft_size: int, device: str, host: str, pulse: Pulse
) -> Ranks:
    everyone = _group(store, "target", rank, size, device, host)
    target = Communicator(everyone, rank, size, pulse)
    if draft_size == size:
        return Ranks(target, Communicator(everyone, rank, size, pulse), None)
    draft = None
    if draft_size > 1:
        number, place = divmod(rank, draft_size)
        group = _group(store, f"draft {number}", place, draft_size, device, host)
        draft = Communicator(group, place, draft_size, pulse)
    return Ranks(target, draft, Communicator(everyone, rank, size, pulse))


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
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return {"spd": __version__, "torch": torch.__version__, "device": name}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
