"""`spd quantize`: what it writes is what `--quantize int4` runs; what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.kernels.linear.few_bits import int4_groups
from spd.runtime.load.packed_weights import unpack
from tests.cli.conftest import refused
from tests.recipes.tiny_hybrid import write_tiny_hybrid

ASK = (
    "--temperature",
    "1.2",
    "--seed",
    "3",
    "-n",
    "60",
    "--ignore-eos",
    "--spec",
    "off",
    "What does re.sub do?",
)


def test_the_folder_speaks_as_the_model_rounded_at_load(spd_run: Callable, tmp_path: Path) -> None:
    written = tmp_path / "int4"
    planned = spd_run("quantize", "demo", written, "--dry-run", "--json")
    assert not written.exists()
    told = planned.json
    ran = spd_run("quantize", "demo", written, "--json").json
    assert ran == told | {"written": True}
    assert (written / "model.safetensors").stat().st_size >= ran["bytes"]["after"]
    assert 2 * ran["bytes"]["before"] > 3 * ran["bytes"]["after"]
    asked = [spd_run("generate", *more, *ASK).out for more in (("-m", written), ("--quantize", "int4"))]
    assert asked[0] == asked[1] != spd_run("generate", *ASK).out
    drafted = spd_run("generate", "-m", written, *("mtp" if word == "off" else word for word in ASK))
    assert drafted.out == asked[0]


def test_every_tensor_is_there_rounded_or_as_it_was(spd_run: Callable, tmp_path: Path) -> None:
    """Of a hybrid, with its MTP layers and without."""
    source = write_tiny_hybrid(
        tmp_path / "source", mtp=True, dtype="bfloat16", hidden_size=64, intermediate_size=128
    )
    before = load_file(source / "model.safetensors")
    heads = {name for name in before if name.startswith("mtp.") and name.endswith("_proj.weight")}
    for folder, more in (("own", ()), ("all", ("--mtp-too",))):
        spd_run("quantize", source, tmp_path / folder, *more)
        written = ModelFolder(tmp_path / folder)
        how, after = written.config.quantization, written.checkpoint
        assert how is not None and heads
        rounded = set()
        for name, tensor in before.items():
            if name in after.tensors:
                assert torch.equal(after.read(name), tensor)
                continue
            module, scheme = how.found(name, tuple(tensor.shape), after.tensors)
            found = unpack(after, module, scheme, tuple(tensor.shape))
            assert torch.equal(found.plain(), int4_groups(tensor).plain(torch.float32))
            rounded.add(name)
        assert any("linear_attn" in name for name in rounded) and any("mlp" in name for name in rounded)
        assert rounded & heads == (heads if more else set())
        listed = json.loads((written.path / "config.json").read_text())["quantization_config"]["ignore"]
        assert not {name.removesuffix(".weight") for name in rounded} & set(listed)


def test_a_tensor_of_another_shape_in_a_head_stays(spd_run: Callable, tmp_path: Path) -> None:
    source = write_tiny_hybrid(tmp_path / "source", mtp=True, hidden_size=64, intermediate_size=128)
    before = load_file(source / "model.safetensors")
    name = next(each for each in before if each.startswith("mtp.") and each.endswith("up_proj.weight"))
    save_file({**before, name: before[name].flatten()}, source / "model.safetensors")
    spd_run("quantize", source, tmp_path / "written", "--mtp-too")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert torch.equal(written[name], before[name].flatten())


def test_what_is_refused(spd_run: Callable, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    refused(spd_run("quantize", "demo", taken), 2, "exists already")
    assert (taken / "file").read_text() == "mine"
    spd_run("quantize", "demo", tmp_path / "once")
    refused(spd_run("quantize", tmp_path / "once", tmp_path / "twice"), 4, "quantized already")
    broken = Path(shutil.copytree(demo_folder(), tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-9])
    refused(spd_run("quantize", broken, tmp_path / "nothing"), 4, "model.safetensors")
    assert not (tmp_path / "twice").exists() and not (tmp_path / "nothing").exists()
