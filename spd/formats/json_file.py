"""Readers of untrusted files: regular files, bounded sizes and depths, typed fields in ranges.

JSON may have NaN and infinities, as Python reads it: no range of a field admits them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

from spd.errors import CheckpointError

MAX_OBJECT_BYTES = 10_000_000
"""Size of a file that holds one object; the largest published config.json is below 100 kB."""
MAX_DEPTH = 64
"""Levels of lists and objects inside each other that a file may have."""
MAX_CONTAINERS = 1_500_000
"""Lists and objects of a file. The limit bounds a hostile file's memory; the header of 90 thousand
tensors has 270,000."""
_CONTAINERS = (dict, list)


class DataclassInstance(Protocol):
    """An object of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=DataclassInstance)


def display_text(value: object) -> str:
    """Return a file's value as a part of a message: one printable line of at most 80 characters."""
    line = json.dumps(value) if isinstance(value, bool | float | None) else ascii(value)
    return line if len(line) <= 80 else line[:77] + "..."


def one_line(error: object) -> str:
    """Return the text of a library's error for a message: one line of at most 200 characters."""
    text = str(error)
    line = text if text.isprintable() else ascii(text)
    return line if len(line) <= 200 else line[:197] + "..."


def abbreviate(names: list[str], limit: int = 20) -> list[str]:
    """Return the first `limit` of the names and a line with the number of the others, if any."""
    if len(names) <= limit:
        return [*names]
    return [*names[:limit], f"and {len(names) - limit} more"]


@contextmanager
def convert_os_errors(path: Path) -> Generator[None, None, None]:
    """Turn an OSError or ValueError of the block into a `CheckpointError` that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder, broken links included. Raises CheckpointError."""
    with convert_os_errors(folder):
        return sorted(os.listdir(folder))


FileIdentity = tuple[int, int, int, int]
"""Size, time of change in ns, inode and device of a file: equal while it is the same file."""


def file_identity(status: os.stat_result) -> FileIdentity:
    """Return a file's identity, which differs for another file and after a write."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, without ever blocking on a FIFO or a device.

    The caller closes it. Raises CheckpointError for another kind, and for a git-lfs pointer.
    """
    with convert_os_errors(path), ExitStack() as on_error:
        file = on_error.enter_context(
            open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        )
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device"}
            kind = kinds.get(stat.S_IFMT(mode), "no regular file")
            raise CheckpointError(f"{path}: is {kind}, not a file")
        if file.peek(23).startswith(b"version https://git-lfs"):
            message = f"{path}: is a git-lfs pointer, which stands for a file that was not fetched"
            raise CheckpointError(message, fix=[f"git -C {shlex.quote(str(path.parent))} lfs pull"])
        on_error.pop_all()  # the file stays open
    return file


def read_text(path: Path, limit: int) -> str:
    """Return the content of a UTF-8 file of at most `limit` bytes, without a byte order mark.

    Raises CheckpointError.
    """
    with open_regular_file(path) as file, convert_os_errors(path):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: is larger than {limit:,} bytes")
    return decode_utf8(data, str(path))


