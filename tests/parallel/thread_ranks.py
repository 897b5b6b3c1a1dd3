"""Ranks as threads of one process: the same orders and layers."""

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from spd.runtime.engine.assembly import assemble_queue
from spd.runtime.ranks.communicator import Heartbeat, Ranks, open_ranks
from spd.runtime.ranks.follower import LOOPBACK


class ThreadLeader:
    """Stand in for `Leader`: every other rank is a thread; they exchange through gloo, as processes do."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.heartbeat = Heartbeat()
        self.is_broken = False
        self.failures: list[BaseException] = []
        # Documented, but imported by torch without a name of its own.
        self._store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self._queues = [queue.SimpleQueue[bytes]() for _ in range(1, plan.shape.tp)]
        self._threads: list[threading.Thread] = []

    def ranks(self, rank: int) -> Ranks:
        return open_ranks(
            store=self._store, rank=rank, plan=self.plan, host=LOOPBACK, heartbeat=Heartbeat()
        )

    def meet_ranks(self, usable_vocab: int) -> Ranks:
        for rank in range(1, self.plan.shape.tp):
            thread = threading.Thread(target=self._serve, args=(rank, usable_vocab), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.ranks(0)

    def _serve(self, rank: int, usable_vocab: int) -> None:
        try:
            ranks = self.ranks(rank)
            plan = pickle.loads(pickle.dumps(self.plan))  # a rank reads the folder itself
            round_queue = assemble_queue(plan, usable_vocab, None, ranks)
            while order := pickle.loads(self._queues[rank - 1].get()):
                getattr(round_queue, order[0])(*order[1])
        except BaseException as error:
            self.failures.append(error)

    def guard(self, act: Callable[[], Any], *, order: Any = (), waits: bool = False) -> Any:
        for orders in self._queues if order else ():
            orders.put(pickle.dumps(order))
        try:
            return act()
        except RuntimeError as error:
            raise (self.failures or [error])[0] from None

    def close(self) -> None:
        if not self.is_broken:
            self.is_broken = True
            for orders in self._queues:
                orders.put(pickle.dumps(None))
            for thread in self._threads:
                thread.join(30)
