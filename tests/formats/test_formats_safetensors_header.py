"""Safetensors headers: hostile and damaged ones are refused, in agreement with the official reader."""

from __future__ import annotations

import json
import os
import random
import resource
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from spd.errors import CheckpointError, SpdError
from spd.formats.chat_template import ChatTemplate
from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import read_generation_config
from spd.formats.safetensors_header import TensorMeta, read_shard_header
from spd.formats.tokenizer import Tokenizer
from tests.formats.formats_helpers import header_entry, raises_spd_error, shard_bytes, write_shard
from tests.helpers import read_model_config


def read_header(tmp_path: Path, content: bytes) -> list[TensorMeta]:
    """Write a file and read its header."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return read_shard_header(path)[1]


def test_a_header_is_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "blob", {"w": [2, 3], "scalar": [], "nothing": [2, 0]})
    (path := tmp_path / "a.safetensors").symlink_to("blob")  # links are followed
    tensors = {meta.name: meta for meta in read_shard_header(path)[1]}
    assert (
        tensors["w"].shape == (2, 3) and tensors["w"].nbytes == 24 and tensors["w"].dtype == "F32"
    )
    assert tensors["scalar"].shape == () and tensors["scalar"].nbytes == 4
    assert tensors["nothing"].nbytes == 0 and tensors["w"].shard == path


def test_data_may_have_another_order_than_the_header(tmp_path: Path) -> None:
    header = {
        "b": header_entry([1], 4, 8),
        "none": header_entry([0], 4, 4),
        "a": header_entry([1], 0, 4),
    }
    assert [meta.name for meta in read_header(tmp_path, shard_bytes(header, b"12345678"))] == [
        "b",
        "none",
        "a",
    ]


@pytest.mark.parametrize("padding", [(b"  ", b""), (b"", b" " * 7), (b"\n\t", b"\n")])
def test_whitespace_around_the_header_is_accepted(
    tmp_path: Path, padding: tuple[bytes, bytes]
) -> None:
    raw = padding[0] + json.dumps({"w": header_entry([1], 0, 4)}).encode() + padding[1]
    assert len(read_header(tmp_path, shard_bytes(raw, b"1234"))) == 1


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 100_000_001])
def test_huge_header_lengths_allocate_nothing(tmp_path: Path, length: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises_spd_error(
        CheckpointError, "model.safetensors", "header too large", str(length), seconds=1
    ):
        read_header(tmp_path, struct.pack("<Q", length) + b"{}")
    path = tmp_path / "model.safetensors"
    os.truncate(path, 8 + 100_000_001)  # sparse
    with raises_spd_error(CheckpointError, "header too large", seconds=1):
        read_shard_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


ONE_FLOAT = header_entry([1], 0, 4)
ONE_FLOAT_JSON = json.dumps(ONE_FLOAT).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("truncated", "0 bytes")),
        (b"\1" * 3, ("truncated", "3 bytes")),
        (struct.pack("<Q", 50) + b"{}", ("truncated", "58")),
        (shard_bytes(b""), ("not JSON",)),
        (shard_bytes([1]), ("not a JSON object",)),
        (shard_bytes(b"[" * 10_000 + b"]" * 10_000), ("nested",)),
        (shard_bytes(b'{"w":%b,"w":%b}' % (ONE_FLOAT_JSON, ONE_FLOAT_JSON), b"1234"), ("'w'", "twice")),
        (shard_bytes(b'{"w":{"dtype":"F32",%b}' % ONE_FLOAT_JSON[1:], b"1234"), ("dtype", "twice")),
        (shard_bytes({"w": header_entry([1], 0, 4, "F7")}, b"1234"), ("'w'", "dtype", "'F7'")),
        (shard_bytes({"w": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"), ("'w'", "dtype", "missing")),
        (shard_bytes({"w": 3}), ("'w'", "dtype", "missing")),
        (shard_bytes({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"), ("dtype",)),
        *(
            (shard_bytes({"w": {**ONE_FLOAT, "shape": shape}}, b"1234"), ("'w'", "shape"))
            for shape in ([-1], [1.0], ["1"], [True], 1, None, [[1]], {"0": 1}, [2**64])
        ),
        *(
            (shard_bytes({"w": {**ONE_FLOAT, "data_offsets": offsets}}, b"1234"), ("'w'", "data_offsets"))
            for offsets in ([4, 0], [-4, 0], [0, 4.0], [0], [0, 4, 8], None, "04", [0, True], [0, 2**64])
        ),
        (shard_bytes({"w": header_entry([2, 2**64 - 2], 0, 4)}, b"1234"), ("'w'", "4 bytes", "needs")),
        (shard_bytes({"w": header_entry([2**63] * 200_000, 0, 4)}, b"1234"), ("'w'", "4 bytes", "needs")),
        (shard_bytes({"w": header_entry([1], 4, 0)}, b"1234"), ("'w'", "hold -4 bytes")),
        (shard_bytes({"w": header_entry([3], 0, 1, "F4")}, b"1"), ("'w'", "1.5")),
        (shard_bytes({"w": header_entry([2], 0, 4)}, b"1234"), ("'w'", "4 bytes", "8")),
        (shard_bytes({"w": header_entry([1], 0, 1, "F4")}, b"1"), ("'w'", "0.5")),
        (shard_bytes({"w": header_entry([1], 4, 8)}, b"12345678"), ("'w'", "gap of 4")),
        (shard_bytes({"a": ONE_FLOAT, "b": header_entry([1], 8, 12)}, b"1" * 12), ("'b'", "gap of 4")),
        (shard_bytes({f"n{i}": ONE_FLOAT for i in range(10)}, b"1234"), ("overlaps",)),
        (
            shard_bytes({"a": header_entry([2], 0, 8), "b": header_entry([1], 4, 8)}, b"1" * 8),
            ("'b'", "overlaps"),
        ),
        (shard_bytes({"w": header_entry([4], 0, 16)}, b"1" * 14), ("truncated", "2 bytes")),
        (shard_bytes({"w": header_entry([4], 0, 16)}, b"1" * 8), ("truncated", "8 bytes")),
        (shard_bytes({"w": ONE_FLOAT}, b"1234" + b"PK"), ("2 bytes after",)),
        (shard_bytes({"\x1b[31m\n" * 40: {**ONE_FLOAT, "dtype": "F7"}}, b"1234"), ("\\x1b", "...")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_invalid_headers_are_refused(
    tmp_path: Path, content: bytes, words: tuple[str, ...]
) -> None:
    with raises_spd_error(CheckpointError, f"{tmp_path}/model.safetensors: ", *words, seconds=2):
        read_header(tmp_path, content)


def test_a_pickle_with_another_name_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    with raises_spd_error(CheckpointError, "model.safetensors"):
        read_header(tmp_path, evil + b" " * 100)
    with raises_spd_error(CheckpointError, "model.safetensors"):
        read_header(tmp_path, b"\x80\x04" + evil)
    assert not canary.exists()


INDEX = "model.safetensors.index.json"
NOT_FILES: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "No such device": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "No such file": lambda path: path.symlink_to("nowhere"),
    "symbolic links": lambda path: path.symlink_to(path.name),
}
READERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "config.json": (read_model_config, 10_000_000),
    "generation_config.json": (read_generation_config, 10_000_000),
    "tokenizer.json": (Tokenizer.open, 64_000_000),
    "tokenizer_config.json": (ChatTemplate.open, 10_000_000),
    "chat_template.jinja": (ChatTemplate.open, 1_000_000),
    INDEX: (Checkpoint.open, 40_000_000),
    "model.safetensors": (Checkpoint.open, 0),
}
"""The reader of each file of a folder, and its limit in bytes; the data of a checkpoint has none."""


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", READERS)
def test_anything_but_a_file_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    NOT_FILES[kind](tmp_path / name)
    with raises_spd_error(CheckpointError, f"{tmp_path / name}: ", kind, seconds=1):
        READERS[name][0](tmp_path)


@pytest.mark.parametrize("name", [name for name in READERS if name != "model.safetensors"])
def test_files_that_are_too_large_or_no_text_are_refused(name: str, tmp_path: Path) -> None:
    read, limit = READERS[name]
    with open(tmp_path / name, "wb") as file:
        file.truncate(limit + 1)
    with raises_spd_error(
        CheckpointError, f"{tmp_path / name}: ", f"larger than {limit:,} bytes", seconds=1
    ):
        read(tmp_path)
    (tmp_path / name).write_bytes(b"{}    \xff")
    with raises_spd_error(
        CheckpointError, f"{tmp_path / name}: ", "not UTF-8 at byte 6", seconds=1
    ):
        read(tmp_path)


def test_a_denied_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"w": [1]})

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with raises_spd_error(CheckpointError, f"{path}: Permission denied"):
        read_shard_header(path)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return a file with one to three small changes, mostly in its header."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        where = rng.randrange(min(len(data), 330))
        # Another byte, one of JSON's, none, or one more.
        new: tuple[list[int], ...] = (
            [rng.randrange(256)],
            [rng.choice(b'0123456789-[]{}",: ')],
            [],
        )
        data[where : where + rng.randrange(2)] = bytes(rng.choice(new))
    # Half of the time the length is corrected, so that the change reaches the parser.
    if rng.random() < 0.5:
        end = bytes(data).rfind(b"}") + 1
        data[:8] = struct.pack("<Q", max(0, end - 8))
    return bytes(data)


def test_the_reader_agrees_with_the_official_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    tensors = {
        "a": header_entry([2, 2], 0, 16),
        "b": header_entry([3], 16, 22, "BF16"),
        "c": header_entry([0], 22, 22, "U8"),
    }
    content = shard_bytes(tensors, bytes(22))
    accepted = 0
    for _ in range(500):
        data = mutate(content, rng)
        try:
            official = {name: tuple(info["shape"]) for name, info in safetensors.deserialize(data)}
        except safetensors.SafetensorError:
            official = None
        try:
            ours = {meta.name: meta.shape for meta in read_header(tmp_path, data)}
        except SpdError as error:
            ours = None
            if official is not None and "twice" in error.message:
                continue
        assert ours == official, data
        accepted += ours is not None
    assert accepted > 20  # the changes must not all be fatal