def decode_utf8(data: bytes, where: str) -> str:
    """Return UTF-8 bytes as text, without a byte order mark.

    where: begins every message. Raises CheckpointError; the one for UTF-16 names that encoding.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:4]:
        raise CheckpointError(f"{where}: is UTF-16 or binary, UTF-8 is expected")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 at byte {error.start}") from None


def parse_json(
    text: str, where: str, parse_constant: Callable[[str], object] | None = None
) -> object:
    """Parse JSON of at most `MAX_DEPTH` levels, without a key twice or half of a surrogate pair.

    where: begins every message. parse_constant: returns the value of NaN and the infinities by
    their names; None: Python's own. Raises CheckpointError.
    """

    def refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """Return the object of some pairs; raise CheckpointError where a key is there twice."""
        values = dict(pairs)
        if len(values) < len(pairs):
            duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: {display_text(duplicate)}: the key is there twice")
        return values

    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise CheckpointError(f"{where}: holds more than {MAX_CONTAINERS:,} lists and objects")
    try:
        value: object = json.loads(
            text, object_pairs_hook=refuse_duplicate_keys, parse_constant=parse_constant
        )
        if _is_deeper(value, MAX_DEPTH + 1):
            raise RecursionError
    except json.JSONDecodeError as error:
        reason = f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise CheckpointError(f"{where}: {reason}") from None
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


def _is_deeper(value: object, depth: int) -> bool:
    """True if more than `depth` lists and objects of a JSON value lie inside each other.

    All containers of a level are visited at a time: a call for each would take long.
    """
    containers: list[dict[str, object] | list[object]] = [[value]]
    for _ in range(depth + 1):
        members = (node.values() if isinstance(node, dict) else node for node in containers)
        containers = [
            child for children in members for child in children if isinstance(child, _CONTAINERS)
        ]
    return bool(containers)


def json_key(name: str, *bounds: float) -> dict[str, object]:
    """Return the metadata of a dataclass's field that `Fields.read_dataclass` reads under a key.

    bounds: the lowest and the highest number; both are integers for a whole number. None: the field
    is true or false.
    """
    return {"key": name, "bounds": bounds}


@dataclass
class Fields:
    """A JSON object whose values are read by type and range; null counts as absent.

    Every reader raises CheckpointError, which names the file and the key, for a value of another
    type or out of range, and for an absent one without a default.
    """

    where: str
    """The beginning of every message: the file, and for a nested object the key that holds it."""
    values: Mapping[str, object]
    file_keys: Mapping[str, str] = field(default_factory=dict)
    """The keys in the file of those that were renamed, for messages."""

    @classmethod
    def read(cls, path: Path, limit: int = MAX_OBJECT_BYTES) -> Fields:
        """Read the JSON object that a file of at most `limit` bytes holds. See `parse`."""
        return cls.parse(read_text(path, limit), str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Fields:
        """Parse the JSON object that a text holds; NaN and infinities parse as Python's floats.

        where: begins every message. Raises CheckpointError for another value, and as `parse_json`.
        """
        value = parse_json(text, where)
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: is not a JSON object")
        return cls(where, value)

    def __contains__(self, key: str) -> bool:
        """True if a key has a value other than null."""
        return self.values.get(key) is not None

    def with_values(
        self, values: Mapping[str, object], file_keys: Mapping[str, str] | None = None
    ) -> Fields:
        """Return a copy with other values of some keys.

        file_keys: more keys in the file of those that were renamed.
        """
        return Fields(
            self.where, {**self.values, **values}, {**self.file_keys, **(file_keys or {})}
        )

    def with_canonical_keys(self, aliases: Mapping[str, Sequence[str]]) -> Fields:
        """Return a copy in which each value stands under its canonical key alone.

        aliases: other keys of each canonical one. Raises CheckpointError where keys with the same
        meaning disagree, unless the first value is a list.
        """
        values: dict[str, object] = {}
        file_keys: dict[str, str] = {}
        for key, other_keys in aliases.items():
            present = [name for name in (key, *other_keys) if name in self]
            first = present[0] if present else key
            value = self.get(first)
            for name in present[1:]:
                other = self.get(name)
                reason = f"{display_text(other)} disagrees with {first}, "
                reason += f"which is {display_text(value)}"
                self.require(other == value or isinstance(value, list), name, reason)
            if first != key:
                file_keys[key] = first
                values |= {key: value, **dict.fromkeys(other_keys)}
        return self.with_values(values, file_keys)

    def field_error(self, key: str, reason: str) -> CheckpointError:
        """Return the error for a field, whose message is the file, the key in it and the reason."""
        return CheckpointError(f"{self.where}: {self.file_keys.get(key, key)}: {reason}")

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise CheckpointError for a field, for a reason, unless a condition holds."""
        if not condition:
            raise self.field_error(key, reason)

    def get(self, key: str) -> object:
        """Return the value of a key, unchecked; None when it is absent or null."""
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in [low, high]; 4096.0 and true are not whole numbers."""
        value = self._present_value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.field_error(
                key, f"{display_text(value)} is not a whole number from {low} to {high}"
            )
        return value

    def even_integer(self, key: str, high: int, default: int | None = None) -> int:
        """Return an even whole number in [2, high]: rotary embedding rotates pairs."""
        value = self.integer(key, 2, high, default)
        self.require(value % 2 == 0, key, f"{value} is odd: rotary embedding needs pairs")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Return a whole number in [low, high], `None` when absent."""
        return self.integer(key, low, high) if key in self else None

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number in [low, high] as a float; NaN is in no range, true and false neither."""
        value = self._present_value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.field_error(
                key, f"{display_text(value)} is not a number from {low:g} to {high:g}"
            )
        return float(value)

    def integers(self, key: str, low: int, high: int, count: int | None = None) -> list[int]:
        """Return a list of whole numbers in [low, high], of any length or `count` of them."""
        values = self.get(key)
        if isinstance(values, list) and count in (None, len(values)):
            for value in values:  # no generator: a header has hundreds of thousands of short lists
                if type(value) is not int or not low <= value <= high:
                    break
            else:
                return values
        length = "" if count is None else f"{count} "
        reason = (
            f"{display_text(values)} is not a list of {length}whole numbers from {low} to {high}"
        )
        raise self.field_error(key, reason)

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Return `count` numbers of a list, each in [low, high], as floats."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.field_error(key, f"is not a list of {count} numbers")
        return tuple(Fields(self.where, {key: value}).number(key, low, high) for value in values)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return true or false; 0 and 1 are neither."""
        value = self._present_value(key, default)
        if not isinstance(value, bool):
            raise self.field_error(key, f"{display_text(value)} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._present_value(key, default)
        if not isinstance(value, str):
            raise self.field_error(key, f"{display_text(value)} is not a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, empty when absent."""
        value = self.get(key) if key in self else []
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.field_error(key, f"{display_text(value)} is not a list of names")
        return value

    def require_supported(self, key: str, value: object, supported: Collection[object]) -> None:
        """Raise CheckpointError, which names the value and the supported ones, unless it is one."""
        if value not in supported:  # first: a header comes here thousands of times
            texts = [text if isinstance(text, str) else display_text(text) for text in supported]
            verb = "is" if len(texts) == 1 else "are"
            alternatives = f" ({', '.join(texts)} {verb})" if texts else ""
            raise self.field_error(key, f"{display_text(value)} is not supported{alternatives}")

    def refuse_unsupported_values(self, supported: Mapping[str, Collection[object]]) -> None:
        """Raise CheckpointError for a key with a value that is not supported. Keys may be absent.

        supported: the supported values by key.
        """
        for key, values in supported.items():
            if key in self:
                self.require_supported(key, self.get(key), values)

    def choice(self, key: str, supported: Collection[str], default: str | None = None) -> str:
        """Return a string that is among the supported ones."""
        value = self.text(key, default)
        self.require_supported(key, value, supported)
        return value

    def read_dataclass(self, kind: type[T], base: T | None = None, /, **values: object) -> T:
        """Return a dataclass: fields with the metadata of `json_key` are read, unless in `values`.

        An absent key counts as the value in `base`, else as the field's default, or as None where
        the field's type allows that.
        """
        for member in dataclasses.fields(kind):
            if not member.metadata or member.name in values:
                continue
            key = member.metadata["key"]
            bounds = member.metadata["bounds"]
            has_default = base is not None or member.default is not MISSING
            is_optional = str(member.type).endswith("| None")
            if key not in self and (has_default or is_optional):
                if not has_default:
                    values[member.name] = None
            elif not bounds:
                values[member.name] = self.boolean(key)
            elif float in map(type, bounds):
                values[member.name] = self.number(key, *bounds)
            else:
                values[member.name] = self.integer(key, *bounds)
        return kind(**values) if base is None else replace(base, **values)

    def token_ids(self, key: str, end: int) -> tuple[int, ...]:
        """Return token ids, one or a list in the file, without duplicates; empty when absent.

        Ids from `end` on occur in no text: they are dropped with a warning.
        """
        value = self.get(key)
        entries: list[object] = [value]
        if value is None or isinstance(value, list):
            entries = value or []
        self.require(len(entries) <= 1000, key, f"{len(entries)} token ids are more than 1000")
        ids: dict[int, None] = {}
        for token_id in entries:
            if type(token_id) is not int or token_id < 0:
                raise self.field_error(key, f"{display_text(token_id)} is not a token id")
            if token_id < end:
                ids[token_id] = None
            else:
                import logging

                message = "%s: %s: no text has id %s"
                logger = logging.getLogger(__name__)
                logger.warning(message, self.where, key, display_text(token_id))
        return tuple(ids)

    def optional_nested(self, key: str) -> Fields | None:
        """Return a nested object, `None` when absent."""
        return self.nested(key) if key in self else None

    def nested(self, key: str) -> Fields:
        """Return a nested object that must be there."""
        value = self.get(key)
        self.require(value is not None, key, "is missing")
        if not isinstance(value, dict):
            raise self.field_error(key, f"{display_text(value)} is not an object")
        return Fields(f"{self.where}: {key}", value)

    def _present_value(self, key: str, default: object) -> object:
        """Return the value of a key, else the default. Raises CheckpointError without both."""
        value = default if key not in self else self.values[key]
        self.require(value is not None, key, "is null" if key in self.values else "is missing")
        return value
