"""Which ranks exchange what inside a round: parts in, whole tensors out, the same bits on every rank.

One collective does all the sums: an all-gather of parts, added in rank order. Library sums choose another
order for another size, so a row's bits would depend on how many rows there are.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.c10d import c10d
from spd.runtime.ranks.rendezvous import RENDEZVOUS_SECONDS, connect_store
from spd.version import __version__

EXCHANGE_TIMEOUT = timedelta(hours=1)
"""Of one exchange. A rank that is dead or hangs is found by other means, much sooner."""


class LostRank(Exception):
    """An exchange broke off: another rank is gone."""


@dataclass
class Heartbeat:
    """Signs of life that a rank gives: steps it has done, and whether it waits for the others now."""

    steps: int = 0
    waiting: bool = False

    def beat(self) -> None:
        """Something was done."""
        self.steps += 1


class ProcessGroup:
    """A group of ranks, seen from one of them. The group is gloo's on CPU, NCCL's on CUDA."""

    def __init__(self, group: Any, rank: int, size: int, pulse: Heartbeat) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.pulse = pulse

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks in rank order: [N, *part.shape], the same shape everywhere."""
        part = part.contiguous()
        whole = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        # As bytes: not every backend knows every dtype, and nothing is computed on the way.
        sent, received = (tensor.view(-1).view(torch.uint8) for tensor in (part, whole))
        options = c10d.AllgatherOptions()
        options.timeout = EXCHANGE_TIMEOUT
        self._wait(lambda: self.group._allgather_base(received, sent, options))
        return whole

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts in rank order, in float32 and rounded once to their dtype."""
        parts = self.gather(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's, in place."""
        sent = tensor.contiguous()
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = EXCHANGE_TIMEOUT
        self._wait(lambda: self.group.broadcast([sent.view(-1).view(torch.uint8)], options))
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def _wait(self, start: Callable[[], Any]) -> None:
        self.pulse.beat()
        self.pulse.waiting = True
        try:
            start().wait()
        except RuntimeError as error:
            raise LostRank(str(error)) from error
        self.pulse.waiting = False


@dataclass(frozen=True)
class Ranks:
    """One rank's groups. Each group of `draft.size` ranks runs the whole drafter."""

    target: ProcessGroup
    draft: ProcessGroup | None  # None: this rank drafts alone
    broadcast_group: ProcessGroup | None
    """Hands rank 0's drafts to the other groups; None where all ranks draft together."""


def open_store(place: str) -> Any:
    """Where ranks leave their addresses: a file that only rank 0's user can open, or a part of torchrun's."""
    if not place.startswith("/"):
        return c10d.PrefixStore(place, connect_store())
    store = c10d.FileStore(place)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
    return store


def open_ranks(store: Any, rank: int, plan: EnginePlan, host: str, pulse: Heartbeat) -> Ranks:
    """Meet the other ranks of a plan. Raises RuntimeError where one does not come."""
    size = plan.shape.tp
    draft_size = plan.shape.draft_tp
    number, place = divmod(rank, draft_size)
    draft = None
    pulse.waiting = True
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
        options._timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
        return c10d.ProcessGroupGloo(own, rank, size, options)
    return c10d.ProcessGroupNCCL(own, rank, size, c10d.ProcessGroupNCCL.Options())


def describe_rank(device: str) -> dict[str, str]:
    """What must be the same on every rank, or their bits may part ways."""
    found = {name: version(name) for name in ("torch", "triton") if find_spec(name) is not None}
    if device != "cpu":
        return {"spd": __version__, **found, "device": torch.cuda.get_device_name(device)}
    said = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = platform.machine() if said is None else said[1].strip()
    return {
        "spd": __version__,
        **found,
        "device": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
    }
