"""The container of GGUF: right files are read, hostile and damaged ones are refused."""

from __future__ import annotations

import math
import os
import random
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from spd.errors import CheckpointError
from spd.formats.gguf.block_types import TYPES_BY_NAME
from spd.formats.gguf.container import GgufFile
from tests.formats.gguf.gguf_helpers import (
    TensorSpec,
    TypedValue,
    Value,
    gguf_bytes,
    header_bytes,
    open_bytes,
    text_bytes,
    write_gguf,
)

METADATA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "ä", ""],
    "tokenizer.ggml.scores": TypedValue("f", [0.5, -1.0, 2.0]),
    "small": TypedValue("b", -3),
    "long": TypedValue("Q", 1 << 60),
    "double": TypedValue("d", 0.1),
    "nested": [[1, 2], [3]],
}
TENSORS = {
    "token_embd.weight": TensorSpec("Q4_K", [3, 256], bytes(range(144)) * 3),
    "output_norm.weight": TensorSpec("F32", [256]),
    "blk.0.ffn_up_exps.weight": TensorSpec("Q8_0", [2, 3, 64]),
}


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_read(tmp_path: Path, version: int) -> None:
    file = GgufFile.open(write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, version))
    metadata = file.metadata
    assert file.version == version
    assert metadata["tokenizer.ggml.tokens"] == ("<s>", "ä", "")
    assert metadata["tokenizer.ggml.scores"] == (0.5, -1.0, 2.0)
    assert metadata["nested"] == ((1, 2), (3,))
    assert metadata["small"] == -3
    assert metadata["long"] == 1 << 60
    assert metadata["double"] == 0.1
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert [*file.tensors] == [*TENSORS]
    first = file.tensors["token_embd.weight"]
    assert (first.type.name, first.shape, first.nbytes) == ("Q4_K", (3, 256), 432)
    data = first.path.read_bytes()[first.offset :][: first.nbytes]
    assert data == bytes(range(144)) * 3
    stacked = file.tensors["blk.0.ffn_up_exps.weight"]
    assert (stacked.shape, stacked.nbytes) == ((2, 3, 64), 6 * 68)


def test_another_alignment_counts(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {"general.alignment": 128}
    file = open_bytes(tmp_path / "a.gguf", gguf_bytes(metadata, TENSORS, alignment=128))
    assert all(tensor.offset % 128 == 0 for tensor in file.tensors.values())


def test_a_vocabulary_larger_than_a_piece_is_read(tmp_path: Path) -> None:
    words = [f"token {number:090d}" for number in range(100_000)]
    file = open_bytes(tmp_path / "a.gguf", gguf_bytes({"words": words, "behind": 7}, {}))
    assert file.metadata["words"] == tuple(words)
    assert file.metadata["behind"] == 7


def write_splits(
    folder: Path, second_metadata: Mapping[str, Value] = MappingProxyType({})
) -> list[Path]:
    """Write a model in three files; second_metadata: keys of the second one."""
    count = 3
    paths = []
    for number in range(count):
        metadata: dict[str, Value] = {
            "split.no": TypedValue("H", number),
            "split.count": TypedValue("H", count),
            "split.tensors.count": TypedValue("i", count),
        }
        if number == 0:
            metadata["general.architecture"] = "llama"
        if number == 1:
            metadata |= second_metadata
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_gguf(path, metadata, {f"t{number}": TensorSpec("F32", [8])}))
    return paths


@pytest.mark.parametrize("split", [0, 2])
def test_splits_are_one_model(tmp_path: Path, split: int) -> None:
    paths = write_splits(tmp_path)
    file = GgufFile.open(paths[split])
    assert [*file.tensors] == ["t0", "t1", "t2"]
    assert [*file.identities] == paths
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["t2"].path == paths[2]


@pytest.mark.parametrize(
    ("second_metadata", "message"),
    [
        ({"split.no": TypedValue("H", 2)}, "number 2 of 3, not 1 of 3"),
        ({"split.count": TypedValue("H", 2)}, "number 1 of 2, not 1 of 3"),
    ],
)
def test_splits_that_disagree_are_refused(
    tmp_path: Path, second_metadata: dict[str, Value], message: str
) -> None:
    paths = write_splits(tmp_path, second_metadata)
    with pytest.raises(CheckpointError, match=message):
        GgufFile.open(paths[0])


