"""Saved chats: one file each, written whole beside the old one and put in its place.

A file is a line of JSON about the chat, then one line a turn. An open chat holds its file's lock.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from spd.cli.chat.conversation import Conversation, Turn
from spd.cli.text.output import to_json
from spd.errors import IncompatibleError, NotFoundError, ResourceError, UsageError
from spd.formats.files import write_whole

SCHEMA = "spd.chat/1"
SUFFIX = ".jsonl"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class SessionStore:
    """The chats in one folder, which appears when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None

    def names(self) -> list[str]:
        """Every saved chat, the latest first."""
        found: list[tuple[float, str]] = []
        with suppress(OSError):
            for path in self.folder.glob("*" + SUFFIX):
                with suppress(OSError):
                    if _NAME.fullmatch(path.stem):
                        found.append((path.stat().st_mtime, path.stem))
        return [name for _, name in sorted(found, reverse=True)]

    def path(self, name: str) -> Path:
        """The path of a saved chat. Raises UsageError for an invalid name."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name[:60]!r} is not a name for a chat",
                reason=["Letters, digits, dot, dash and underscore; no dot or dash in front."],
                fix=["-c NAME"],
            )
        return self.folder / (name + SUFFIX)

    def load(self, name: str) -> Conversation:
        """Read a chat. Raises NotFoundError, or IncompatibleError naming file and line."""
        path = self.path(name)
        try:
            if path.exists() and not path.is_file():  # a FIFO would be waited for
                raise _unreadable(path, "it is not a file")
            lines = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            close = [f"there is: {other}" for other in self.names()[:5]]
            raise NotFoundError(
                f"no chat {name!r} is saved", reason=close, fix=["/load lists them"]
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, str(error)) from None
        return parse_session(lines, path)

    def first_words(self, name: str) -> str:
        """The first message of a chat; empty where there is none, or the file cannot be read."""
        with suppress(NotFoundError, IncompatibleError):
            return next((turn.user for turn in self.load(name).turns), "")
        return ""

    def save(self, name: str, conversation: Conversation) -> None:
        """Write a chat so that at any moment the old or the new file is whole. Raises ResourceError."""
        path = self.path(name)
        text = "".join(to_json(record) + "\n" for record in records(conversation))
        try:
            _make_folder(self.folder)
            write_whole(path, text, 0o600)
        except OSError as error:
            raise ResourceError(
                f"this chat cannot be saved to {path}: {error.strerror}",
                fix=["free some space"],
                code="write_failed",
            ) from error

    def open(self, name: str) -> None:
        """Take the lock of a chat and let go of the one held. Raises UsageError if another process has it."""
        lock = self._locked(name)
        if lock is None:
            raise UsageError(
                f"the chat {name!r} is open in another process",
                fix=["-c NAME for another one, or close the other spd chat"],
                code="session_locked",
            )
        self.close()
        self._lock = lock
        for spare in self.folder.glob(f".{name}{SUFFIX}.*.tmp"):  # of one that was killed while it saved
            with suppress(OSError):
                spare.unlink()

    def open_new(self) -> str:
        """Take the lock of a chat that does not exist yet: the time of day, and a number if need be."""
        base = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        for name in (base, *(f"{base}-{number}" for number in range(2, 1000))):
            if not self.path(name).exists():
                with suppress(UsageError):
                    self.open(name)
                    return name
        raise UsageError("a thousand chats were begun in this second", fix=["-c NAME"])

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _locked(self, name: str) -> IO[str] | None:
        """A file that holds the chat's lock; None if another process does."""
        import fcntl

        path = self.path(name).with_name(f".{name}.lock")
        if self._lock is not None and Path(self._lock.name) == path:
            held, self._lock = self._lock, None
            return held
        try:
            _make_folder(self.folder)
            lock = path.open("a", encoding="utf-8")
        except OSError:  # a folder that cannot be written to: saving will say so
            return open(os.devnull, encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock


def records(conversation: Conversation) -> list[dict[str, Any]]:
    """The lines of a session file as objects."""
    header = dataclasses.asdict(conversation)
    turns: Sequence[dict[str, Any]] = header.pop("turns")
    return [{"schema": SCHEMA, **header}, *turns]


def parse_session(lines: Sequence[str], path: Path) -> Conversation:
    """The lines of a session file as a conversation. Raises IncompatibleError naming file and line."""
    if not any(lines):
        raise _unreadable(path, "it is empty")
    header = _object(path, 1, lines[0])
    schema = header.pop("schema", None)
    if schema != SCHEMA:
        raise IncompatibleError(
            f"{path}: line 1: schema {schema!r} is not {SCHEMA!r}",
            reason=["It was written by another version of spd, or is no chat."],
            fix=[f"move {path.name} away"],
            code="session_schema",
        )
    turns = tuple(_turn(path, number, line) for number, line in enumerate(lines[1:], 2) if line.strip())
    known = {
        "model": (str,),
        "seed": (int,),
        "system": (str, type(None)),
        "vocabulary": (str, type(None)),
        "draws": (int,),
    }
    fields = _checked(path, 1, header, known)
    if not {"model", "seed"} <= set(fields):
        raise _unreadable(path, "line 1: model and seed are missing")
    if not (0 <= fields["seed"] < 2**63 and 0 <= fields.get("draws", 0) < 2**63):
        raise _unreadable(path, "line 1: seed or draws is out of range")
    return Conversation(**fields, turns=turns)


def _turn(path: Path, number: int, line: str) -> Turn:
    known = {
        "user": (str,),
        "reply": (str, type(None)),
        "reply_ids": (list,),
        "finish": (str, type(None)),
        "seed": (int, type(None)),
    }
    fields = _checked(path, number, _object(path, number, line), known)
    ids = fields.pop("reply_ids", [])
    if "user" not in fields or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise _unreadable(path, f"line {number}: is not a turn")
    return Turn(**fields, reply_ids=tuple(ids))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        loaded = json.loads(line)
    except (ValueError, RecursionError):
        raise _unreadable(path, f"line {number}: is not JSON") from None
    if not isinstance(loaded, dict):
        raise _unreadable(path, f"line {number}: is not an object")
    return loaded


def _checked(
    path: Path, number: int, found: dict[str, Any], known: dict[str, tuple[type, ...]]
) -> dict[str, Any]:
    """The known fields of an object, each of its type; others are ignored."""
    for name, kinds in known.items():
        if name in found and type(found[name]) not in kinds:
            raise _unreadable(path, f"line {number}: {name} has a wrong type")
    return {name: found[name] for name in known if name in found}


def _unreadable(path: Path, why: str) -> IncompatibleError:
    return IncompatibleError(
        f"{path}: {why}",
        fix=["edit the file or move it away; -c NAME begins another chat"],
        code="session_unreadable",
    )


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
