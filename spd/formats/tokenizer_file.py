"""`tokenizer.json` loaded under guard: bounded size, bounded time, and the library's panics as errors.

The file is untrusted: its merges may make the library panic, its regular expressions may never end.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import tokenizers

from spd.errors import CheckpointError, SpdError
from spd.formats.json_file import names_in, one_line, read_bytes

FILE_NAME = "tokenizer.json"
FILE_LIMIT = 200_000_000  # bytes; the largest published ones have about 35 million
PROBE_SECONDS = 3.0
# Runs of one kind of character ended by another: what makes a careless pattern backtrack.
_PROBES = tuple(
    unit * 192 + end for unit in ("a", "A", " ", "1", "\n", "é", "中", "a ", "!") for end in ("", "?", "x")
)
# Descriptor 2 belongs to the whole process: one thread at a time may borrow it.
_STDERR_LOCK = threading.Lock()

Result = TypeVar("Result")


class LibraryPanic(Exception):
    """The tokenizer library gave up where it did not expect to."""


class EncodingTimeout(Exception):
    """A call into the tokenizer library did not come back in time."""


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer, without truncation or padding, probed with texts that expose bad patterns.

    Raises `CheckpointError` naming the file.
    """
    names = names_in(folder)
    path = folder / FILE_NAME
    if FILE_NAME not in names:
        for other in ("tokenizer.model", "tekken.json", "vocab.json"):
            if other in names:
                raise CheckpointError(
                    f"{folder / other}: this tokenizer format is not supported, {FILE_NAME} is"
                )
        raise CheckpointError(f"{path}: is missing")
    data = read_bytes(path, FILE_LIMIT)
    with _quiet_library():
        tokenizer = _checked(str(path), partial(tokenizers.Tokenizer.from_buffer, data))
        # Truncation would cut prompts in silence, padding would lengthen them.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _checked(f"{path}: pre_tokenizer", lambda: within(PROBE_SECONDS, lambda: _probe(tokenizer)))
        _checked(f"{path}: post_processor", partial(tokenizer.encode, "a"))
    if getattr(tokenizer.model, "dropout", None):
        raise CheckpointError(f"{path}: model: dropout: makes encoding random, null is expected")
    return tokenizer


def _checked(where: str, call: Callable[[], Result]) -> Result:
    try:
        return converting_panics(call)
    except EncodingTimeout:
        raise CheckpointError(f"{where}: needs more than {PROBE_SECONDS:g} s for a short text") from None
    except Exception as error:
        message = one_line(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise CheckpointError(f"{where}: {message}") from None


def _probe(tokenizer: tokenizers.Tokenizer) -> bool:
    for probe in _PROBES:
        try:
            converting_panics(partial(tokenizer.encode_batch_fast, [probe], add_special_tokens=False))
        except LibraryPanic:
            raise
        except Exception:  # a character outside the vocabulary is no fault of the file
            continue
    return True


def converting_panics(call: Callable[[], Result]) -> Result:
    """What `call` returns; a panic of the library, which is no `Exception`, becomes a `LibraryPanic`."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises, or `EncodingTimeout`: then its thread is left behind.

    Only of use for calls that release the interpreter lock (`encode_batch_fast` does, `encode` does not).
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(converting_panics(call))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise EncodingTimeout
    return results[0]


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Keep the library from writing a panic's stack to the terminal: it becomes one line of ours instead.

    The library writes to descriptor 2 itself, so that is where it is caught; what else arrives there
    meanwhile is passed on afterwards unless there was an error.
    """
    with _STDERR_LOCK, tempfile.TemporaryFile() as caught:
        try:
            saved = os.dup(2)
        except OSError:  # there is no standard error
            yield
            return
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except SpdError:
            caught.truncate(0)
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            while chunk := caught.read(65536):
                os.write(2, chunk)
