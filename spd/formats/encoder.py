"""Encoding by the `tokenizers` library, which nothing interrupts, in a thread to abandon."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

import tokenizers

from spd.errors import CheckpointError

SHORT_TEXT = 32
"""Characters of a text that no pattern takes long for."""
BASE_SECONDS = 10.0
SECONDS_PER_CHARACTER = 5e-5
"""The time limit of a text: seconds of a processor, and seconds for each character."""

Encode = Callable[[str, bool], list[int]]
"""A function from a text, and True if it may contain special tokens, to ids."""
_Texts = queue.SimpleQueue[tuple[str, bool] | None]
_Results = queue.SimpleQueue[list[int] | BaseException]


class Encoder:
    """Encodes in a separate thread.

    The patterns of a tokenizer may take hours for a page of text.
    """

    def __init__(self, encode: Encode, where: str) -> None:
        self._encode = encode
        self._where = where
        self._texts: _Texts = queue.SimpleQueue()
        self._results: _Results = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0  # the process of the thread: a forked child has no thread
        self._is_stuck = False

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text; wait for the thread unless the text is short.

        Raises CheckpointError after the time limit, for every later text too, and what `encode`
        raises.
        """
        if len(text) <= SHORT_TEXT:
            return self._encode(text, parse_special)
        if self._is_stuck:
            raise self._timeout_error()
        if self._thread is None or self._process != os.getpid():
            self._start_thread()
        thread = self._thread
        assert thread is not None and thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        limit = time.clock_gettime(clock) + BASE_SECONDS + len(text) * SECONDS_PER_CHARACTER
        self._texts.put((text, parse_special))
        self._is_stuck = True  # until there is a result, also after an interrupt
        while True:
            try:
                result = self._results.get(timeout=1)
                break
            except queue.Empty:
                if time.clock_gettime(clock) > limit:
                    raise self._timeout_error() from None
            except BaseException:  # an interrupt: the result would be taken for another text's
                self._thread = None
                self._is_stuck = False
                raise
        self._is_stuck = False
        if isinstance(result, BaseException):
            raise result
        return result

    def _start_thread(self) -> None:
        """Start a thread with queues of its own, which ends with this object."""
        self._texts = queue.SimpleQueue()
        self._results = queue.SimpleQueue()
        self._process = os.getpid()
        arguments = (self._encode, self._texts, self._results)
        self._thread = threading.Thread(target=_encode_texts, args=arguments, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._texts.put, None)  # ends the thread with this object

    def _timeout_error(self) -> CheckpointError:
        """Return the error for a text beyond the time limit."""
        reason = "its patterns take too long for this text"
        return CheckpointError(f"{self._where}: pre_tokenizer or normalizer: {reason}")


def encode_ids(library: tokenizers.Tokenizer, text: str, parse_special: bool) -> list[int]:
    """Return the ids of a text, without those that a post-processor adds."""
    library.encode_special_tokens = not parse_special
    # This is the only encoding call that releases the interpreter lock.
    encoded = library.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded[0].ids
    return ids


def _encode_texts(encode: Encode, texts: _Texts, results: _Results) -> None:
    """Encode texts from a queue until None arrives; put ids or the exception into another."""
    while (text := texts.get()) is not None:
        try:
            results.put(encode(*text))
        except BaseException as error:  # a panic is no `Exception`
            results.put(error)
