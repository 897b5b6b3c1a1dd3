"""A rank other than rank 0: a process that makes the calls that rank 0 makes, in the same order.

It reports its steps to rank 0, and ends where rank 0 has ended or hangs. The connection is a socket
that only a holder of the key can use. Orders arrive on it, and empty messages as heartbeats;
messages to rank 0 are tuples: "hello" or "error" and the rank, or "beat".
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.runtime.ranks.communicator import Heartbeat
    from spd.runtime.ranks.rendezvous import RankSpec

LOOPBACK = "127.0.0.1"
HANG_SECONDS = 15
"""Seconds without a sign of life after which a rank is given up."""
BEAT_SECONDS = 0.5
"""Seconds between two heartbeats to rank 0."""
NO_ANSWER_TEXT = f"has not answered for {HANG_SECONDS} seconds"
EXIT_OTHER_RANK_ENDED = 75
"""The exit status of a rank that ends because another one did."""
EXIT_LEADER_LOST = 76
"""The exit status of a rank that has given up rank 0."""


class RankConnection(Connection):
    """One end of a connection between ranks, for pickled messages. Several threads may write to
    it.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._writing = threading.Lock()

    @classmethod
    def from_socket(cls, endpoint: socket.socket) -> RankConnection:
        """Return a connection on a duplicate of a socket, whose options it takes."""
        endpoint.settimeout(None)
        if endpoint.family != socket.AF_UNIX:
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(endpoint.dup().detach())

    def send_message(self, message: tuple[object, ...]) -> None:
        """Pickle a message and send it. Raises OSError where the other end is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._writing:
            self.send_bytes(data)

    def send_heartbeat(self) -> None:
        """Send a heartbeat, an empty message, unless another thread is sending a message."""
        if self._writing.acquire(blocking=False):
            with suppress(OSError):  # a lost connection is noticed by its reader
                self.send_bytes(pickle.dumps(()))
            self._writing.release()


def authenticate(endpoint: socket.socket, key: bytes, connections: list[RankConnection]) -> None:
    """Append to `connections` one to the rank at the other end of a socket, if that knows the key.

    Closes the socket, of which the connection has a duplicate.
    """
    with endpoint:
        connection = RankConnection.from_socket(endpoint)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (OSError, EOFError, ValueError, AssertionError, AuthenticationError):
            connection.close()
            return
    connections.append(connection)


def connect_to_leader(host: str, port: int, key: bytes) -> tuple[RankConnection, str]:
    """Connect to where rank 0 listens, prove to know the key, and return the connection and this
    machine's address on it.

    Raises OSError, EOFError, and AuthenticationError for another key.
    """
    with socket.create_connection((host, port), timeout=30) as endpoint:
        connection = RankConnection.from_socket(endpoint)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        return connection, str(endpoint.getsockname()[0])


def follow_leader(spec: RankSpec, leave: Callable[[int], None]) -> int:
    """Run a rank: connect to rank 0, load this rank's part, and obey orders until something fails.

    Returns the exit status. leave: ends the process at once with a status, wherever it is.
    """
    import torch

    from spd.runtime.engine.assembly import assemble_queue
    from spd.runtime.ranks.communicator import (
        Heartbeat,
        LostRank,
        describe_rank,
        open_ranks,
        open_store,
    )

    heartbeat = Heartbeat()
    rank = spec["rank"]
    orders = SimpleQueue[Any]()
    try:
        if spec["lines"]:
            connection = RankConnection(spec["lines"][0])
            local_host = spec["host"]
        else:
            connection, local_host = connect_to_leader(
                spec["host"], spec["port"], bytes.fromhex(spec["key"])
            )
    except (OSError, EOFError, AuthenticationError):
        return EXIT_OTHER_RANK_ENDED
    try:
        if spec["device"] != "cpu":
            torch.cuda.set_device(torch.device(spec["device"]))
        connection.send_message(("hello", rank, describe_rank(spec["device"])))
        threading.Thread(
            target=receive_orders, args=(connection, orders.put, heartbeat, leave), daemon=True
        ).start()
        plan, usable_vocab, store_address = orders.get()
        plan = replace(plan, device=spec["device"])
        ranks = open_ranks(
            store=open_store(store_address),
            rank=rank,
            plan=plan,
            host=local_host,
            heartbeat=heartbeat,
        )
        queue = assemble_queue(plan, usable_vocab, lambda _: heartbeat.beat(), ranks)
        while True:
            name, args = orders.get()
            heartbeat.beat()
            getattr(queue, name)(*args)
    except (LostRank, OSError):
        return EXIT_OTHER_RANK_ENDED
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        connection.send_message(("error", rank, message, traceback.format_exc()))
        return 1


def receive_orders(
    connection: RankConnection,
    put_order: Callable[[tuple[object, ...]], None],
    heartbeat: Heartbeat,
    leave: Callable[[int], None],
) -> None:
    """Pass on rank 0's orders and send it heartbeats, until it is gone; then end this process.

    put_order: queues an order. leave: ends the process at once with a status. Runs in a thread.
    """
    parent = os.getppid()
    silent_beats = 0
    while os.getppid() == parent:
        silent_beats += 1
        deadline = time.monotonic() + BEAT_SECONDS
        try:
            while connection.poll(max(0.0, deadline - time.monotonic())):
                silent_beats = 0
                if message := connection.recv():
                    put_order(message)
            connection.send_message(("beat", heartbeat.steps, heartbeat.is_waiting))
        except (EOFError, OSError):
            break
        if silent_beats * BEAT_SECONDS >= HANG_SECONDS:
            leave(EXIT_LEADER_LOST)
    leave(EXIT_OTHER_RANK_ENDED)
