"""Token ids of earlier sessions in a private folder: a file for each tokenizer, of bounded size.

A file is int32 in little-endian order, with -1 behind each text, the oldest first. It is of use to
lookup alone: what is in it never changes a text.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path

from spd.errors import ResourceError, UsageError
from spd.formats.files import write_atomically

TEXTS_SUFFIX = ".texts"
"""The ending of names of files of texts."""
END_OF_TEXT = -1
"""The number behind a text."""
OTHERS_PERMISSIONS = stat.S_IRWXG | stat.S_IRWXO
"""Bits of a file's mode that let anyone but its owner use it."""


class PrivateTexts:
    """The file of one tokenizer in a folder that only its owner may read; texts are token ids.

    Makes the folder. Raises UsageError for a folder or file that others own or may read, and
    ResourceError for one that cannot be used.
    """

    def __init__(self, folder: Path, fingerprint: str, limit: int) -> None:
        """Make and check the folder. limit: token ids and ends that are kept, the latest ones."""
        self.path = folder / (fingerprint + TEXTS_SUFFIX)
        self.limit = limit
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder, os.stat(folder), 0o700)
        except OSError as error:
            raise _unusable_error(folder, error) from None

    def read_texts(self) -> list[list[int]]:
        """Read the latest `limit` numbers of the file and return their texts, the oldest first.

        The first text may lack its beginning. None where there is no file.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self.path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                _require_private(self.path, status, 0o600)
                file.seek(max(0, status.st_size - 4 * self.limit) & ~3)
                data = file.read(4 * self.limit)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unusable_error(self.path, error) from None
        numbers = array("i", data[: len(data) & ~3])
        if sys.byteorder == "big":
            numbers.byteswap()
        texts: list[list[int]] = [[]]
        for number in numbers:
            if number == END_OF_TEXT:
                texts.append([])
            else:
                texts[-1].append(number)
        return [text for text in texts if text]

    def append_text(self, text: list[int]) -> None:
        """Append a text to the file; drop the oldest once it is twice as long as it may be.

        Raises UsageError, and ResourceError where it cannot be written.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self.path, flags, 0o600), "ab", buffering=0) as file:
                _require_private(self.path, os.fstat(file.fileno()), 0o600)
                data = _texts_to_bytes([text])
                written = file.write(data)
                size = os.fstat(file.fileno()).st_size
                if written < len(data):  # The disk is full: a part would shift all later numbers.
                    os.ftruncate(file.fileno(), size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size > 8 * self.limit:
                write_atomically(self.path, _texts_to_bytes(self.read_texts()), 0o600)
        except OSError as error:
            raise _unusable_error(self.path, error) from None


def _texts_to_bytes(texts: Iterable[list[int]]) -> bytes:
    """Return the bytes that a file holds for texts."""
    numbers = array("i")
    for text in texts:
        numbers.extend(text)
        numbers.append(END_OF_TEXT)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def find_text_files(folder: Path) -> list[Path]:
    """Return the files of texts in a folder; none where it is no folder."""
    return sorted(folder.glob(f"*{TEXTS_SUFFIX}")) if folder.is_dir() else []


def _require_private(path: Path, status: os.stat_result, mode: int) -> None:
    """Raise UsageError unless a path is this user's, of the right kind, and closed to others.

    mode: 0o700 for a folder, else that of a file.
    """
    is_kind = stat.S_ISDIR(status.st_mode) if mode == 0o700 else stat.S_ISREG(status.st_mode)
    if not is_kind:
        kind = "folder" if mode == 0o700 else "file"
        raise UsageError(f"{path}: is no {kind} of texts", fix=["--lookup FOLDER elsewhere"])
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path}: belongs to another user", fix=["--lookup FOLDER of your own"])
    if status.st_mode & OTHERS_PERMISSIONS:
        raise UsageError(f"{path}: others may read it", fix=[f"chmod {mode:o} {path}"])


def _unusable_error(path: Path, error: OSError) -> ResourceError:
    """Return the error of a path that cannot be read or written."""
    return ResourceError(f"{path}: {error.strerror or error}", fix=["--lookup FOLDER elsewhere"])
