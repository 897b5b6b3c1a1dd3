"""The exchanges of ranks inside a round: parts in, full tensors out, the same bits on every rank.

One collective does all the sums: an all-gather of parts, added in rank order. Library sums choose
another order for another size, so a row's bits would depend on how many rows there are.
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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.c10d import Store, TorchGroup, c10d
from spd.runtime.ranks.rendezvous import RENDEZVOUS_SECONDS, connect_torchrun_store
from spd.version import __version__

if TYPE_CHECKING:
    from torch.distributed import Work

EXCHANGE_TIMEOUT = timedelta(hours=1)
"""The timeout of one exchange. A rank that is dead or hangs is found much sooner by other means."""


class LostRank(Exception):
    """An exchange broke off: another rank is gone."""


@dataclass
class Heartbeat:
    """Signs of life of one rank."""

    steps: int = 0
    """Steps that the rank has done."""

    is_waiting: bool = False
    """True while the rank waits for the others."""

    def beat(self) -> None:
        """Count a step of this rank."""
        self.steps += 1


class ProcessGroup:
    """The exchanges of a group of ranks, seen from one of them: by gloo on a CPU, NCCL on CUDA.

    Each blocks until its result is there, counts as a step, and raises LostRank where a rank is
    gone.
    """

    def __init__(self, group: TorchGroup, rank: int, size: int, heartbeat: Heartbeat) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.heartbeat = heartbeat

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all N ranks in rank order, [N, *part.shape]; shapes must be equal."""
        part = part.contiguous()
        gathered = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        # As bytes: not every backend knows every dtype, and an all-gather computes nothing.
        sent = part.view(-1).view(torch.uint8)
        received = gathered.view(-1).view(torch.uint8)
        options = c10d.AllgatherOptions()
        # On the round's own stream: NCCL's would be forked to and joined for every sum.
        options.asyncOp = False
        options.timeout = EXCHANGE_TIMEOUT
        self._run_exchange(lambda: self.group._allgather_base(received, sent, options))
        return gathered

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts in rank order, in float32 and then rounded once."""
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
        options.asyncOp = False
        options.timeout = EXCHANGE_TIMEOUT
        self._run_exchange(lambda: self.group.broadcast([sent.view(-1).view(torch.uint8)], options))
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

    def _run_exchange(self, start: Callable[[], Work | None]) -> None:
        """Start an exchange and wait for its end, or enqueue it on the current stream.

        Raises LostRank where it breaks off.
        """
        self.heartbeat.beat()
        self.heartbeat.is_waiting = True
        try:
            work = start()
            if work is not None:  # else it is on the current stream
                work.wait()
        except RuntimeError as error:
            raise LostRank(str(error)) from error
        self.heartbeat.is_waiting = False


@dataclass(frozen=True)
class Ranks:
    """One rank's groups for exchanges. Each group of `draft.size` ranks runs the full drafter."""

    target: ProcessGroup
    draft: ProcessGroup | None  # None: this rank drafts alone
    broadcast_group: ProcessGroup | None
    """All ranks, for handing rank 0's drafts to the others; None where all ranks draft together."""


def open_store(address: str) -> Store:
    """Open the store where ranks exchange their addresses, and return it.

    address: the path of a file that only rank 0's user can open, or a prefix in torchrun's store.
    """
    if not address.startswith("/"):
        prefix_store: Store = c10d.PrefixStore(address, connect_torchrun_store())
        return prefix_store
    store: Store = c10d.FileStore(address)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
    return store


def open_ranks(store: Store, rank: int, plan: EnginePlan, host: str, heartbeat: Heartbeat) -> Ranks:
    """Connect to the other ranks of a plan, which call this too, and return this rank's groups.

    host: this machine's address towards the others. Raises RuntimeError where one does not come.
    """
    size = plan.shape.tp
    draft_size = plan.shape.draft_tp
    draft_group, draft_rank = divmod(rank, draft_size)
    draft = None
    heartbeat.is_waiting = True
    try:
        target_group = _create_torch_group(
            store=store, name="target", rank=rank, size=size, device=plan.device, host=host
        )
        if 1 < draft_size < size:
            group = _create_torch_group(
                store=store,
                name=f"draft {draft_group}",
                rank=draft_rank,
                size=draft_size,
                device=plan.device,
                host=host,
            )
            draft = ProcessGroup(group, draft_rank, draft_size, heartbeat)
    finally:
        heartbeat.is_waiting = False
    target = ProcessGroup(target_group, rank, size, heartbeat)
    all_ranks = ProcessGroup(target_group, rank, size, heartbeat)
    if draft_size == size:
        return Ranks(target, draft=all_ranks, broadcast_group=None)
    return Ranks(target, draft, broadcast_group=all_ranks)


def _create_torch_group(
    store: Store, name: str, rank: int, size: int, device: str, host: str
) -> TorchGroup:
    """Connect the ranks of one group; return gloo's over the interface of `host`, on CUDA NCCL's.

    name: prefix of the group's keys in the store.
    """
    group_store = c10d.PrefixStore(name, store)
    if device == "cpu":
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
        gloo: TorchGroup = c10d.ProcessGroupGloo(group_store, rank, size, options)
        return gloo
    nccl_options = c10d.ProcessGroupNCCL.Options()
    nccl: TorchGroup = c10d.ProcessGroupNCCL(group_store, rank, size, nccl_options)
    return nccl


def describe_rank(device: str) -> dict[str, str]:
    """Return the versions and the processor that must be equal on every rank, or bits may
    differ.
    """
    versions = {name: version(name) for name in ("torch", "triton") if find_spec(name) is not None}
    if device != "cpu":
        return {"spd": __version__, **versions, "device": torch.cuda.get_device_name(device)}
    match = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = platform.machine() if match is None else match[1].strip()
    return {
        "spd": __version__,
        **versions,
        "device": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
    }
