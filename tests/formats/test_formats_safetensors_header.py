"""One safetensors file: what a hostile or damaged header meets, and agreement with the official reader."""

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
from tests.formats.formats_helpers import entry, refused, shard_bytes, write_shard
from tests.helpers import read_model_config


def header_of(tmp_path: Path, content: bytes) -> list[TensorMeta]:
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


def test_data_in_another_order_than_the_header(tmp_path: Path) -> None:
    header = {"b": entry([1], 4, 8), "none": entry([0], 4, 4), "a": entry([1], 0, 4)}
    assert [meta.name for meta in header_of(tmp_path, shard_bytes(header, b"12345678"))] == [
        "b",
        "none",
        "a",
    ]


@pytest.mark.parametrize("padding", [(b"  ", b""), (b"", b" " * 7), (b"\n\t", b"\n")])
def test_whitespace_around_the_header_is_accepted(
    tmp_path: Path, padding: tuple[bytes, bytes]
) -> None:
    raw = padding[0] + json.dumps({"w": entry([1], 0, 4)}).encode() + padding[1]
    assert len(header_of(tmp_path, shard_bytes(raw, b"1234"))) == 1


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 100_000_001])
def test_huge_header_lengths_allocate_nothing(tmp_path: Path, length: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(CheckpointError, "model.safetensors", "header too large", str(length), seconds=1):
        header_of(tmp_path, struct.pack("<Q", length) + b"{}")
    path = tmp_path / "model.safetensors"
    os.truncate(path, 8 + 100_000_001)  # sparse
    with refused(CheckpointError, "header too large", seconds=1):
        read_shard_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


W = entry([1], 0, 4)
W_JSON = json.dumps(W).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("truncated", "0 bytes")),
        (b"\1" * 3, ("truncated", "3 bytes")),
        (struct.pack("<Q", 50) + b"{}", ("truncated", "58")),
        (shard_bytes(b""), ("not JSON",)),
        (shard_bytes([1]), ("not a JSON object",)),
        (shard_bytes(b"[" * 10_000 + b"]" * 10_000), ("nested",)),
        (shard_bytes(b'{"w":%b,"w":%b}' % (W_JSON, W_JSON), b"1234"), ("'w'", "twice")),
        (shard_bytes(b'{"w":{"dtype":"F32",%b}' % W_JSON[1:], b"1234"), ("dtype", "twice")),
        (shard_bytes({"w": entry([1], 0, 4, "F7")}, b"1234"), ("'w'", "dtype", "'F7'")),
        (shard_bytes({"w": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"), ("'w'", "dtype", "missing")),
        (shard_bytes({"w": 3}), ("'w'", "dtype", "missing")),
        (shard_bytes({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"), ("dtype",)),
        *(
            (shard_bytes({"w": {**W, "shape": shape}}, b"1234"), ("'w'", "shape"))
            for shape in ([-1], [1.0], ["1"], [True], 1, None, [[1]], {"0": 1}, [2**64])
        ),
        *(
            (shard_bytes({"w": {**W, "data_offsets": offsets}}, b"1234"), ("'w'", "data_offsets"))
            for offsets in ([4, 0], [-4, 0], [0, 4.0], [0], [0, 4, 8], None, "04", [0, True], [0, 2**64])
        ),
        (shard_bytes({"w": entry([2, 2**64 - 2], 0, 4)}, b"1234"), ("'w'", "4 bytes", "needs")),
        (shard_bytes({"w": entry([2**63] * 200_000, 0, 4)}, b"1234"), ("'w'", "4 bytes", "needs")),
        (shard_bytes({"w": entry([1], 4, 0)}, b"1234"), ("'w'", "hold -4 bytes")),
        (shard_bytes({"w": entry([3], 0, 1, "F4")}, b"1"), ("'w'", "1.5")),
        (shard_bytes({"w": entry([2], 0, 4)}, b"1234"), ("'w'", "4 bytes", "8")),
        (shard_bytes({"w": entry([1], 0, 1, "F4")}, b"1"), ("'w'", "0.5")),
        (shard_bytes({"w": entry([1], 4, 8)}, b"12345678"), ("'w'", "gap of 4")),
        (shard_bytes({"a": W, "b": entry([1], 8, 12)}, b"1" * 12), ("'b'", "gap of 4")),
        (shard_bytes({f"n{i}": W for i in range(10)}, b"1234"), ("overlaps",)),
        (shard_bytes({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"1" * 8), ("'b'", "overlaps")),
        (shard_bytes({"w": entry([4], 0, 16)}, b"1" * 14), ("truncated", "2 bytes")),
        (shard_bytes({"w": entry([4], 0, 16)}, b"1" * 8), ("truncated", "8 bytes")),
        (shard_bytes({"w": W}, b"1234" + b"PK"), ("2 bytes after",)),
        (shard_bytes({"\x1b[31m\n" * 40: {**W, "dtype": "F7"}}, b"1234"), ("\\x1b", "...")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_headers_that_are_refused(tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    with refused(CheckpointError, f"{tmp_path}/model.safetensors: ", *words, seconds=2):
        header_of(tmp_path, content)


def test_pickle_with_another_name(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    with refused(CheckpointError, "model.safetensors"):
        header_of(tmp_path, evil + b" " * 100)
    with refused(CheckpointError, "model.safetensors"):
        header_of(tmp_path, b"\x80\x04" + evil)
    assert not canary.exists()


INDEX = "model.safetensors.index.json"
THINGS: dict[str, Callable[[Path], object]] = {
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
"""What reads each file of a folder, and its bytes at most; the data of a checkpoint has no bound."""


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", READERS)
def test_things_that_are_no_file(name: str, thing: str, tmp_path: Path) -> None:
    THINGS[thing](tmp_path / name)
    with refused(CheckpointError, f"{tmp_path / name}: ", thing, seconds=1):
        READERS[name][0](tmp_path)


@pytest.mark.parametrize("name", [name for name in READERS if name != "model.safetensors"])
def test_files_that_are_too_large_or_no_text(name: str, tmp_path: Path) -> None:
    read, limit = READERS[name]
    with open(tmp_path / name, "wb") as file:
        file.truncate(limit + 1)
    with refused(
        CheckpointError, f"{tmp_path / name}: ", f"larger than {limit:,} bytes", seconds=1
    ):
        read(tmp_path)
    (tmp_path / name).write_bytes(b"{}    \xff")
    with refused(CheckpointError, f"{tmp_path / name}: ", "not UTF-8 at byte 6", seconds=1):
        read(tmp_path)


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"w": [1]})

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with refused(CheckpointError, f"{path}: Permission denied"):
        read_shard_header(path)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The file with one to three small changes, mostly in its header."""
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
    # Half of the time the length is put right, so that the change reaches the parser.
    if rng.random() < 0.5:
        end = bytes(data).rfind(b"}") + 1
        data[:8] = struct.pack("<Q", max(0, end - 8))
    return bytes(data)


def test_agreement_with_the_official_reader(tmp_path: Path) -> None:
    rng = random.Random(1)
    tensors = {
        "a": entry([2, 2], 0, 16),
        "b": entry([3], 16, 22, "BF16"),
        "c": entry([0], 22, 22, "U8"),
    }
    content = shard_bytes(tensors, bytes(22))
    accepted = 0
    for _ in range(500):
        data = mutated(content, rng)
        try:
            official = {name: tuple(info["shape"]) for name, info in safetensors.deserialize(data)}
        except safetensors.SafetensorError:
            official = None
        try:
            ours = {meta.name: meta.shape for meta in header_of(tmp_path, data)}
        except SpdError as error:
            ours = None
            if official is not None and "twice" in error.message:
                continue
        assert ours == official, data
        accepted += ours is not None
    assert accepted > 20  # the changes must not all be fatal
