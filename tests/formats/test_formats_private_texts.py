"""Files of earlier sessions' token ids: private, bounded, and refused where they are not one's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from spd.errors import ResourceError, SpdError
from spd.formats.private_texts import PrivateTexts, find_text_files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_texts_come_back_in_order_and_nobody_else_may_read_them(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        texts = PrivateTexts(tmp_path / "a" / "texts", "abc", 100)
        assert texts.read_texts() == []
        texts.append_text([1, 2, 3])
        texts.append_text([2**31 - 1])
    finally:
        os.umask(old_mask)
    assert PrivateTexts(tmp_path / "a" / "texts", "abc", 100).read_texts() == [
        [1, 2, 3],
        [2**31 - 1],
    ]
    assert PrivateTexts(tmp_path / "a" / "texts", "other", 100).read_texts() == []
    assert mode(texts.path) == 0o600 and mode(texts.path.parent) == 0o700
    assert find_text_files(texts.path.parent) == [texts.path]
    assert (
        find_text_files(texts.path)
        == find_text_files(tmp_path / "none")
        == find_text_files(tmp_path)
        == []
    )


def test_a_file_stays_small(tmp_path: Path) -> None:
    texts = PrivateTexts(tmp_path / "texts", "abc", 20)
    for number in range(30):
        texts.append_text([number] * 9)
        assert texts.path.stat().st_size <= 8 * 20
        texts_left = texts.read_texts()
        assert texts_left[-1] == [number] * 9 and sum(map(len, texts_left)) <= 20
    texts.append_text([7] * 1000)
    assert texts.path.stat().st_size <= 8 * 20 and texts.read_texts() == [[7] * 19]


def test_an_incomplete_number_is_left_out(tmp_path: Path) -> None:
    texts = PrivateTexts(tmp_path / "texts", "abc", 20)
    texts.append_text([1, 2])
    with texts.path.open("ab") as file:
        file.write(b"\x05\x00")
    assert texts.read_texts() == [[1, 2]]


def refuse(folder: Path, *words: str) -> None:
    """Assert that a folder of texts can be neither read nor written, with these words."""
    for use in (lambda texts: texts.read_texts(), lambda texts: texts.append_text([1])):
        with pytest.raises(SpdError) as caught:
            use(PrivateTexts(folder, "abc", 20))
        assert all(word in caught.value.message for word in words), caught.value.message
        assert caught.value.fix


def test_what_others_own_or_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    texts = PrivateTexts(folder, "abc", 20)
    texts.append_text([1, 2])
    before = texts.path.read_bytes()
    texts.path.chmod(0o640)
    refuse(folder, str(texts.path), "others may read it")
    texts.path.chmod(0o600)
    folder.chmod(0o701)
    refuse(folder, str(folder), "others may read it")
    folder.chmod(0o700)
    user_id = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user_id + 1)
    refuse(folder, "belongs to another user")
    monkeypatch.undo()
    assert texts.path.read_bytes() == before and texts.read_texts() == [[1, 2]]


def test_links_pipes_and_files_in_place_of_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    texts = PrivateTexts(folder, "abc", 20)
    texts.append_text([1])
    moved = texts.path.rename(tmp_path / "moved")
    texts.path.symlink_to(moved)
    with pytest.raises(ResourceError, match="symbolic link"):
        texts.read_texts()
    refuse(folder, str(texts.path))
    texts.path.unlink()
    os.mkfifo(texts.path, 0o600)
    refuse(folder, str(texts.path))
    assert moved.stat().st_size == 8
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ResourceError):
        PrivateTexts(file, "abc", 20)
