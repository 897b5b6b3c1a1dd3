"""Model folders: single files, shards and indices, reading, and the check of tensors."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from spd.errors import CheckpointError
from spd.formats import checkpoint as module
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import FileIdentity
from spd.formats.safetensors_header import TensorMeta, read_shard_header
from tests.formats.formats_helpers import (
    header_entry,
    raises_spd_error,
    shard_bytes,
    write_json,
    write_shard,
    write_sharded,
)
from tests.recipes.mtp_folders import Entry, write_hollow

INDEX = "model.safetensors.index.json"
FIRST_SHARD = "model-00001-of-00002.safetensors"
SECOND_SHARD = "model-00002-of-00002.safetensors"


def test_a_single_file_is_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": [2, 3], "b": [4]})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"} and checkpoint.total_bytes == 40
        assert checkpoint.shards == (tmp_path / "model.safetensors",)
        tensor = checkpoint.read("b")
        assert tuple(tensor.shape) == (4,) and tensor.numpy().tobytes() == b"\2" * 16
        assert tuple(checkpoint.read("a").shape) == (2, 3)
        with raises_spd_error(CheckpointError, "'c'"):
            checkpoint.read("c")
    assert tensor.numpy().tobytes() == b"\2" * 16  # outlives its checkpoint


def test_shards_of_an_index_are_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, {FIRST_SHARD: {"a": [2]}, SECOND_SHARD: {"b": [1], "c": [3]}})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [path.name for path in checkpoint.shards] == [FIRST_SHARD, SECOND_SHARD]
        assert checkpoint.tensors["c"].shard.name == SECOND_SHARD and checkpoint.notes == ()
        assert checkpoint.read("c").numpy().tobytes() == b"\2" * 12
        assert checkpoint.read("a").numpy().tobytes() == b"\1" * 8


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {FIRST_SHARD: {"a": [2]}, SECOND_SHARD: {"b": [1]}})
    write_shard(tmp_path / "model.safetensors", {"z": [1]})
    assert set(Checkpoint.open(tmp_path).tensors) == {"z"}


def test_bfloat16_and_zero_sized_tensors_are_read(tmp_path: Path) -> None:
    header = {"w": header_entry([2], 0, 4, "BF16"), "z": header_entry([2, 0], 4, 4, "F16")}
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(header, b"\x80\x3f\x00\x40"))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read("w").tolist() == [1.0, 2.0]
        assert tuple(checkpoint.read("z").shape) == (2, 0)


def index_of_shard(name: object) -> dict[str, bytes]:
    return {INDEX: json.dumps({"weight_map": {"a": name}}).encode()}


FOLDERS: list[tuple[dict[str, bytes], tuple[str, ...]]] = [
    ({}, ("model.safetensors", INDEX)),
    ({"pytorch_model.bin": b"x"}, ("pytorch_model.bin", "pickle")),
    ({"model.pth": b"x"}, ("model.pth", "pickle")),
    ({"model.gguf": b"x"}, ("model.gguf", "GGUF")),
    ({"other.safetensors": b"x"}, ("model.safetensors",)),
    ({"model.safetensors": shard_bytes({})}, ("model.safetensors: ", "no tensors")),
    *(
        (
            index_of_shard(f"model{suffix}"),
            (INDEX, f"model{suffix}", "pickle formats are not supported"),
        )
        for suffix in (".bin", ".pt", ".pth", ".ckpt", ".PKL")
    ),
    *(
        (index_of_shard(name), (INDEX, "weight_map", "is not the plain name"))
        for name in (
            "../a.safetensors",
            "/etc/a.safetensors",
            "sub/a.safetensors",
            "..\\a.safetensors",
            "C:a.safetensors",
            "\\\\host\\share\\a.safetensors",
            "a\0.safetensors",
            "a\n.safetensors",
            "CON.safetensors",
            "nul.safetensors",
            "com1.x.safetensors",
            ".safetensors",
            "..",
            "",
            "a.safetensors ",
            "a.json",
            "a?.safetensors",
            "a\u202e.safetensors",
        )
    ),
    (index_of_shard(1), (INDEX, "weight_map", "'a'", "string")),
    ({INDEX: b"[]"}, (INDEX, "not a JSON object")),
    ({INDEX: b"{"}, (INDEX, "not JSON")),
    *(({INDEX: content}, (INDEX, "weight_map")) for content in (b"{}", b'{"weight_map": {}}')),
    ({INDEX: b'{"weight_map": ["a"]}'}, (INDEX, "weight_map")),
    ({INDEX: b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'}, ("'a'", "twice")),
]


@pytest.mark.parametrize(("files", "fragments"), FOLDERS)
def test_wrong_folders_are_refused_by_name(
    tmp_path: Path, files: dict[str, bytes], fragments: tuple[str, ...]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "a.safetensors", folder / "x.safetensors"):
        write_shard(path, {"a": [1]})
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with raises_spd_error(CheckpointError, str(folder), *fragments):
        Checkpoint.open(folder)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (("nowhere", "No such file"), ("file", "Not a directory")):
        with raises_spd_error(CheckpointError, name, reason):
            Checkpoint.open(tmp_path / name)


def test_the_fix_for_a_pickle_can_be_typed(tmp_path: Path) -> None:
    """Also next to a `json.py`, without NumPy, for tied tensors, for pickles in several files."""
    folder = tmp_path / "a $model"
    folder.mkdir()
    tied = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    tensors = {"model.a": tied.t(), "b": tied, "c": tied, "d2t": torch.tensor([3, 4])}
    tensors["u"] = torch.tensor([3], dtype=torch.uint8)
    for number, names in enumerate((["model.a", "b", "c"], ["d2t", "u"]), 1):
        torch.save(
            {n: tensors[n] for n in names}, folder / f"pytorch_model-0000{number}-of-00002.bin"
        )
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    torch.save({}, folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match="pickle formats") as caught:
        Checkpoint.open(folder)
    command = shlex.split(caught.value.fix[0])
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    without_numpy = f"import runpy, sys; sys.modules['numpy'] = None; sys.argv = {command[3:]}; "
    without_numpy += f"runpy.run_module({command[3]!r}, run_name='__main__')"
    assert command[:4] == [sys.executable, "-I", "-m", "spd.cli.unpickle"]
    subprocess.run([*command[:2], "-c", without_numpy], check=True, cwd=tmp_path, stderr=-3)
    with Checkpoint.open(folder) as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert len(list(folder.iterdir())) == 5


def test_absent_shards_are_all_named(tmp_path: Path) -> None:
    names = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    write_sharded(tmp_path, {name: {f"t{i}": [1]} for i, name in enumerate(names)})
    for name in names[1:3]:
        (tmp_path / name).unlink()
    with raises_spd_error(CheckpointError, INDEX, "2 of 4", *names[1:3]):
        Checkpoint.open(tmp_path)
    (tmp_path / names[1]).symlink_to("blob-that-never-arrived")
    write_shard(tmp_path / names[2], {"t2": [1]})
    with raises_spd_error(CheckpointError, names[1], "No such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / names[1]).unlink()
    path = write_shard(tmp_path / names[1], {"t1": [4]})
    os.truncate(path, os.path.getsize(path) - 2)
    with raises_spd_error(CheckpointError, names[1], "2 bytes", "missing"):
        Checkpoint.open(tmp_path)


def test_the_index_decides_where_two_shards_hold_a_tensor(tmp_path: Path) -> None:
    weight_map = write_sharded(
        tmp_path, {FIRST_SHARD: {"a": [2], "c": [1]}, SECOND_SHARD: {"b": [1], "a": [2]}}
    )
    for owner, other in ((FIRST_SHARD, SECOND_SHARD), (SECOND_SHARD, FIRST_SHARD)):
        write_json(tmp_path, INDEX, {"weight_map": {**weight_map, "a": owner}})
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.tensors["a"].shard.name == owner
        assert checkpoint.notes == (f"not used: 'a' in {other}: the index says {owner}",)
    del weight_map["a"]
    write_json(tmp_path, INDEX, {"weight_map": weight_map})
    with raises_spd_error(CheckpointError, "'a'", FIRST_SHARD, SECOND_SHARD):
        Checkpoint.open(tmp_path)


def test_files_outside_the_index_are_read_for_extra_tensors_alone(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, {FIRST_SHARD: {"a": [2]}})
    write_sharded(
        tmp_path, {"more.safetensors": {"mtp.x": [2]}, SECOND_SHARD: {"mtp.y": [2], "b": [2]}}
    )
    write_json(tmp_path, INDEX, {"weight_map": weight_map})
    is_mtp = lambda name: name.startswith("mtp.")  # noqa: E731
    assert [*Checkpoint.open(tmp_path).tensors] == ["a"]
    checkpoint = Checkpoint.open(tmp_path, is_extra=is_mtp)
    assert sorted(checkpoint.tensors) == ["a", "mtp.x"]
    assert checkpoint.notes == (
        f"not in the index, ignored: {SECOND_SHARD!a}",
        "not in the index, read for its MTP layers: 'more.safetensors'",
    )
    (tmp_path / FIRST_SHARD).rename(tmp_path / "model.safetensors")
    assert sorted(Checkpoint.open(tmp_path, is_extra=is_mtp).tensors) == ["a", "mtp.x"]


def test_links_to_one_header_end_at_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{i}.safetensors" for i in range(50)]
    write_sharded(tmp_path, {name: {"same": [2]} for name in names})
    write_json(
        tmp_path, INDEX, {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    )
    read_paths: list[Path] = []

    def counted(path: Path) -> tuple[FileIdentity, list[TensorMeta]]:
        read_paths.append(path)
        return read_shard_header(path)

    monkeypatch.setattr(module, "read_shard_header", counted)
    with raises_spd_error(CheckpointError, "tensor 'same': is in 0.safetensors too"):
        Checkpoint.open(tmp_path)
    assert len(read_paths) == 2


def test_an_index_names_files_to_read_and_not_their_tensors(tmp_path: Path) -> None:
    weight_map = write_sharded(
        tmp_path, {FIRST_SHARD: {"a": [2]}, SECOND_SHARD: {"b": [1], "c": [1]}}
    )
    del weight_map["c"]
    write_json(tmp_path, INDEX, {"weight_map": {**weight_map, "a": SECOND_SHARD, "d": FIRST_SHARD}})
    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.tensors[name].shard.name for name in "abc"] == [
        FIRST_SHARD,
        SECOND_SHARD,
        SECOND_SHARD,
    ]
    assert len(checkpoint.tensors) == 3


def test_files_outside_the_index_are_noted(tmp_path: Path) -> None:
    write_sharded(
        tmp_path, {FIRST_SHARD: {"a": [2]}, "model-00002-of-00003.safetensors": {"b": [1]}}
    )
    (tmp_path / "extra.safetensors").write_bytes(b"damaged, but not read")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b"}
    assert len(checkpoint.notes) == 1 and "extra.safetensors" in checkpoint.notes[0]


def test_a_file_truncated_or_replaced_while_in_use_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "model.safetensors", {"a": [1000], "b": [1000]})
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.read("a")
        checkpoint.check_unchanged()
        os.truncate(path, 500)
        with raises_spd_error(CheckpointError, "model.safetensors", "changed while in use"):
            checkpoint.read("b")
        with raises_spd_error(CheckpointError, "changed while in use"):
            checkpoint.check_unchanged()
    write_shard(path, {"a": [1000], "b": [1000]})
    with Checkpoint.open(tmp_path) as checkpoint:  # replaced between header and data
        write_shard(tmp_path / "new", {"b": [1000], "a": [1000]})
        os.replace(tmp_path / "new", path)
        with raises_spd_error(CheckpointError, "model.safetensors", "changed while in use"):
            checkpoint.read("a")
        path.unlink()
        with raises_spd_error(CheckpointError, "model.safetensors", "No such file"):
            checkpoint.read("a")


def test_check_tensors_lists_everything_at_once(tmp_path: Path) -> None:
    header = {"ok": header_entry([2], 0, 8), "transposed": header_entry([3, 2], 8, 32)}
    header |= {
        "complex": header_entry([1], 32, 40, "C64"),
        "fp8": header_entry([4], 40, 44, "F8_E4M3"),
    }
    header |= {"empty": header_entry([2, 0], 44, 44), "extra": header_entry([1], 44, 48)}
    header["rotary_emb.inv_freq"] = header_entry([1], 48, 52)
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(header, bytes(52)))
    checkpoint = Checkpoint.open(tmp_path)
    expected = {
        "ok": (2,),
        "transposed": (2, 3),
        "complex": (1,),
        "fp8": (4,),
        "empty": (2, 2),
        "gone": (1,),
    }
    with raises_spd_error(
        CheckpointError, "1 missing", "2 of another shape", "2 of an unsupported dtype"
    ) as caught:
        check_tensors(checkpoint, expected)
    lines = "\n".join(caught.value.reason)
    assert len(caught.value.reason) == 5
    assert "'transposed' in model.safetensors: shape is [3, 2], expected [2, 3]" in lines
    assert "'gone': is missing" in lines and "dtype C64" in lines and "dtype F8_E4M3" in lines
    assert "[2, 0], expected [2, 2]" in lines and "'ok'" not in lines
    unexpected = check_tensors(checkpoint, {"ok": (2,)})
    assert "extra" in unexpected and not {"ok", "rotary_emb.inv_freq"}.intersection(unexpected)
    with raises_spd_error(CheckpointError, "'ok'", "F32"):
        check_tensors(checkpoint, {"ok": (2,)}, dtypes={"ok": ("BF16",)})


def test_sixty_shards_are_listed_quickly(tmp_path: Path) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(60):  # sparse: 3 GiB that occupy nothing
        name = f"model-{shard + 1:05}-of-00060.safetensors"
        tensors: list[Entry] = [
            (f"layers.{shard}.{part}.weight", "BF16", (2**14, 2**13)) for part in range(12)
        ]
        write_hollow(tmp_path / name, tensors)
        weight_map |= {tensor: name for tensor, _, _ in tensors}
    write_json(tmp_path, INDEX, {"weight_map": weight_map})
    start = time.process_time()
    assert Checkpoint.open(tmp_path).total_bytes == 60 * 12 * 2**28
    assert time.process_time() - start < 0.5
