"""Files that a user names: read up to a limit, written under a lock, or replaced by a rename."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from spd.errors import NotFoundError, UsageError

MAX_INPUT_BYTES = 64 * 2**20
"""Bytes of a prompt or another input."""
MAX_LINES_BYTES = 2**30
"""Bytes of a file of many lines."""
MAX_FILE_BYTES = 64_000_000
"""Bytes of a file next to a model's weights.

The largest published tokenizers have about 35 million.
"""


def read_input(name: Path | str, fix: str, limit: int = MAX_INPUT_BYTES) -> bytes:
    """Read all of a file, which may be a FIFO, or of stdin ("-").

    fix: that of the errors. Raises NotFoundError, and UsageError where it cannot be read or has
    more than `limit` bytes.
    """
    display_name = "stdin" if name == "-" else str(name)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(limit + 1) if sys.stdin is not None else b""
        else:
            with open(name, "rb") as file:
                data = file.read(limit + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no file {display_name}", fix=[fix]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {display_name}: {reason}", fix=[fix]) from None
    if len(data) > limit:
        message = f"{display_name} is larger than {limit >> 20} MiB"
        raise UsageError(message, fix=["cut it to what is needed"], code="too_large")
    return data


def read_input_text(name: Path | str, fix: str, limit: int = MAX_INPUT_BYTES) -> str:
    """Read all of a file or of stdin ("-") as UTF-8 text, without a byte order mark.

    Raises what `read_input` raises, and UsageError for other bytes.
    """
    data = read_input(name, fix, limit)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        name = "stdin" if name == "-" else name
        fix = "iconv -f ENCODING -t utf-8 FILE"
        raise UsageError(f"{name} is not UTF-8 text: {where}", fix=[fix]) from None


def open_output(path: Path, *, append: bool = False) -> int:
    """Open a file for writing, made if it is missing and emptied unless `append`.

    Returns its descriptor. A regular file is locked until that is closed. Raises OSError, and
    UsageError where another process has the lock.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0), 0o666)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = ["wait for it, or give another name"]
                raise UsageError(f"{path}: another process is writing it", fix=fix) from None
            except OSError:
                pass  # a file system without locks
            if not append:
                os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file through a temporary one beside it, and wait until the disk has it.

    The file is never incomplete. mode: the permissions of a new file. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            sync_file(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Flush a file, and return when its bytes have reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder have reached the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
