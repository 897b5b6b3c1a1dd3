"""A rank other than rank 0: a process that makes the calls that rank 0 makes, in the same order."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from spd.runtime.ranks.links import connect
from spd.runtime.ranks.watch import COLLATERAL, Line, keep_beating


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
        beating = (line, signs, pulse, spec.get("leader"), leave)
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
