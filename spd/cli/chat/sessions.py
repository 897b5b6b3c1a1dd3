"""Saved chats: one file each, written whole beside the old one and put in its place.

A file is a line of JSON about the chat, then one line a turn. An open chat holds a lock beside its file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from spd.cli.chat.conversation import Conversation, Turn
from spd.cli.text.output import to_json
from spd.cli.text.prompt import check_messages
from spd.errors import IncompatibleError, NotFoundError, ResourceError, UsageError
from spd.formats.files import open_output, write_whole

SCHEMA = "spd.chat/1"
SUFFIX = ".jsonl"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_HEADER: Mapping[str, Any] = {
    "schema": str,
    "model": str,
    "seed": int,
    "system": str | None,
    "vocabulary": str | None,
    "draws": int,
}
_TURN = {"user": str, "reply": str | None, "reply_ids": list, "finish": str | None, "seed": int | None}
_TURN |= {"answered": list}
"""Fields of a file's lines. Others are ignored: a later version may add some."""


class SessionStore:
    """The chats in one folder, which appears when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: tuple[str, int] | None = None
        """The chat whose lock is held, and its descriptor."""

    def names(self) -> list[str]:
        """Every saved chat, the latest first."""
        found = [path for path in self.folder.glob("*" + SUFFIX) if _NAME.fullmatch(path.stem)]
        return [path.stem for path in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)]

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
        path, number = self.path(name), 1
        turns: list[Turn] = []
        try:
            if path.exists() and not path.is_file():  # a FIFO would be waited for
                raise OSError("it is not a file")
            first, *others = path.read_text(encoding="utf-8").split("\n")
            header = _fields(first, _HEADER)
            if (schema := header.pop("schema", None)) != SCHEMA:
                raise ValueError(f"schema {schema!r} is not {SCHEMA!r}: of another version of spd?")
            for line in others:
                number += 1
                if line:
                    turn = _fields(line, _TURN)
                    ids = turn["reply_ids"] = tuple(turn.get("reply_ids", ()))
                    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
                        raise ValueError("reply_ids are not token ids")
                    if answered := turn.get("answered"):
                        check_messages([json.loads(message) for message in answered], "answered")
                    turns.append(Turn(**{**turn, "answered": tuple(answered or ())}))
            return Conversation(**header, turns=tuple(turns))
        except FileNotFoundError:
            close = [f"there is: {other}" for other in self.names()[:5]]
            raise NotFoundError(
                f"no chat {name!r} is saved", reason=close, fix=["/load lists them"]
            ) from None
        except (OSError, ValueError, TypeError, RecursionError, UsageError) as error:
            raise IncompatibleError(
                f"{path}: line {number}: {error}",
                fix=["edit the file or move it away; -c NAME begins another chat"],
                code="session_unreadable",
            ) from None

    def save(self, name: str, conversation: Conversation) -> None:
        """Write a chat so that at any moment the old or the new file is whole. Raises ResourceError."""
        path, header = self.path(name), dataclasses.asdict(conversation)
        turns = header.pop("turns")
        try:
            self._make_folder()
            lines = [{"schema": SCHEMA, **header}, *turns]
            write_whole(path, "".join(to_json(line) + "\n" for line in lines), 0o600)
        except OSError as error:
            raise ResourceError(
                f"this chat cannot be saved to {path}: {error.strerror}",
                fix=["free some space"],
                code="write_failed",
            ) from error

    def open(self, name: str) -> None:
        """Take the lock of a chat and let go of the one held. Raises UsageError if another process has it."""
        path = self.path(name)
        if self._open is not None and self._open[0] == name:
            return
        lock = None
        try:
            self._make_folder()
            lock = (name, open_output(path.with_name(f".{name}.lock"), append=True))
        except OSError:
            pass  # saving will say so
        except UsageError:
            raise UsageError(
                f"the chat {name!r} is open in another process",
                fix=["-c NAME for another one, or close the other spd chat"],
                code="session_locked",
            ) from None
        self.close()
        self._open = lock

    def open_new(self) -> str:
        """Take the lock of a chat that does not exist yet: the time of day, and a number if need be."""
        base = f"{datetime.now():%Y-%m-%d-%H%M%S}"
        name, number = base, 2
        while True:
            with suppress(UsageError):
                self.open(name)
                if not self.path(name).exists():
                    return name
            name, number = f"{base}-{number}", number + 1

    def close(self) -> None:
        """Let go of the lock."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _fields(line: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a line, each of its type. Raises ValueError."""
    found = json.loads(line or "null")
    if not isinstance(found, dict):
        raise ValueError("is not an object of JSON")
    fields = {name: found[name] for name in kinds if name in found}
    if wrong := [name for name in fields if not isinstance(fields[name], kinds[name])]:
        raise ValueError(f"{wrong[0]} has a wrong type")
    return fields
