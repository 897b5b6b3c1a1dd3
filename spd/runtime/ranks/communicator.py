"""What ranks exchange inside a round: parts in, whole tensors out, the same bits on every rank.

One collective does all the sums: an all-gather of parts, added in rank order. Library sums choose another
order for another size, so a row's bits would depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d
from torch import Tensor

c10d: Any = torch._C._distributed_c10d
"""Its classes as they are, without a process-wide group."""

PATIENCE = timedelta(hours=1)
"""Of one exchange. A rank that is dead or hangs is found by other means, much sooner."""


class LostRank(Exception):
    """An exchange broke off: another rank is gone."""


@dataclass
class Pulse:
    """Signs of life that a rank gives: steps it has done, and whether it waits for the others now."""

    steps: int = 0
    waiting: bool = False

    def beat(self) -> None:
        """Something was done."""
        self.steps += 1


class ProcessGroup:
    """A group of ranks, seen from one of them. The group is gloo's on CPU, NCCL's on CUDA."""

    def __init__(self, group: Any, rank: int, size: int, pulse: Pulse) -> None:
        self.group, self.rank, self.size, self.pulse = group, rank, size, pulse

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks in rank order: [N, *part.shape], the same shape everywhere."""
        part = part.contiguous()
        whole = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        # As bytes: not every backend knows every dtype, and nothing is computed on the way.
        sent, received = (tensor.view(-1).view(torch.uint8) for tensor in (part, whole))
        options = c10d.AllgatherOptions()
        options.timeout = PATIENCE
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
        options.timeout = PATIENCE
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
