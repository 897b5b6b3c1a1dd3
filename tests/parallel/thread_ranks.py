"""Ranks as threads of one process: the same orders and layers, exchanged through memory."""

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spd.runtime.engine.assembly import assemble
from spd.runtime.ranks.communicator import ProcessGroup, Pulse, Ranks, open_ranks
from spd.runtime.ranks.follower import LOOPBACK, obey


class Meeting:
    """Where the threads of a group lay down their parts; each waits until all have."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def gather(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        whole = torch.stack(self.parts)
        self.barrier.wait()
        return whole


class ThreadCommunicator(ProcessGroup):
    """A group of threads."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        super().__init__(None, rank, size, Pulse())
        self.meeting = meeting

    def gather(self, part: Tensor) -> Tensor:
        return self.meeting.gather(self.rank, part.contiguous())

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.meeting.gather(self.rank, tensor.clone())[0])


class ThreadCrew:
    """Stands in for `Crew`: every other rank is a thread, and what they exchange goes through memory."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.pulse, self.broken = plan, Pulse(), False
        self.failures: list[BaseException] = []
        size, group = plan.shape.tp, plan.shape.draft_tp
        self._meetings = [Meeting(size)] + [Meeting(group) for _ in range(size // group)]
        self._share = Meeting(size)
        self._queues = [queue.SimpleQueue[bytes]() for _ in range(1, size)]
        self._threads: list[threading.Thread] = []

    def ranks(self, rank: int) -> Ranks:
        size, group = self.plan.shape.tp, self.plan.shape.draft_tp
        target = ThreadCommunicator(self._meetings[0], rank, size)
        if group == size:
            return Ranks(target, ThreadCommunicator(self._meetings[0], rank, size), None)
        number, place = divmod(rank, group)
        draft = ThreadCommunicator(self._meetings[1 + number], place, group) if group > 1 else None
        return Ranks(target, draft, ThreadCommunicator(self._share, rank, size))

    def open(self, usable_vocab: int) -> Ranks:
        for rank in range(1, self.plan.shape.tp):
            thread = threading.Thread(target=self._serve, args=(rank, usable_vocab), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.ranks(0)

    def _serve(self, rank: int, usable_vocab: int) -> None:
        try:
            ranks = self.ranks(rank)
            plan = pickle.loads(pickle.dumps(self.plan))  # a rank reads the folder itself
            own = assemble(plan, usable_vocab, None, ranks)
            orders = self._queues[rank - 1]
            obey(own, lambda: pickle.loads(orders.get()), Pulse())
        except BaseException as error:
            self.failures.append(error)
            for meeting in (*self._meetings, self._share):
                meeting.barrier.abort()

    def guard(self, act: Callable[[], Any], *, order: Any = (), waits: bool = False) -> Any:
        for orders in self._queues if order else ():
            orders.put(pickle.dumps(order))
        try:
            return act()
        except threading.BrokenBarrierError:
            raise self.failures[0] from None

    def close(self) -> None:
        if not self.broken:
            self.broken = True
            self.guard(lambda: None, order=("end",))
            for thread in self._threads:
                thread.join(30)


class GlooCrew(ThreadCrew):
    """Every other rank is a thread, and what they exchange goes through gloo, as between processes."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self._store = torch.distributed.HashStore()

    def ranks(self, rank: int) -> Ranks:
        return open_ranks(self._store, rank, self.plan, LOOPBACK, Pulse())
