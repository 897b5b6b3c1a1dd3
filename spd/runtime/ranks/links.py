"""The line between rank 0 and each other rank: a socket that only a holder of the key can use."""

from __future__ import annotations

import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

LOOPBACK = "127.0.0.1"
GREETING_SECONDS = 5
"""For which a new connection may say nothing."""


def listen(host: str) -> socket.socket:
    """A socket that hears connections to this address only, at a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one."""
    with socket.create_connection((host, port), timeout=30) as there:
        return str(there.getsockname()[0])


def greet(there: socket.socket, key: bytes, lines: list[Connection]) -> None:
    """Append the line to the rank at the other end, if that knows the key."""
    with there:
        line = _line(there)
        try:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", GREETING_SECONDS, 0))
            deliver_challenge(line, key)
            answer_challenge(line, key)
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))  # for ever
        except (OSError, EOFError, ValueError, AssertionError, AuthenticationError):
            line.close()
            return
    lines.append(line)


def connect(host: str, port: int, key: bytes) -> tuple[Connection, str]:
    """A line to the listener there, and this machine's address on it. Raises OSError."""
    there = socket.create_connection((host, port), timeout=30)
    with there:
        own = str(there.getsockname()[0])
        line = _line(there)
        answer_challenge(line, key)
        deliver_challenge(line, key)
    return line, own


def _line(there: socket.socket) -> Connection:
    """A line on a duplicate of a socket, whose options are the line's."""
    there.settimeout(None)
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(there.dup().detach())
