"""Keys that are typed while a reply comes: Esc stops it, all others wait for the next message.

A key such as an arrow begins with Esc too, and a paste may hold one: only an Esc that nothing follows counts.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

ESCAPE = b"\x1b"
PASTE_BEGINS, PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
ALONE_SECONDS = 0.05
"""How long nothing may follow an Esc: what a key sends comes at once."""

PASTE_SECONDS = 0.5
"""How long the rest of a paste is waited for when the reply has ended in its middle."""


class KeyWatch:
    """Reads a terminal in a thread of its own from `start` to `stop`; `escape` is called in that thread."""

    def __init__(self, descriptor: int, escape: Callable[[], None]) -> None:
        self._descriptor, self._escape = descriptor, escape
        self._kept = b""
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._work, name="keys", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> bytes:
        """Stop listening; returns what was typed, without the Esc that stopped the reply."""
        os.write(self._waker, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)
        return self._kept

    def _work(self) -> None:
        with suppress(OSError, ValueError):  # a terminal that has gone types nothing
            while self._waits(None):
                data = os.read(self._descriptor, 4096)
                if not data:
                    return
                self._take(data)
            while self._pasting and select.select([self._descriptor], [], [], PASTE_SECONDS)[0]:
                self._kept += os.read(self._descriptor, 4096)

    @property
    def _pasting(self) -> bool:
        """Whether the end of a paste is still to come."""
        return self._kept.rfind(PASTE_BEGINS) > self._kept.rfind(PASTE_ENDS)

    def _take(self, data: bytes) -> None:
        if data == ESCAPE and not self._pasting and not self._waits(ALONE_SECONDS):
            self._escape()
        else:
            self._kept += data

    def _waits(self, seconds: float | None) -> bool:
        """Whether something has been typed within so long; False too when `stop` was called."""
        ready, _, _ = select.select([self._descriptor, self._wake], [], [], seconds)
        return self._descriptor in ready and self._wake not in ready
