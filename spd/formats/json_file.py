"""Reading untrusted files: regular files only, bounded sizes, strict JSON, typed and ranged fields."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from spd.errors import CheckpointError

logger = logging.getLogger(__name__)
CONFIG_LIMIT = 10_000_000  # bytes; the largest published config.json is below 100 kB
MAX_DEPTH = 64
T = TypeVar("T")
MAX_CONTAINERS = (
    1_500_000  # bounds a hostile file's memory; the header of 90 thousand tensors has 270,000
)


def shown(value: object) -> str:
    """A value of a file as it may appear in a message: one printable line of at most 80 characters."""
    line = json.dumps(value) if isinstance(value, bool | float | None) else ascii(value)
    return line if len(line) <= 80 else line[:77] + "..."


def one_line(error: object) -> str:
    """What a library says, as a part of a message: one printable line of at most 200 characters."""
    text = str(error)
    line = text if text.isprintable() else ascii(text)
    return line if len(line) <= 200 else line[:197] + "..."


def listed(names: list[str], limit: int = 20) -> list[str]:
    """At most `limit` of the names, then how many more there are."""
    return [*names[:limit], *([f"and {len(names) - limit} more"] if len(names) > limit else [])]


@contextmanager
def os_errors(path: Path) -> Generator[None, None, None]:
    """Make what the system refuses inside the block a `CheckpointError` that begins with the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder, broken links included."""
    with os_errors(folder):
        return sorted(os.listdir(folder))


Identity = tuple[int, int, int, int]
"""What stays equal while a file is the same: first its size."""


def identity_of(status: os.stat_result) -> Identity:
    """Return what tells a file from another one, or from itself after it was written."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, without ever blocking on a FIFO or a device."""
    with os_errors(path), ExitStack() as opened:
        file = opened.enter_context(
            open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        )
        if not stat.S_ISREG(mode := os.fstat(file.fileno()).st_mode):
            kind = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device"}.get(
                stat.S_IFMT(mode)
            )
            raise CheckpointError(f"{path}: is {kind or 'no regular file'}, not a file")
        if file.peek(23).startswith(b"version https://git-lfs"):
            why = f"{path}: is a git-lfs pointer, which stands for a file that was not fetched"
            raise CheckpointError(why, fix=[f"git -C {shlex.quote(str(path.parent))} lfs pull"])
        opened.pop_all()  # it stays open
    return file


def read_text(path: Path, limit: int) -> str:
    """The whole content of a UTF-8 file of at most `limit` bytes, without a byte order mark."""
    with open_regular_file(path) as file, os_errors(path):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: is larger than {limit:,} bytes")
    return decode_utf8(data, str(path))


def decode_utf8(data: bytes, where: str) -> str:
    """UTF-8 bytes as text; UTF-16 is refused by name."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:4]:
        raise CheckpointError(f"{where}: is UTF-16 or binary, UTF-8 is expected")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 at byte {error.start}") from None


def parse_json(text: str, where: str, constant: Callable[[str], Any] | None = None) -> object:
    """JSON of bounded depth and size, no key twice, no lone surrogates. constant: what NaN becomes."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: {shown(twice)}: the key is there twice")
        return result

    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise CheckpointError(f"{where}: holds more than {MAX_CONTAINERS:,} lists and objects")
    try:
        value: object = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        level: list[Any] = [[value]]  # all of one depth at a time: a call for each would take long
        for _ in range(MAX_DEPTH + 2):
            inner = (node.values() if isinstance(node, dict) else node for node in level)
            level = [child for each in inner for child in each if type(child) in (dict, list)]
        if level:
            raise RecursionError
    except json.JSONDecodeError as error:
        why = f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise CheckpointError(f"{where}: {why}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: is nested more than {MAX_DEPTH} deep") from None
    except ValueError:  # an integer of thousands of digits
        raise CheckpointError(f"{where}: holds a number that is too long") from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{where}: holds half of a surrogate pair") from None
    return value


def keyed(name: str, *bounds: float) -> dict[str, Any]:
    """The metadata of a dataclass's field that `Fields.facts` reads: under which key, in which range."""
    return {"key": name, "bounds": bounds}


