"""Results of `spd bench` read back from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spd.errors import NotFoundError, UsageError

SCHEMA_PREFIX = "spd.bench/"


def read_result(path: Path) -> dict[str, Any]:
    """The object that `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    from spd.runtime.measuring.compare import compare

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}", fix=["spd bench -o FILE writes one"]) from None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise UsageError(f"cannot read {path}: {why}", fix=["spd bench -o FILE writes one"]) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != f"{SCHEMA_PREFIX}1":
        raise UsageError(
            f"{path} is not a result of spd bench",
            reason=[f"schema {schema!r}, expected {SCHEMA_PREFIX}1"],
            fix=["spd bench -o FILE writes one"],
        )
    assert isinstance(value, dict)
    try:
        compare(value, value)  # reads all that anybody reads of one
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is a damaged result of spd bench", reason=[why]) from None
    return value
