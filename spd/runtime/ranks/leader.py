"""Rank 0 and the ranks that follow it: started, given orders, monitored, and ended together."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from spd.errors import EngineError, IncompatibleError, UsageError
from spd.formats.chat_template import isolated_command
from spd.runtime.engine.assembly import assemble_queue
from spd.runtime.load.progress import LoadProgress, Progress
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.communicator import (
    Heartbeat,
    LostRank,
    Ranks,
    describe_rank,
    open_ranks,
    open_store,
)
from spd.runtime.ranks.follower import LOOPBACK, RankConnection, authenticate
from spd.runtime.ranks.rendezvous import RankSpec, announce_engine, connect_torchrun_store
from spd.runtime.ranks.watch import HANG_TICKS, TICK_SECONDS, RankMonitor, exit_text, rank_error
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.prompt_scores import PromptScores
from spd.runtime.round.round_queue import PendingRound, SlotAdmission
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingSteps

START_SECONDS = 120
"""Seconds in which a rank must have imported torch and sent its first message."""
RANK_PROGRAM = "from spd.cli.rank import main; main()"
"""The program of another rank, which the command line owns as it owns all processes."""

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def start_rank_process(spec: RankSpec, descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a rank's process on this machine, without a terminal; it ends when its input does.

    The process inherits `descriptors`, and standard error under another number, for errors that no
    other process is left to print.
    """
    with open(os.dup(2), "wb") as stderr_copy:
        process = subprocess.Popen(
            isolated_command(RANK_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(stderr_copy.fileno(), *descriptors),
        )
        spec = {**spec, "stderr": stderr_copy.fileno(), "lines": list(descriptors)}
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec).encode() + b"\n")
    process.stdin.flush()  # and stays open: it closes when this process ends
    return process


