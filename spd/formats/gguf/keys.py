"""Keys of a GGUF file's architecture, and small tensors of numbers."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from spd.errors import CheckpointError
from spd.formats.gguf.container import GgufFile, GgufScalar, GgufTensor, GgufValue
from spd.formats.json_file import convert_os_errors, display_text, open_regular_file

FULL = "full_attention"
SLIDING = "sliding_attention"
"""Kinds of layers in `layer_types`."""
MAX_FACTORS = 512
"""Numbers of a tensor of the configuration: half a head."""
LARGEST_FLOAT32 = 3.4e38
"""The bound of numbers in a file, rounded down."""


@dataclass(frozen=True)
class Keys:
    """A file's keys behind its architecture's name, and the tensors of its layers."""

    file: GgufFile
    architecture: str
    MAX_LAYERS: ClassVar[int] = 1024

    def get(self, key: str) -> GgufValue | None:
        """Return a value as the file has it; None for a key that it lacks."""
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def json_value(self, key: str) -> object:
        """Return a value as JSON has it, a float32 as the shortest decimal that rounds to it."""
        value = self.get(key)
        if isinstance(value, tuple):
            return [_json_number(item) for item in value if not isinstance(item, tuple)]
        return None if value is None else _json_number(value)

    def integer(self, key: str) -> int | None:
        """Return a whole number; None without one."""
        value = self.get(key)
        return value if type(value) is int else None

    def number(self, key: str) -> float | None:
        """Return a number; None without one."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return shortest_decimal(value)

    def numbers(self, key: str) -> list[float] | None:
        """Return a list of numbers; None without one."""
        value = self.get(key)
        if not isinstance(value, tuple):
            return None
        return [shortest_decimal(item) for item in value if isinstance(item, int | float)]

    def has(self, layer: int, name: str) -> bool:
        """True if a layer has a tensor."""
        return f"blk.{layer}.{name}" in self.file.tensors


def _json_number(value: GgufScalar) -> GgufScalar:
    """Return a float as its shortest decimal; another value as it is."""
    return shortest_decimal(value) if isinstance(value, float) else value


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal whose nearest float32 is `value`.

    1e-05 is stored as 9.99999974e-06.
    """
    if not abs(value) < LARGEST_FLOAT32:
        return float(value)
    for digits in range(6, 10):
        shorter = float(f"{value:.{digits}g}")
        if abs(shorter) < LARGEST_FLOAT32 and _to_float32(shorter) == value:
            return shorter
    return float(value)


def _to_float32(value: float) -> float:
    """Return the float32 nearest to a number."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest


def most_common(values: Sequence[object]) -> object:
    """Return the most common number above 0, or the list where there is none."""
    counts = Counter(value for value in values if type(value) is int and value > 0)
    return counts.most_common(1)[0][0] if counts else list(values)


def read_factors(tensor: GgufTensor) -> list[float]:
    """Read the numbers of a small tensor of float32. Raises CheckpointError for another one."""
    if tensor.type.name != "F32" or tensor.nbytes > 4 * MAX_FACTORS:
        reason = f"{tensor.type.name} {list(tensor.shape)} is not a list of up to {MAX_FACTORS} F32"
        raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {reason}")
    with open_regular_file(tensor.path) as opened, convert_os_errors(tensor.path):
        opened.seek(tensor.offset)
        data = opened.read(tensor.nbytes)
    if len(data) < tensor.nbytes:
        raise CheckpointError(f"{tensor.path}: changed while in use")
    return [shortest_decimal(number) for number in struct.unpack(f"<{len(data) // 4}f", data)]
