"""Files that a user names: bounds, pipes, locks, and a whole file in the place of another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from spd.cli.text.output import Sink
from spd.errors import SpdError, UsageError
from spd.formats.files import read_input, write_whole


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_input(path, "", 100) == b"x" * 100
    with pytest.raises(UsageError, match=r"file is larger than 0 MiB"):
        read_input(path, "", 99)


@pytest.mark.parametrize("name", ["missing", ".", "a\0b", "missing/x"])
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpdError) as caught:
        read_input(tmp_path / name, "the fix")
    assert str(tmp_path) in caught.value.message and caught.value.fix == ("the fix",)


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_whole_file_never_goes_through_a_planted_link(mode: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Nor could one be planted: the name cannot be foreseen."""
    path, victim = tmp_path / "chat", tmp_path / "victim"
    victim.write_text("precious")
    path.write_text("old")
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    (tmp_path / f".chat.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(path, "new", mode)
    assert (path.read_text(), victim.read_text()) == ("old", "precious")
    monkeypatch.undo()
    write_whole(path, "né", mode)
    assert path.read_bytes() == "né".encode() and path.stat().st_mode & 0o777 & ~mode == 0
    assert sorted(os.listdir(tmp_path)) == [f".chat.{'0' * 16}.tmp", "chat", "victim"]


def test_a_whole_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "chat").write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "chat", "new")
    assert os.listdir(tmp_path) == ["chat"] and (tmp_path / "chat").read_text() == "old"


def test_one_writer_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first = Sink(path)
    first.write("mine\n")
    with pytest.raises(UsageError, match="another process is writing it"):
        Sink(path).write("x")
    assert path.read_text() == "mine\n"
    first.close()
    Sink(path).write("yours")
    assert path.read_text() == "yours"
