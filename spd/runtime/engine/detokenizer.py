"""Token ids to text as it grows: whole characters only, stop strings found across tokens and rounds.

No torch here.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that could be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


class Detokenizer:
    """Turns tokens into text for one request.

    `bytes_of` gives the exact bytes of some tokens (none for special ones). Bytes that are not UTF-8
    become U+FFFD once it is sure that no continuation follows.
    """

    __slots__ = ("_bytes_of", "_count", "_ignored", "_min_tokens", "_pending", "_rest", "_stops", "stopped")

    def __init__(
        self, bytes_of: Callable[[Sequence[int]], bytes], stops: Sequence[str], min_tokens: int
    ) -> None:
        self._bytes_of, self._stops, self._min_tokens = bytes_of, tuple(stops), min_tokens
        self._rest = b""
        """The beginning of a character, whose other bytes are to come."""
        self._pending = ""
        self._ignored = 0
        """Leading characters of `_pending` that came within the first min_tokens tokens."""
        self._count = 0
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Take one token; True when it completes a stop string, whose text is then cut away."""
        self._count += 1
        self._pending += self.pass_on((token_id,))
        if self._count <= self._min_tokens:
            self._ignored = len(self._pending)
        return self._look_for_stop()

    def pass_on(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Take several tokens and hand out the whole characters that there are: with `final` all.

        Enough where no text ends the request.
        """
        data = self._rest + self._bytes_of(token_ids)
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text

    def _look_for_stop(self) -> bool:
        if self._count <= self._min_tokens:
            return False
        # A stop counts when it is completed after the minimum, however tokens fall into rounds.
        starts = ((stop, max(0, self._ignored - len(stop) + 1)) for stop in self._stops)
        found = [at for stop, start in starts if (at := self._pending.find(stop, start)) >= 0]
        if found:
            self._pending = self._pending[: min(found)]
            self.stopped = True
        return self.stopped

    def take(self, *, final: bool = False) -> str:
        """Text that no later token can change; everything that is left when `final`."""
        if final and not self.stopped:
            self._pending += self.pass_on((), final=True)
            self._look_for_stop()
        end = len(self._pending) - (0 if final else _held_back(self._pending, self._stops))
        text, self._pending = self._pending[:end], self._pending[end:]
        self._ignored = max(0, self._ignored - len(text))
        return text