def test_a_split_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_splits(tmp_path)[0]
    with pytest.raises(CheckpointError, match="must be named NAME-00001-of-00003"):
        GgufFile.open(path.rename(tmp_path / "m.gguf"))


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    paths = write_splits(tmp_path)
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003\.gguf: is missing: the model is in 3 files"
    ):
        GgufFile.open(paths[0])


def test_a_tensor_in_two_splits_is_refused(tmp_path: Path) -> None:
    paths = write_splits(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes().replace(b"t2", b"t0"))
    with pytest.raises(CheckpointError, match=r"'t0': is in m-00001-of-00003\.gguf too"):
        GgufFile.open(paths[0])


def test_tensors_that_no_split_holds_are_missed(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {"split.no": 0, "split.count": 2, "split.tensors.count": 5}
    for number in range(2):
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        split_metadata = {**metadata, "split.no": number}
        write_gguf(path, split_metadata, {f"t{number}": TensorSpec("F32", [8])})
    with pytest.raises(CheckpointError, match="is 5, but the files hold 2 tensors"):
        GgufFile.open(path)


def tensor_bytes(name: str, sizes: list[int], type_number: int, offset: int) -> bytes:
    """Return the header's entry of a tensor, its sizes innermost first."""
    parts = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, type_number, offset)
    return text_bytes(name) + parts


def file_of(tensors: list[bytes], data: int = 256) -> bytes:
    """Return a file of tensors' entries, with `data` bytes of tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def key_bytes(type_number: int, value: bytes) -> bytes:
    """Return a file of one key `k` with a value of a type."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text_bytes("k")
        + struct.pack("<I", type_number)
        + value
    )


