"""A large stack for libraries that recurse as deeply as their input is nested.

Such a library has no guard: on a default stack a chain of a thousand references would end the
process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

STACK_BYTES = 512 << 20
"""Size of the stack in address space; only pages that are touched become memory."""
_LOCK = threading.Lock()
Result = TypeVar("Result")


def on_large_stack(function: Callable[[], Result]) -> Result:
    """Call a function in a thread with a large stack; return its result, or raise its exception.

    Raises MemoryError where there is no room for such a stack.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="large stack", daemon=True)
    with _LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError("no room for a large stack") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
