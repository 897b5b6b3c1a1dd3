"""The line between rank 0 and each other rank: a socket that only who knows the key can use."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

LOOPBACK = "127.0.0.1"


def listen(host: str) -> socket.socket:
    """A socket that hears connections to this address only, at a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one."""
    with socket.create_connection((host, port), timeout=30) as there:
        return str(there.getsockname()[0])


def accept(listener: socket.socket, key: bytes, seconds: float) -> Connection | None:
    """The next line; None where nobody came, or somebody who does not know the key."""
    listener.settimeout(seconds)
    try:
        there, _ = listener.accept()
    except TimeoutError:
        return None
    line = _line(there)
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
    except (OSError, EOFError, ValueError, AssertionError, _refused()):
        line.close()
        return None
    return line


def connect(host: str, port: int, key: bytes) -> tuple[Connection, str]:
    """A line to who listens there, and this machine's address on it. Raises OSError."""
    there = socket.create_connection((host, port), timeout=30)
    own = str(there.getsockname()[0])
    line = _line(there)
    answer_challenge(line, key)
    deliver_challenge(line, key)
    return line, own


def _line(there: socket.socket) -> Connection:
    there.settimeout(None)
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(there.detach())


def _refused() -> type[Exception]:
    from multiprocessing import AuthenticationError

    return AuthenticationError
