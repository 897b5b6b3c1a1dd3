"""Everything that is refused in the words of `refusals.txt`, before anything is loaded or written."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import refused

LINES = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line and line[0] != "#"]


def files_beside(model: Path) -> list[Path]:
    """But for the folder of saved chats."""
    return sorted(path for path in model.parent.rglob("*") if "state" not in path.parts)


@pytest.mark.parametrize("row", ROWS)
def test_refused(
    row: str, spd_run: Callable[..., Any], model: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, typed, words = row.split(" | ")
    typed, given, stdin = typed.partition(" <")
    monkeypatch.chdir(model.parent)
    before = files_beside(model)
    for name, meant in (("MODEL", model.name), ("LONGNAME", "x" * 300), ("NINES", "9" * 400)):
        typed = typed.replace(name, meant)
    stdin = stdin.strip().replace("DEEP", "[" * 100_000)
    data = codecs.decode(stdin, "unicode_escape").encode("latin-1") if given else None
    ran = spd_run(*shlex.split(typed), stdin=data)
    said = words.split(" ; ")
    if "--json" in typed.split():
        error = ran.json["error"]
        assert error["exit"] == ran.code == int(status) and said[0] in error["message"]
        assert all(word in " ".join(error["reason"]) for word in said[1:])
    else:
        refused(ran, int(status), *said)
    assert not script.engines or typed.startswith("chat"), "a chat loads while it waits for lines"
    assert files_beside(model) == before
