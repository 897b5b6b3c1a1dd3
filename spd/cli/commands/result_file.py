"""Results of `spd bench` read back from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spd.errors import UsageError
from spd.formats.files import read_input

SCHEMA_PREFIX = "spd.bench/"


def read_result(path: Path) -> dict[str, Any]:
    """The object that `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    from spd.runtime.lab.compare import compare

    fix = "spd bench -o FILE writes one"
    try:
        value = json.loads(read_input(path, fix))
    except (ValueError, RecursionError):
        raise UsageError(f"cannot read {path}: it is not JSON", fix=[fix]) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != f"{SCHEMA_PREFIX}1":
        raise UsageError(
            f"{path} is not a result of spd bench",
            reason=[f"schema {schema!r}, expected {SCHEMA_PREFIX}1"],
            fix=[fix],
        )
    assert isinstance(value, dict)
    try:
        compare(value, value)  # reads all that is read of one
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is a damaged result of spd bench", reason=[why]) from None
    return value