@dataclass
class Fields:
    """Typed, ranged reading of a JSON object; null counts as absent."""

    where: str  # what every message begins with: the file, and for a nested object the key that holds it
    values: Mapping[str, object]
    called: Mapping[str, str] = field(
        default_factory=dict
    )  # the file's own names of keys that were renamed

    @classmethod
    def of(cls, path: Path, limit: int = CONFIG_LIMIT) -> Fields:
        """Those of the object that a file of at most `limit` bytes holds."""
        return cls.parse(read_text(path, limit), str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Fields:
        """Those of the object that a text holds."""
        value = parse_json(text, where)
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: is not a JSON object")
        return cls(where, value)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def having(
        self, values: Mapping[str, object], called: Mapping[str, str] | None = None
    ) -> Fields:
        """These, with other values of some keys."""
        return Fields(self.where, {**self.values, **values}, {**self.called, **(called or {})})

    def renamed(self, others: Mapping[str, Sequence[str]]) -> Fields:
        """These, with each key under its own name alone. Names may not disagree, but for those of lists."""
        found: dict[str, object] = {}
        called = {}
        for key, names in others.items():
            first, *rest = [name for name in (key, *names) if name in self] or [key]
            for name in rest:
                why = f"{shown(self.get(name))} disagrees with {first}, which is {shown(self.get(first))}"
                agrees = self.get(name) == self.get(first) or isinstance(self.get(first), list)
                self.require(agrees, name, why)
            if first != key:
                called[key] = first
                found |= {key: self.get(first), **dict.fromkeys(names)}
        return self.having(found, called)

    def refused(self, key: str, why: str) -> CheckpointError:
        """The error for a field: file, field, reason."""
        return CheckpointError(f"{self.where}: {self.called.get(key, key)}: {why}")

    def require(self, holds: bool, key: str, why: str) -> None:
        """Raise that error unless it holds."""
        if not holds:
            raise self.refused(key, why)

    def get(self, key: str) -> object:
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; 4096.0 and true are not whole numbers."""
        value = self._present(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refused(key, f"{shown(value)} is not a whole number from {low} to {high}")
        return value

    def even(self, key: str, high: int, default: int | None = None) -> int:
        """An even whole number from 2 on: rotary embedding turns pairs."""
        value = self.integer(key, 2, high, default)
        self.require(value % 2 == 0, key, f"{value} is odd: rotary embedding needs pairs")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """As `integer`, `None` when absent."""
        return self.integer(key, low, high) if key in self else None

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; NaN is in no range."""
        value = self._present(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.refused(key, f"{shown(value)} is not a number from {low:g} to {high:g}")
        return float(value)

    def integers(self, key: str, low: int, high: int, count: int | None = None) -> list[int]:
        """A list of whole numbers in [low, high], of any length or `count` of them."""
        values = self.get(key)
        if isinstance(values, list) and count in (None, len(values)):
            for value in values:  # no generator: a header has hundreds of thousands of short lists
                if type(value) is not int or not low <= value <= high:
                    break
            else:
                return values
        some = "" if count is None else f"{count} "
        why = f"{shown(values)} is not a list of {some}whole numbers from {low} to {high}"
        raise self.refused(key, why)

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of so many numbers, each in [low, high]."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.refused(key, f"is not a list of {count} numbers")
        return tuple(Fields(self.where, {key: value}).number(key, low, high) for value in values)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, f"{shown(value)} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.refused(key, f"{shown(value)} is not a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty when absent."""
        value = self.get(key) if key in self else []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refused(key, f"{shown(value)} is not a list of names")
        return value

    def among(self, key: str, value: object, known: Collection[object]) -> None:
        """Refuse a value that is not among those that are known, by name."""
        if value not in known:  # a header asks thousands of times
            plain = [each if isinstance(each, str) else shown(each) for each in known]
            those = f" ({', '.join(plain)} {'is' if len(plain) == 1 else 'are'})" if plain else ""
            raise self.refused(key, f"{shown(value)} is not supported{those}")

    def only(self, supported: Mapping[str, Collection[object]]) -> None:
        """Refuse keys that say anything but what is supported; they may be absent."""
        for key, known in supported.items():
            if key in self:
                self.among(key, self.get(key), known)

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """A string that is among `known`; any other one is refused by name."""
        value = self.text(key, default)
        self.among(key, value, known)
        return value

    def facts(self, kind: type[T], made: T | None = None, /, **known: Any) -> T:
        """A dataclass whose fields have the metadata of `keyed`, and what is `known` of it besides.

        Bounds say whether a number is whole; without any it is true or false. An absent key counts as what
        `made` says, else as the field's default, or as None where its type allows that.
        """
        for each in dataclasses.fields(cast(Any, kind)):
            if not each.metadata or each.name in known:
                continue
            name = each.metadata["key"]
            bounds = each.metadata["bounds"]
            reader: Any = self.number if float in map(type, bounds) else self.integer
            unsaid = made is None and each.default is MISSING
            if name in self or (unsaid and not str(each.type).endswith("| None")):
                known[each.name] = (reader if bounds else self.boolean)(name, *bounds)
            elif unsaid:
                known[each.name] = None
        return kind(**known) if made is None else replace(cast(Any, made), **known)

    def token_ids(self, key: str, end: int) -> tuple[int, ...]:
        """Token ids, one or a list; empty when absent. No text has those from `end` on: they are dropped."""
        value = self.get(key)
        ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
        self.require(len(ids) <= 1000, key, f"{len(ids)} token ids are more than 1000")
        for token_id in ids:
            self.require(
                type(token_id) is int and token_id >= 0, key, f"{shown(token_id)} is not a token id"
            )
            if token_id >= end:
                logger.warning("%s: %s: no text has id %s", self.where, key, shown(token_id))
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id < end))

    def fields(self, key: str) -> Fields | None:
        """A nested object, `None` when absent."""
        return self.nested(key) if key in self else None

    def nested(self, key: str) -> Fields:
        """A nested object that must be there."""
        value = self.get(key)
        self.require(value is not None, key, "is missing")
        if not isinstance(value, dict):
            raise self.refused(key, f"{shown(value)} is not an object")
        return Fields(f"{self.where}: {key}", value)

    def _present(self, key: str, default: object) -> object:
        value = default if key not in self else self.values[key]
        self.require(value is not None, key, "is null" if key in self.values else "is missing")
        return value