class Leader:
    """The ranks of one engine, seen from rank 0: starts the others, sends orders, and ends them.

    Raises EngineError where one does not come or fails, naming it; the others are then ended.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.heartbeat = Heartbeat()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pending: list[RankConnection] = []
        self._connections: dict[int, RankConnection] = {}
        self.is_broken = False  # True once an order broke off, or the others were ended
        self._host = LOOPBACK
        self._store_address = ""
        try:
            if plan.config.rendezvous is None:
                self._start_processes()
            else:
                self._announce_to_torchrun(plan.config.rendezvous)
        except BaseException:
            self._stop_ranks()
            raise
        self._monitor = RankMonitor(
            self._connections, self._processes, self.heartbeat, self._stop_ranks
        )

    # -- the start -------------------------------------------------------------------------------

    def _start_processes(self) -> None:
        """Start the other ranks on this machine, and wait until all have reported.

        Each gets a connection, and the file where all meet. That file is never closed: torch's
        store looks into it once more when it is freed.
        """
        memory = os.memfd_create("spd-ranks")
        self._store_address = f"/proc/self/fd/{memory}"
        for rank in range(1, self.plan.shape.tp):
            device = "cpu" if self.plan.device == "cpu" else f"cuda:{rank}"
            near, far = socket.socketpair()
            with near, far:
                self._pending.append(RankConnection.from_socket(near))
                spec: RankSpec = {
                    "host": self._host,
                    "rank": rank,
                    "device": device,
                    "leader": os.getpid(),
                }
                self._processes[rank] = start_rank_process(spec, (far.fileno(), memory))
        self._wait_for_ranks([], b"")

    def _announce_to_torchrun(self, started: int) -> None:
        """Tell the ranks that torchrun has started where this engine listens, and wait for them.

        started: how many ranks there are. Raises UsageError where they are too few.
        """
        if (tp := self.plan.shape.tp) > started:
            fix = [f"--tp {started}", f"torchrun with {tp} processes in all"]
            raise UsageError(f"--tp {tp}, but torchrun started {started} ranks", fix=fix)
        key = secrets.token_bytes(32)
        store = connect_torchrun_store()
        self._store_address = key.hex()
        self._store = store  # where no agent of torchrun has a store, it ends with this one
        master: Any = store
        while hasattr(master, "underlying_store"):
            master = master.underlying_store
        with socket.create_connection((master.host, master.port), timeout=30) as probe:
            self._host = str(probe.getsockname()[0])  # the interface towards the other ranks
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family, backlog=128) as listener:
            address: RankSpec = {
                "host": self._host,
                "port": listener.getsockname()[1],
                "key": key.hex(),
                "tp": tp,
                "device": self.plan.device,
            }
            announce_engine(store, address)
            self._wait_for_ranks([listener], key)

    def _wait_for_ranks(self, listeners: Sequence[socket.socket], key: bytes) -> None:
        """Wait until all other ranks have reported, and have the versions and processor of this
        one.

        listeners: sockets on which ranks connect that know the key; empty where they are connected.
        """
        description = describe_rank(self.plan.device)
        deadline = time.monotonic() + START_SECONDS
        other_ranks = range(1, self.plan.shape.tp)
        while missing := [rank for rank in other_ranks if rank not in self._connections]:
            for connected in self._connections.values():
                connected.send_heartbeat()
            for rank in missing:
                if rank in self._processes and (status := self._processes[rank].poll()) is not None:
                    raise EngineError(f"rank {rank}: {exit_text(status)} before it had begun")
            if time.monotonic() > deadline:
                raise EngineError(f"rank {missing[0]}: did not come within {START_SECONDS} seconds")
            for ready in wait([*self._pending, *listeners], TICK_SECONDS):
                if isinstance(ready, RankConnection):
                    self._pending.remove(ready)
                    self._admit_rank(ready, description)
                else:  # in a thread: a stranger that sends nothing must not delay the ranks
                    connection = listeners[0].accept()[0]
                    threading.Thread(
                        target=authenticate, args=(connection, key, self._pending), daemon=True
                    ).start()

    def _admit_rank(self, connection: RankConnection, description: dict[str, str]) -> None:
        """Receive a rank's first message and register its connection.

        Raises EngineError where the rank has failed, IncompatibleError where it differs from
        `description`.
        """
        try:
            kind, rank, *payload = connection.recv()
        except (EOFError, OSError):  # it has ended, as its process's status will show
            connection.close()
            return
        self._connections[rank] = connection
        if kind == "error":
            message, details = payload
            raise rank_error(rank, message, details)
        for name, value in payload[0].items():
            if value != description[name]:
                message = (
                    f"rank {rank} has another {name} than rank 0, so that their bits may differ"
                )
                reason = [f"rank 0: {description[name]}", f"rank {rank}: {value}"]
                raise IncompatibleError(message, reason=reason, code="tensor_parallel")

    def meet_ranks(self, usable_vocab: int) -> Ranks:
        """Send the plan to the other ranks, which load their parts, and connect this rank to them.

        The caller loads this rank's part. Returns this rank's groups.
        """
        return self.guard(
            lambda: open_ranks(
                store=open_store(self._store_address),
                rank=0,
                plan=self.plan,
                host=self._host,
                heartbeat=self.heartbeat,
            ),
            order=(self.plan, usable_vocab, self._store_address),
        )

    # -- orders ----------------------------------------------------------------------------------

    def guard(
        self, act: Callable[[], Result], *, order: tuple[object, ...] = (), waits: bool = False
    ) -> Result:
        """Send an order to the other ranks, if any, then act here and return what `act` returns.

        Whatever breaks off ends the other ranks. waits: True if `act` waits for them. Raises
        EngineError naming a rank that has failed.
        """
        if self.is_broken:
            raise self._monitor.failure or EngineError(
                "the ranks have ended: an earlier order broke off"
            )
        try:
            self.heartbeat.beat()
            self.heartbeat.is_waiting = waits
            if order:
                self._send_to_all(order)
            return act()
        except BaseException as error:
            self.is_broken = True  # how far the other ranks are is not known
            is_connection_lost = isinstance(error, (LostRank, OSError))
            # The news of another rank's failure comes a moment later.
            if is_connection_lost or (
                isinstance(error, RuntimeError) and self._monitor.failed.wait(4 * TICK_SECONDS)
            ):
                raise self._end_ranks_and_find_error(str(error)) from None
            self.close()
            raise
        finally:
            self.heartbeat.is_waiting = False

    def _end_ranks_and_find_error(self, message: str) -> EngineError:
        """Wait for the monitor's finding, end the other ranks, and return the error of the one that
        failed.
        """
        self._monitor.failed.wait(TICK_SECONDS * (HANG_TICKS + 8))
        self.close()
        return self._monitor.failure or EngineError("the ranks lost each other", reason=[message])

    def _send_to_all(self, message: tuple[object, ...]) -> None:
        """Send a message to all other ranks."""
        for connection in self._connections.values():
            connection.send_message(message)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the other ranks at once: they hold nothing that must be saved."""
        self.is_broken = True
        self._monitor.close()
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        """Kill the processes that this rank has started, and close all connections."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for line in (*self._pending, *self._connections.values()):
            with suppress(OSError):
                line.close()


class LeadingQueue:
    """The `RoundQueue` of rank 0: each call is sent to the other ranks before it is made here."""

    def __init__(self, queue: LocalRoundQueue, leader: Leader) -> None:
        self.queue = queue
        self.leader = leader
        self._stop_ranks = weakref.finalize(self, leader.close)

    @property
    def runner(self) -> ModelRunner:
        return self.queue.runner

    @property
    def sampler(self) -> Sampler:
        return self.queue.sampler

    @property
    def captured(self) -> CapturedRounds | None:
        return self.queue.captured

    @property
    def is_writing(self) -> bool:
        return self.queue.is_writing

    def order(
        self,
        method: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Order every rank to call a method of its local queue; return this rank's result."""
        assert not kwargs, "orders carry positional arguments only"
        return self.leader.guard(lambda: method(*args, **kwargs), order=(method.__name__, args))

    def _order_if_running(
        self,
        method: Callable[Arguments, None],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Order every rank to call a method that only cleans up, unless the ranks have ended."""
        if not self.leader.is_broken:
            self.order(method, *args, **kwargs)

    def admit(self, admission: SlotAdmission) -> None:
        self.order(self.queue.admit, admission)

    def upload_pages(self, slot: int, pages: list[int]) -> None:
        self.order(self.queue.upload_pages, slot, pages)

    def set_masks(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        self.order(self.queue.set_masks, slot, rows, drafts, legal)

    def resume(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        self.order(self.queue.resume, slot, stop_ids)

    def set_active(self, slot: int, active: bool) -> None:
        self.order(self.queue.set_active, slot, active)

    def retire(self, slot: int, pages: list[int], end: int, place: int | None) -> None:
        self._order_if_running(self.queue.retire, slot, pages, end, place)

    def zero_pages(self, pages: list[int]) -> None:
        self._order_if_running(self.queue.zero_pages, pages)

    def remember_text(self, ids: list[int]) -> None:
        self._order_if_running(self.queue.remember_text, ids)

    def queue_prompt_part(
        self,
        slot: int,
        pages: list[int],
        start: int,
        end: int,
        chunked: bool,
        num_likeliest: int | None = None,
    ) -> None:
        self.order(self.queue.queue_prompt_part, slot, pages, start, end, chunked, num_likeliest)

    def queue_snapshot(self, place: int, slot: int, pages: list[int], end: int) -> None:
        self.order(self.queue.queue_snapshot, place, slot, pages, end)

    def flush(self) -> None:
        self.order(self.queue.flush)

    def take_prompt_scores(self, slot: int) -> PromptScores:
        return self.order(self.queue.take_prompt_scores, slot)

    def launch(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
        chained: int = 0,
    ) -> PendingRound:
        """Launch a round on every rank, and return this rank's pending round."""
        ticket = self.order(self.queue.launch, k, views, needs, num_logprobs, next_k, chained)
        fetch = ticket.fetch
        # On a GPU a rank that hangs is noticed where the round's result is fetched.
        return ticket._replace(fetch=lambda: self.leader.guard(fetch, waits=True))

    def capture(self, shape: RoundShape) -> bool:
        return self.order(self.queue.capture, shape)

    def drop_enqueued(self) -> None:
        self._order_if_running(self.queue.drop_enqueued)

    def close(self) -> None:
        """End the other ranks."""
        self._stop_ranks()


def start_ranks(plan: EnginePlan, usable_vocab: int, progress: Progress | None) -> LeadingQueue:
    """Start the other ranks of a plan, or meet those of torchrun, load this rank's part, and return
    the queue of rounds over all of them.

    progress: called while this rank loads. Raises EngineError where a rank fails.
    """
    leader = Leader(plan)

    def report_progress(news: LoadProgress) -> None:
        leader.heartbeat.beat()
        if progress is not None:
            progress(news)

    try:
        ranks = leader.meet_ranks(usable_vocab)
        return LeadingQueue(
            leader.guard(lambda: assemble_queue(plan, usable_vocab, report_progress, ranks)), leader
        )
    except BaseException:
        leader.close()
        raise
