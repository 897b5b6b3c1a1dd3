"""A rank other than rank 0: a process that makes the calls that rank 0 makes, in the same order.

It tells rank 0 how far it is, and ends where rank 0 has ended or hangs. The line between them is a socket
that only a holder of the key can use. Orders come on it, and empty messages as signs of life; what goes to
rank 0 are tuples: "hello" or "error" and the rank, or "beat".
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any

LOOPBACK = "127.0.0.1"
HANG_SECONDS = 15
BEAT_SECONDS = 0.5
NO_ANSWER = f"has not answered for {HANG_SECONDS} seconds"
EXIT_OTHER_RANK_ENDED = 75  # the exit status of a rank that ends because another one did
EXIT_LEADER_LOST = 76  # the exit status of a rank that has given up rank 0


class RankConnection(Connection):
    """One end of a line. Several threads may write to it."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._writing = threading.Lock()

    @classmethod
    def from_socket(cls, there: socket.socket) -> RankConnection:
        """A line on a duplicate of a socket, whose options are the line's."""
        there.settimeout(None)
        if there.family != socket.AF_UNIX:
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(there.dup().detach())

    def send_message(self, *message: Any) -> None:
        """Send a message. Raises OSError where the other end is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._writing:
            self.send_bytes(data)

    def send_heartbeat(self) -> None:
        """Let the other end know that this process runs, unless another thread is telling it something."""
        if self._writing.acquire(blocking=False):
            with suppress(OSError):  # what is gone is found by other means
                self.send_bytes(pickle.dumps(()))
            self._writing.release()


def authenticate(there: socket.socket, key: bytes, lines: list[RankConnection]) -> None:
    """Append the line to the rank at the other end, if that knows the key."""
    with there:
        line = RankConnection.from_socket(there)
        try:
            deliver_challenge(line, key)
            answer_challenge(line, key)
        except (OSError, EOFError, ValueError, AssertionError, AuthenticationError):
            line.close()
            return
    lines.append(line)


def connect(host: str, port: int, key: bytes) -> tuple[RankConnection, str]:
    """A line to the listener there, and this machine's address on it. Raises OSError, EOFError."""
    with socket.create_connection((host, port), timeout=30) as there:
        line = RankConnection.from_socket(there)
        answer_challenge(line, key)
        deliver_challenge(line, key)
        return line, str(there.getsockname()[0])


def follow(spec: dict[str, Any], leave: Callable[[int], None]) -> int:
    """Connect, load what rank 0's plan says, and follow until something fails; returns the exit status.

    `leave` ends the process at once, wherever it is.
    """
    import torch

    from spd.runtime.engine.assembly import assemble
    from spd.runtime.ranks.communicator import (
        Heartbeat,
        LostRank,
        describe_rank,
        open_ranks,
        open_store,
    )

    pulse = Heartbeat()
    rank = spec["rank"]
    orders = SimpleQueue[Any]()
    try:
        if spec["lines"]:
            line = RankConnection(spec["lines"][0])
            own_host = spec["host"]
        else:
            line, own_host = connect(spec["host"], spec["port"], bytes.fromhex(spec["key"]))
    except (OSError, EOFError):
        return EXIT_OTHER_RANK_ENDED
    try:
        if spec["device"] != "cpu":
            torch.cuda.set_device(torch.device(spec["device"]))
        line.send_message("hello", rank, describe_rank(spec["device"]))
        threading.Thread(
            target=receive_orders, args=(line, orders.put, pulse, leave), daemon=True
        ).start()
        plan, usable_vocab, place = orders.get()
        plan = replace(plan, device=spec["device"])
        ranks = open_ranks(open_store(place), rank, plan, own_host, pulse)
        queue = assemble(plan, usable_vocab, lambda _: pulse.beat(), ranks)
        while True:
            name, args = orders.get()
            pulse.beat()
            getattr(queue, name)(*args)
    except (LostRank, OSError):
        return EXIT_OTHER_RANK_ENDED
    except BaseException as error:
        line.send_message("error", rank, f"{type(error).__name__}: {error}", traceback.format_exc())
        return 1


def receive_orders(
    line: RankConnection, order: Callable[[Any], None], pulse: Any, leave: Callable[[int], None]
) -> None:
    """Pass on rank 0's orders, tell it how far this rank is, and end this process where it is gone."""
    parent = os.getppid()
    quiet = 0
    while os.getppid() == parent:
        quiet = quiet + 1
        until = time.monotonic() + BEAT_SECONDS
        try:
            while line.poll(max(0.0, until - time.monotonic())):
                quiet = 0
                if message := line.recv():
                    order(message)
            line.send_message("beat", pulse.steps, pulse.waiting)
        except (EOFError, OSError):
            break
        if quiet * BEAT_SECONDS >= HANG_SECONDS:
            leave(EXIT_LEADER_LOST)
    leave(EXIT_OTHER_RANK_ENDED)
