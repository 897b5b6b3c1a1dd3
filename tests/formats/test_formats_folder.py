"""A model folder's files are read once; files that a user names: bounds, locks, atomic writes."""

from __future__ import annotations

import builtins
import os
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from spd.cli.app import main
from spd.cli.terminal.sink import Sink
from spd.errors import NotFoundError, SpdError, UsageError
from spd.formats import checkpoint, safetensors_header
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.files import read_input, write_atomically
from spd.formats.folder import ModelFolder
from tests.formats.formats_helpers import QWEN3, write_json

pytestmark = pytest.mark.usefixtures("keep_threads")

READ_ONCE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "headers",
)
ON_CPU = ("--device", "cpu", "--kernels", "torch")
RAW = ("generate", "--no-server", "--raw", "--ctx", "64", "-n", "4", *ON_CPU, "ab")


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """Copy the demo, which otherwise is known by its folder and brings its draft."""
    skip = shutil.ignore_patterns("draft", "eagle3")
    return Path(shutil.copytree(demo_folder(), tmp_path / "demo", ignore=skip))


@pytest.fixture
def opened(demo: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Path, str]]:
    """Count opened files by folder and name, and headers read, after `demo` is copied."""
    counts: Counter[tuple[Path, str]] = Counter()
    real_open = builtins.open
    read_header = safetensors_header.read_shard_header

    def counting_open(path: object, *arguments: object, **options: object) -> object:
        if isinstance(path, str | Path) and str(path).endswith(".json"):
            counts[Path(path).parent, Path(path).name] += 1
        return real_open(path, *arguments, **options)  # type: ignore[call-overload]

    def counting_header(path: Path) -> object:
        counts[path.parent, "headers"] += 1
        return read_header(path)

    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(builtins, "open", counting_open)
    monkeypatch.setattr(checkpoint, "read_shard_header", counting_header)
    return counts


def test_a_run_with_an_mtp_head_opens_each_file_once(
    opened: Counter[tuple[Path, str]], demo: Path
) -> None:
    assert main([*RAW, "-m", str(demo), "--spec", "mtp"]) == 0
    assert {name: opened[demo, name] for name in READ_ONCE} == dict.fromkeys(READ_ONCE, 1)


def test_a_run_with_a_draft_model_opens_each_file_once(
    opened: Counter[tuple[Path, str]], demo: Path
) -> None:
    draft = demo_draft_folder()
    assert main([*RAW, "-m", str(demo), "--draft-model", str(draft)]) == 0
    assert {name: opened[demo, name] for name in READ_ONCE} == dict.fromkeys(READ_ONCE, 1)
    # The tokenizer is the same file with the same added tokens, and is not opened.
    read = ("config.json", "tokenizer.json", "tokenizer_config.json", "headers")
    assert {name: opened[draft, name] for name in READ_ONCE} == {
        name: int(name in read) for name in READ_ONCE
    }


def test_a_fault_is_raised_at_every_use(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(NotFoundError, match=r"there is no config\.json"):
            assert folder.config
    write_json(tmp_path, "config.json", QWEN3)
    assert folder.config.architecture == "Qwen3ForCausalLM"


def test_copies_go_by_the_path_alone(tmp_path: Path) -> None:
    write_json(tmp_path, "config.json", QWEN3)
    folder = ModelFolder(tmp_path)
    assert folder.config and "config" in vars(folder)
    copy = pickle.loads(pickle.dumps(folder))
    assert copy == folder and hash(copy) == hash(folder) and vars(copy) == {"path": tmp_path}
    assert os.fspath(copy) == str(copy) == str(tmp_path) and ModelFolder.from_path(copy) is copy
    # Of another type: a path is no folder.
    assert folder != tmp_path  # type: ignore[comparison-overlap]


def test_a_checkpoint_that_was_closed_can_be_read_again() -> None:
    weights = ModelFolder(demo_folder()).checkpoint
    name = next(iter(weights.tensors))
    with weights:
        first = weights.read(name)
    assert torch.equal(weights.read(name), first)
    weights.close()


# Files that a user names


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
def test_an_atomic_write_never_follows_a_planted_link(
    mode: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """The name of the temporary file is random, so that none could be planted either."""
    path = tmp_path / "chat"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.write_text("old")
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    (tmp_path / f".chat.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(path, "new", mode)
    assert (path.read_text(), victim.read_text()) == ("old", "precious")
    monkeypatch.undo()
    write_atomically(path, "né", mode)
    assert path.read_bytes() == "né".encode() and path.stat().st_mode & 0o777 & ~mode == 0
    assert sorted(os.listdir(tmp_path)) == [f".chat.{'0' * 16}.tmp", "chat", "victim"]


def test_an_atomic_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "chat").write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "chat", "new")
    assert os.listdir(tmp_path) == ["chat"] and (tmp_path / "chat").read_text() == "old"


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first = Sink(path)
    first.write("mine\n")
    with pytest.raises(UsageError, match="another process is writing it"):
        Sink(path).write("x")
    assert path.read_text() == "mine\n"
    first.close()
    Sink(path).write("yours")
    assert path.read_text() == "yours"