TINY_TENSORS = [tensor_bytes("a", [8], 0, 0), tensor_bytes("b", [8], 0, 32)]
HOSTILE = {
    "is not a GGUF file": b"PK\x03\x04" + bytes(20),
    "is big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 1 is not supported": b"GGUF" + struct.pack("<III", 1, 0, 0),
    "version 4 is not supported": b"GGUF" + struct.pack("<IQQ", 4, 0, 0),
    "is truncated: it ends in its header, at byte 2": b"GG",
    "holds more than 1,048,576 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0),
    "the count of its keys: 1099511627776 is": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40),
    "'k': its length: 9223372036854775808 is": key_bytes(8, struct.pack("<Q", 1 << 63)),
    "'k': its length: 4611686018427387904 is": key_bytes(9, struct.pack("<IQ", 4, 1 << 62)),
    "'k': 13 is not the type of a value": key_bytes(13, bytes(8)),
    "nested more than 2 deep": key_bytes(9, struct.pack("<IQ", 9, 1) * 3),
    "arrays hold more than": key_bytes(
        9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ", 4, 4194303)
    ),
    "neither 0 nor 1": key_bytes(7, b"\x02"),
    "'k': is not UTF-8 at byte": key_bytes(8, text_bytes(b"\xff")),
    "'k': the key is there twice": gguf_bytes({"k": 1, "l": 1}, {}).replace(b"l", b"k"),
    "general.alignment: 48 is not": gguf_bytes({"general.alignment": 48}, {}),
    "general.alignment: 'x' is not": gguf_bytes({"general.alignment": "x"}, {}),
    "5 dimensions are not": file_of([tensor_bytes("a", [1] * 5, 0, 0)]),
    "0 dimensions are not": file_of([tensor_bytes("a", [], 0, 0)]),
    r"shape \[0, 8\] has no elements": file_of([tensor_bytes("a", [8, 0], 0, 0)]),
    "a dimension: 18446744073709551615": file_of([tensor_bytes("a", [(1 << 64) - 1], 0, 0)]),
    "is truncated: tensor 'a' ends": file_of([tensor_bytes("a", [1 << 40, 1 << 40], 0, 0)]),
    "type 4, Q4_2, which": file_of([tensor_bytes("a", [32], 4, 0)]),
    "type 139, a type of ik": file_of([tensor_bytes("a", [256], 139, 0)]),
    "type 70, which is not known": file_of([tensor_bytes("a", [256], 70, 0)]),
    "100 columns are not whole blocks of 256": file_of([tensor_bytes("a", [100], 12, 0)]),
    "'a': the name is there twice": file_of([TINY_TENSORS[0], tensor_bytes("a", [8], 0, 32)]),
    "overlaps the tensor before it": file_of([TINY_TENSORS[0], tensor_bytes("b", [8], 0, 0)]),
    "'b': its offset 40: leaves a gap of 8": file_of(
        [TINY_TENSORS[0], tensor_bytes("b", [8], 0, 40)]
    ),
    "'b': its offset 96: leaves a gap of 64": file_of(
        [TINY_TENSORS[0], tensor_bytes("b", [8], 0, 96)]
    ),
    "its offset: 18446744073709551584 is": file_of([tensor_bytes("a", [8], 0, (1 << 64) - 32)]),
    "split.count: 0 is not": gguf_bytes({"split.count": 0}, {}),
    "split.count: 'x' is not": gguf_bytes({"split.count": "x"}, {}),
    "split.count: 1025 is not": gguf_bytes({"split.count": 1025}, {}),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_wrong_values_are_refused_by_name(tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/a.gguf: .*{message}"):
        open_bytes(tmp_path / "a.gguf", HOSTILE[message])


def test_tensors_in_another_order_than_their_bytes_are_read(tmp_path: Path) -> None:
    file = open_bytes(tmp_path / "a.gguf", file_of(TINY_TENSORS[::-1]))
    assert [*file.tensors] == ["b", "a"]


def test_a_cut_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    content = gguf_bytes({"general.architecture": "llama", "words": ["a", "b"]}, TENSORS)
    end = len(header_bytes({}, TENSORS, 32, 3)) + 700
    for length in [*range(0, end, 7), len(content) - 100]:
        with pytest.raises(CheckpointError, match="is truncated"):
            open_bytes(tmp_path / "a.gguf", content[:length])


def test_a_sparse_file_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(file_of([tensor_bytes("a", [1 << 20, 1 << 18], 0, 0)]))
    os.truncate(path, 1 << 40 | 1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert GgufFile.open(path).tensors["a"].nbytes == 1 << 40
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 16))
    os.truncate(path, 1 << 40)  # keys of zeros: an empty name, a number of one byte
    with pytest.raises(CheckpointError, match="'': the key is there twice"):
        GgufFile.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def mutate(content: bytes, rng: random.Random, header_length: int) -> bytes:
    """Return a file whose header has changed, removed or doubled bytes, or large numbers."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        position = rng.randrange(header_length)
        action = rng.randrange(5)
        if action == 0:
            data[position] = rng.randrange(256)
        elif action == 1:
            data[position : position + 8] = struct.pack(
                "<Q", rng.choice([0, 1, 1 << 31, 1 << 62, (1 << 64) - 1])
            )
        elif action == 2:
            data[position : position + 4] = struct.pack("<I", rng.choice([0, 9, 8, 255, 1 << 31]))
        elif action == 3:
            del data[position : position + rng.randrange(1, 64)]
        else:
            data[position:position] = data[position : position + rng.randrange(1, 64)]
    return bytes(data)


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_read(tmp_path: Path, count: int) -> None:
    rng = random.Random(49)
    content = gguf_bytes(METADATA, TENSORS)
    header_length = len(header_bytes(METADATA, TENSORS, 32, 3))
    refusals = 0
    for _ in range(count):
        data = mutate(content, rng, header_length)
        try:
            file = open_bytes(tmp_path / "a.gguf", data)
        except CheckpointError as error:
            assert str(error).startswith(f"{tmp_path}/a.gguf: ")
            assert error.message.isprintable()
            refusals += 1
        else:
            for tensor in file.tensors.values():
                assert tensor.offset + tensor.nbytes <= len(data)
                assert tensor.nbytes == math.prod(tensor.shape[:-1]) * tensor.type.row_bytes(
                    tensor.shape[-1]
                )
    assert refusals > count // 3


@pytest.mark.oracle
def test_blocks_are_as_large_as_gguf_says() -> None:
    gguf = pytest.importorskip("gguf")
    for kind, (elements, nbytes) in gguf.GGML_QUANT_SIZES.items():
        block_type = TYPES_BY_NAME[kind.name]
        assert (block_type.number, block_type.elements, block_type.nbytes) == (
            int(kind),
            elements,
            nbytes,
        )
