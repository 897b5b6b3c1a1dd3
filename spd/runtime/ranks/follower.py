"""A rank other than rank 0: a process that makes the calls that rank 0 makes, in the same order.

It tells rank 0 how far it is, and ends where rank 0 has ended or hangs.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from spd.runtime.ranks.links import connect

HANG_SECONDS = 15
BEAT_SECONDS = 0.5
SILENCE = f"has not answered for {HANG_SECONDS} seconds"
COLLATERAL = 75
"""The exit status of a rank that ends because another one did."""
LEADERLESS = 76
"""The exit status of a rank that has given up rank 0."""


class Line:
    """The line to rank 0, which two threads write to."""

    def __init__(self, connection: Any) -> None:
        self.connection, self._lock = connection, threading.Lock()

    def send(self, *message: Any) -> None:
        """Say something to rank 0. Raises OSError where it is gone."""
        with self._lock:
            self.connection.send(message)


def serve(spec: dict[str, Any], leave: Callable[[int], None]) -> int:
    """Connect, load what rank 0's plan says, and follow; returns the exit status.

    `leave` ends the process at once, wherever it is.
    """
    import torch

    from spd.runtime.ranks.communicator import LostRank, Pulse
    from spd.runtime.ranks.groups import describe_rank

    pulse, rank = Pulse(), spec["rank"]
    try:
        connection, signs, own_host = _lines(spec)
        line = Line(connection)
    except (OSError, EOFError):
        return COLLATERAL
    try:
        if spec["device"] != "cpu":
            torch.cuda.set_device(torch.device(spec["device"]))
        line.send("hello", rank, describe_rank(spec["device"]))
        signs.send(("signs", rank))
        beating = (line, signs, pulse, leave)
        threading.Thread(target=keep_beating, args=beating, daemon=True).start()
        _follow(line, spec, own_host, pulse)
    except (LostRank, EOFError, OSError):
        return COLLATERAL
    except BaseException as error:
        line.send("error", rank, f"{type(error).__name__}: {error}", traceback.format_exc())
        return 1
    return 0


def _lines(spec: dict[str, Any]) -> tuple[Connection, Connection, str]:
    """The line to rank 0, the one for signs of life, and this machine's address. Raises OSError, EOFError."""
    if spec["lines"]:
        return Connection(spec["lines"][0]), Connection(spec["lines"][1]), spec["host"]
    place = spec["host"], spec["port"], bytes.fromhex(spec["key"])
    return connect(*place)[0], *connect(*place)


def _follow(line: Line, spec: dict[str, Any], own_host: str, pulse: Any) -> None:
    """Load what rank 0 asks for, then obey it until it ends."""
    from spd.runtime.engine.assembly import assemble
    from spd.runtime.ranks.groups import open_ranks, open_store

    (plan, usable_vocab, place) = line.connection.recv()
    plan = replace(plan, device=spec["device"])
    ranks = open_ranks(open_store(place), spec["rank"], plan, own_host, pulse)
    queue = assemble(plan, usable_vocab, lambda _: pulse.beat(), ranks)
    obey(queue, line.connection.recv, pulse)


def obey(queue: Any, receive: Callable[[], Any], pulse: Any) -> None:
    """Carry out numbered orders on a round queue until the one that ends."""
    expected = 0
    while True:
        number, name, args = receive()
        if number != expected:
            raise RuntimeError(f"order {number} came instead of order {expected}")
        expected += 1
        pulse.beat()
        if name == "end":
            return
        getattr(queue, name)(*args)


def keep_beating(line: Line, signs: Connection, pulse: Any, leave: Callable[[int], None]) -> None:
    """Tell rank 0 how far this rank is, and listen to its own signs of life; `leave` ends this process."""
    stop, parent, quiet = threading.Event(), os.getppid(), 0.0
    while not stop.wait(BEAT_SECONDS):
        quiet += BEAT_SECONDS
        try:
            while signs.poll():
                signs.recv_bytes()
                quiet = 0.0
            line.send("beat", pulse.steps, pulse.waiting)
        except (EOFError, OSError):
            leave(COLLATERAL)
        if os.getppid() != parent:
            leave(COLLATERAL)
        if quiet >= HANG_SECONDS:
            leave(LEADERLESS)
