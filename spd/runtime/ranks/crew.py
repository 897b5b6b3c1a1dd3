"""Rank 0 and the ranks that follow it: started, told what to do, watched, and ended together."""

from __future__ import annotations

import json
import os
import pickle
import resource
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from spd.errors import EngineError, IncompatibleError, ResourceError, UsageError
from spd.formats.chat_template import isolated
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.communicator import LostRank, Pulse
from spd.runtime.ranks.groups import Ranks, describe_rank, open_ranks, open_store
from spd.runtime.ranks.links import LOOPBACK, address_towards, greet, listen
from spd.runtime.ranks.rendezvous import Rendezvous
from spd.runtime.ranks.watch import HANG_TICKS, TICK, Watch, end_words, failure, give_signs

START_SECONDS = 120
"""In which a rank must have imported torch and said that it is there."""
LAST_SECONDS = 3
"""For which ranks are waited for at the end before they are killed."""
PROGRAM = "from spd.cli.rank import main; main()"
"""What another rank runs; the command line owns processes."""

Result = TypeVar("Result")


def check_open_files(tp: int) -> None:
    """Refuse at once what would end in the middle of the start, or hang. Raises ResourceError."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = len(os.listdir("/proc/self/fd")) + 16 + 12 * tp  # the most that was seen, and some more
    if 0 <= limit < needed:
        raise ResourceError(
            f"--tp {tp} needs {needed} open files; the limit is {limit}", fix=["ulimit -n 1024"]
        )


def start_rank(spec: dict[str, Any], descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """A rank's process on this machine, without a terminal; it ends when its input does.

    It is handed descriptors, and holds standard error under another number, for what no other process is
    left to say.
    """
    told = os.dup(2)
    try:
        process = subprocess.Popen(
            isolated(PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(told, *descriptors),
        )
    finally:
        os.close(told)
    assert process.stdin is not None
    process.stdin.write(json.dumps({**spec, "stderr": told, "lines": descriptors}).encode() + b"\n")
    process.stdin.flush()  # and left open: its end says that this process has ended
    return process


class Crew:
    """The ranks of one engine, seen from rank 0.

    Raises EngineError where one does not come or fails, naming it; the others are then ended.
    """

    def __init__(self, plan: EnginePlan, meeting: Rendezvous | None = None) -> None:
        self.plan, self.pulse = plan, Pulse()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._coming: list[Connection] = []
        self._lines: dict[int, Connection] = {}
        self._signs: dict[int, Connection] = {}
        self._number = 0
        self.broken = False
        """Whether an order broke off, so that it is not known where the other ranks are."""
        self._host = LOOPBACK if meeting is None else address_towards(meeting.host, meeting.port)
        self._place, self._kind = "", "cpu" if plan.device == "cpu" else "cuda"
        check_open_files(plan.shape.tp)
        try:
            if meeting is None:
                self._spawn()
            else:
                self._call(meeting)
        except BaseException:
            self._end()
            raise
        self._watch = Watch(self._lines, self._signs, self._processes, self.pulse, self._end)

    # -- the start -------------------------------------------------------------------------------

    def _spawn(self) -> None:
        """Start the other ranks on this machine, each with the far ends of two lines and a file to meet in.

        That file is never closed: torch's store looks into it once more when it is freed.
        """
        memory = os.memfd_create("spd-ranks")
        self._place = f"/proc/self/fd/{memory}"
        for rank in range(1, self.plan.shape.tp):
            device = "cpu" if self.plan.device == "cpu" else f"cuda:{rank}"
            (line, far), (signs, far_signs) = Pipe(), Pipe()
            self._coming += [line, signs]
            with far, far_signs:
                told = {"host": self._host, "rank": rank, "device": device, "leader": os.getpid()}
                self._processes[rank] = start_rank(told, (far.fileno(), far_signs.fileno(), memory))
        self._gather([], b"")

    def _call(self, meeting: Rendezvous) -> None:
        """Say to ranks that are there already where to come."""
        if (tp := self.plan.shape.tp) > meeting.world:
            raise UsageError(
                f"--tp {tp}, but torchrun started {meeting.world} ranks",
                fix=[f"--tp {meeting.world}", f"torchrun with {tp} processes in all"],
            )
        key = secrets.token_bytes(32)
        self._place = str(replace(meeting, attempt=f"{meeting.attempt}/{key.hex()}"))
        with listen(self._host) as listener:
            told = {"host": self._host, "port": listener.getsockname()[1], "key": key.hex()}
            meeting.announce(meeting.open(), {**told, "tp": tp, "device": self._kind})
            self._gather([listener], key)

    def _gather(self, listeners: Sequence[socket.socket], key: bytes) -> None:
        """Wait until all have said that they are there, and that they are of one kind."""
        own, until = describe_rank(self.plan.device), time.monotonic() + START_SECONDS
        others = range(1, self.plan.shape.tp)
        while missing := [n for n in others if n not in self._lines or n not in self._signs]:
            give_signs(self._signs.values())
            for rank in missing:
                if rank in self._processes and (status := self._processes[rank].poll()) is not None:
                    raise EngineError(f"rank {rank}: {end_words(status)} before it had begun")
            if time.monotonic() > until:
                raise EngineError(
                    f"rank {missing[0]}: did not come within {START_SECONDS} seconds",
                    reason=[f"{others.stop - len(missing)} of {others.stop} ranks are there"],
                )
            for ready in wait([*self._coming, *listeners], TICK):
                if isinstance(ready, Connection):
                    self._coming.remove(ready)
                    self._greet(ready, own)
                else:  # a stranger may say nothing for long: no rank waits for it
                    there = listeners[0].accept()[0]
                    threading.Thread(target=greet, args=(there, key, self._coming), daemon=True).start()

    def _greet(self, line: Connection, own: dict[str, str]) -> None:
        """Take in what has come: a rank's line, or its line for signs of life."""
        try:
            kind, rank, *told = line.recv()
        except (EOFError, OSError):  # it has ended: so its process will say
            line.close()
            return
        if kind == "signs":
            self._signs[rank] = line
            return
        self._lines[rank] = line
        if kind == "error":
            raise failure(rank, *told)
        for name, value in told[0].items():
            if value != own[name]:
                raise IncompatibleError(
                    f"rank {rank} has another {name} than rank 0, so that their bits may differ",
                    reason=[f"rank 0: {own[name]}", f"rank {rank}: {value}"],
                    code="tensor_parallel",
                )

    def open(self, usable_vocab: int) -> Ranks:
        """Let every rank load its part, and meet them; the own part is loaded by the caller."""

        def meet() -> Ranks:
            plan, store = self.plan, open_store(self._place)
            for line in self._lines.values():
                line.send((replace(plan, device=self._kind), usable_vocab, self._place))
            return open_ranks(store, 0, plan, self._host, self.pulse)

        return self.guard(meet)

    # -- orders ----------------------------------------------------------------------------------

    def lead(self, name: str, args: Sequence[Any], act: Callable[[], Result]) -> Result:
        """Do something on every rank: tell the others, then act. Nothing is done once the crew is broken."""
        if self.broken:
            raise self._verdict("an earlier order broke off")

        def ordered() -> Result:
            self._send(name, args)
            return act()

        return self.guard(ordered)

    def guard(self, act: Callable[[], Result]) -> Result:
        """Act; whatever breaks off breaks the crew. Raises EngineError naming a rank that has failed."""
        try:
            self.pulse.beat()
            return act()
        except (LostRank, OSError, RuntimeError) as error:
            self.broken = True
            own = not isinstance(error, (LostRank, OSError))
            if own and not self._watch.failed.wait(4 * TICK):  # no other rank's is known in a moment
                self.kill()
                raise
            raise self._verdict(str(error)) from None
        except BaseException:
            self.broken = True
            self.kill()
            raise

    def check(self) -> None:
        """Raise what has become known of the other ranks."""
        if self._watch.failure is not None:
            self.broken = True
            raise self._verdict("")

    def _verdict(self, words: str) -> EngineError:
        """The error that says which rank failed, and how."""
        self._watch.failed.wait(TICK * (HANG_TICKS + 8))
        self.kill()
        lost = EngineError("the ranks lost each other", reason=[words] if words else [])
        return self._watch.failure or lost

    def _send(self, name: str, args: Sequence[Any]) -> None:
        message = pickle.dumps((self._number, name, tuple(args)), protocol=pickle.HIGHEST_PROTOCOL)
        self._number += 1
        for line in self._lines.values():
            line.send_bytes(message)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the other ranks: by asking, where they still listen."""
        self._watch.close()
        if not self.broken:
            self.broken = True
            with suppress(OSError):
                self._send("end", ())
            until = time.monotonic() + LAST_SECONDS
            for process in self._processes.values():
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
        self.kill()

    def kill(self) -> None:
        """End the other ranks at once, whatever becomes known of them."""
        self._watch.close()
        self._end()

    def _end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for line in (*self._coming, *self._lines.values(), *self._signs.values()):
            with suppress(OSError):
                line.close()
