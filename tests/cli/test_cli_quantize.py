"""`spd quantize` writes what `--quantize int4` runs, and `spd convert-mtp` copies MTP heads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import Checkpoint
from spd.formats.demo import demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.mtp import read_head_folder, verifier_hash
from spd.kernels.linear.group_rounding import quantize_groups
from spd.runtime import EngineConfig, choose_drafter
from spd.runtime.load.packed_weights import unpack_matrix
from tests.cli.conftest import assert_refused
from tests.helpers import edit_weights, truncate_on_open
from tests.recipes.mtp_folders import PREFIX, write_deepseek
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.recipes.tiny_hybrid import write_tiny_hybrid

ASK = (
    "--temperature",
    "1.2",
    "--seed",
    "3",
    "-n",
    "60",
    "--set",
    "ignore_eos=on",
    "--spec",
    "off",
    "What is re.sub?",
)


@pytest.mark.parametrize("name", ["demo-hybrid", pytest.param("demo", marks=pytest.mark.slow)])
def test_the_folder_speaks_as_the_model_rounded_at_load(
    name: str, spd_run: Callable, tmp_path: Path
) -> None:
    """Cover rows of two forms in a matrix whose rows are reordered: demo-hybrid's queries and gates."""
    written = tmp_path / "int4"
    planned = spd_run("quantize", name, written, "--dry-run", "--json")
    assert not written.exists()
    planned_report = planned.json
    ran = spd_run("quantize", name, written, "--json").json
    assert ran == planned_report | {"written": True}
    assert (written / "model.safetensors").stat().st_size >= ran["bytes"]["after"]
    assert 2 * ran["bytes"]["before"] > 3 * ran["bytes"]["after"]
    replies = [
        spd_run("generate", arguments, ASK).out
        for arguments in (("-m", written), ("-m", name, "--quantize", "int4"))
    ]
    assert replies[0] == replies[1] != spd_run("generate", "-m", name, ASK).out
    drafted = spd_run("generate", "-m", written, ["mtp" if word == "off" else word for word in ASK])
    assert drafted.out == replies[0]


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("family", ["gemma4", *sorted(FAMILIES.keys() - {"gemma4", "gpt_oss"})])
def test_each_familys_folder_speaks_as_the_model_rounded_at_load(
    family: str, spd_run: Callable, tmp_path: Path
) -> None:
    """Cover matrices that are stored in another dtype than the model's: some of Gemma 4's here."""
    source = write_dense(tmp_path / "source", family, dtype="bfloat16")
    spd_run("quantize", source, tmp_path / "int4")
    words = (
        "--dtype",
        "bfloat16",
        "--prompt-ids",
        "3,9,4,7,5",
        "--spec",
        "off",
        "-n",
        "24",
        "--json",
    )
    replies = [
        spd_run("generate", arguments, words, "--set", "ignore_eos=on").json["token_ids"]
        for arguments in (("-m", tmp_path / "int4"), ("-m", source, "--quantize", "int4"))
    ]
    assert replies[0] == replies[1] and len(replies[0]) == 24


@pytest.mark.slow
def test_transposed_experts_are_rounded_at_load_alone(spd_run: Callable, tmp_path: Path) -> None:
    source = write_dense(tmp_path / "source", "gpt_oss", dtype="bfloat16")
    refused = spd_run("quantize", source, tmp_path / "int4")
    assert refused.code != 0 and "stored transposed" in refused.err
    words = ("--prompt-ids", "3,9,4", "--quantize", "int4", "--spec", "off", "-n", "4", "--json")
    assert spd_run("generate", "-m", source, words).json["token_ids"]


def test_every_tensor_is_there_rounded_or_as_it_was(spd_run: Callable, tmp_path: Path) -> None:
    """Cover a hybrid with and without its MTP layers.

    A tensor of another shape in a head is unchanged.
    """
    source = write_tiny_hybrid(
        tmp_path / "source", mtp=True, dtype="bfloat16", hidden_size=64, intermediate_size=128
    )
    before = load_file(source / "model.safetensors")
    heads = {name for name in before if name.startswith("mtp.") and name.endswith("_proj.weight")}
    for folder, arguments in (("own", ()), ("all", ("--mtp-too",))):
        spd_run("quantize", source, tmp_path / folder, arguments)
        written = ModelFolder(tmp_path / folder)
        quantization = written.config.quantization
        after = written.checkpoint
        assert quantization is not None and heads
        rounded = set()
        for name, tensor in before.items():
            if name in after.tensors:
                assert torch.equal(after.read(name), tensor)
                continue
            module, scheme = quantization.module_scheme(name, tuple(tensor.shape), after.tensors)
            unpacked = unpack_matrix(after, module, scheme, tuple(tensor.shape))
            expected = quantize_groups(tensor, unpacked.kind).plain(torch.float32)
            assert torch.equal(unpacked.dequantize(), expected)
            rounded.add(name)
        assert any("linear_attn" in name for name in rounded) and any(
            "mlp" in name for name in rounded
        )
        assert rounded & heads == (heads if arguments else set())
    odd = next(name for name in sorted(heads) if name.endswith("up_proj.weight"))
    edit_weights(source, lambda tensors: tensors.update({odd: before[odd].flatten()}))
    spd_run("quantize", source, tmp_path / "odd", "--mtp-too")
    assert torch.equal(
        load_file(tmp_path / "odd" / "model.safetensors")[odd], before[odd].flatten()
    )


def test_a_quantized_damaged_or_existing_folder_is_refused(
    spd_run: Callable, tmp_path: Path
) -> None:
    spd_run("quantize", "demo", tmp_path / "once")
    assert_refused(spd_run("quantize", "demo", tmp_path / "once"), 2, "exists already")
    assert_refused(
        spd_run("quantize", tmp_path / "once", tmp_path / "twice"), 4, "quantized already"
    )
    weights = Path(shutil.copytree(demo_folder(), tmp_path / "broken")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert_refused(
        spd_run("quantize", weights.parent, tmp_path / "nothing"), 4, "model.safetensors"
    )
    assert not (tmp_path / "twice").exists() and not (tmp_path / "nothing").exists()


COPIES = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}shared_head.head.weight")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Return a model with an MTP layer."""
    write_deepseek(tmp_path / "original")
    return tmp_path / "original"


def head_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: t for name, t in tensors.items() if name.startswith(PREFIX) and name not in COPIES
    }


def are_equal(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in first.items()
    )


def test_the_head_is_cut_out_byte_for_byte(
    spd_run: Callable, original: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    planned = spd_run("convert-mtp", original, head, "--dry-run")
    assert planned.code == 0 and "\nwritten           no\n" in planned.text and not head.exists()
    ran = spd_run("convert-mtp", original, head, "--json")
    assert ran.code == 0 and ran.err == ""
    facts = ran.json
    assert (facts["family"], facts["modules"], facts["written"]) == ("deepseek", 1, True)
    expected = head_tensors(load_file(original / "model.safetensors"))
    assert {row["name"] for row in facts["mapped"]} == set(expected)
    assert facts["shared"] == sorted(COPIES) and facts["own"] == facts["dropped"] == []
    assert are_equal(load_file(head / "model.safetensors"), expected)
    folder = read_head_folder(ModelFolder(head))
    assert folder.layout.modules == 1 and folder.verifier == str(original)
    assert folder.verifier_sha256 == facts["verifier"]["sha256"]
    assert sorted(os.listdir(tmp_path)) == ["head", "original"]


MTP = "an MTP head"
EAGLE3 = "an EAGLE-3 head"
KINDS = [
    ("head", "auto", "mtp"),
    ("head", "mtp+ngram", "mtp"),
    ("head", "draft", f"is {MTP}, not a model"),
    ("head", "eagle3", f"is {MTP}, not {EAGLE3}"),
    ("draft", "auto", "draft"),
    ("draft", "mtp", f"is a model, not {MTP}"),
    ("eagle3", "auto", "eagle3"),
    ("eagle3", "mtp", f"is {EAGLE3}, not {MTP}"),
]


def test_what_a_draft_model_is_follows_from_its_files(spd_run: Callable, tmp_path: Path) -> None:
    drafts = {
        "head": tmp_path / "head",
        "draft": demo_draft_folder(),
        "eagle3": demo_eagle3_folder(),
    }
    assert spd_run("convert-mtp", "demo", drafts["head"]).code == 0
    target = ModelFolder(demo_folder())
    for name, spec, expected in KINDS:
        config = EngineConfig(model=target, draft_model=drafts[name], spec=spec)
        try:
            drafter = choose_drafter(config, target)
        except IncompatibleError as refusal:
            assert expected in refusal.message, (name, spec)
            assert "convert-mtp" in refusal.fix[-1] or spec != "mtp"
            continue
        assert drafter.method == expected and drafter.reason.startswith("asked for"), (name, spec)
        source = drafter.weights_source()
        assert source is not None and source[1].path == drafts[name], (name, spec)
    facts = spd_run("inspect", "demo", "--draft", drafts["head"], "--json").json["speculation"]
    assert (facts["method"], facts["reason"]) == ("mtp", "it is given with --draft")
    assert facts["methods"]["mtp"]["possible"] and not facts["methods"]["draft"]["possible"]


def test_only_the_shards_that_are_needed_are_read(spd_run: Callable, tmp_path: Path) -> None:
    """The other shards are missing: a head can be copied from its downloaded shards alone."""
    sharded = tmp_path / "sharded"
    tensors = write_deepseek(sharded, shards=6)
    for number in range(1, 5):
        (sharded / f"model-{number:05}-of-00006.safetensors").unlink()
    ran = spd_run("convert-mtp", sharded, tmp_path / "head")
    assert ran.code == 0, ran.err
    assert are_equal(load_file(tmp_path / "head" / "model.safetensors"), head_tensors(tensors))
    (sharded / "model-00005-of-00006.safetensors").unlink()  # the final norm: whose head is it?
    assert_refused(spd_run("convert-mtp", sharded, tmp_path / "other"), 4, "model-00005-of-00006")
    assert not (tmp_path / "other").exists()


def test_a_table_of_its_own_is_kept(spd_run: Callable, original: Path, tmp_path: Path) -> None:
    table = load_file(original / "model.safetensors")[COPIES[1]]
    edit_weights(original, lambda tensors: tensors.update({COPIES[1]: table + 1}))
    facts = spd_run("convert-mtp", original, tmp_path / "head", "--json").json
    assert facts["own"] == [COPIES[1]] and facts["shared"] == [COPIES[0]]
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(written[COPIES[1]], table + 1) and COPIES[0] not in written


def test_fp8_goes_along_with_its_scales(spd_run: Callable, original: Path, tmp_path: Path) -> None:
    twin = write_twin(original, tmp_path / "twin", block=24)  # partial last blocks both ways
    assert spd_run("convert-mtp", twin, tmp_path / "head").code == 0
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert are_equal(stored, head_tensors(load_file(twin / "model.safetensors")))
    config = json.loads((tmp_path / "head" / "config.json").read_text())["transformer_layer_config"]
    assert config["quantization_config"]["weight_block_size"] == [24, 24]
    scale = next(name for name in stored if name.endswith("_scale_inv"))
    edit_weights(twin, lambda tensors: tensors.pop(scale))
    expected_texts = "tensors of the MTP head are needed: 1 missing", scale.removesuffix("_inv")
    assert_refused(spd_run("convert-mtp", twin, tmp_path / "bare"), 4, *expected_texts)


def test_nothing_is_overwritten_by_accident(
    spd_run: Callable, original: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in original.iterdir()}
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for destination in (original, tmp_path, tmp_path / "link"):
        assert_refused(spd_run("convert-mtp", original, destination), 2, "exists already")
    assert spd_run("convert-mtp", original, tmp_path / "empty").code == 0
    assert_refused(
        spd_run("convert-mtp", original, tmp_path / "empty"), 2, "exists already", "a new folder"
    )
    assert before == {path: path.read_bytes() for path in original.iterdir()}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_the_mark_of_the_verifier_is_never_that_of_a_part(original, monkeypatch) -> None:
    edit_weights(original, lambda tensors: tensors.update({"model.norm.weight": torch.ones(10**6)}))
    truncate_on_open(monkeypatch, original / "model.safetensors")
    cut = pytest.raises(CheckpointError, match="was truncated while it was read")
    with Checkpoint.open(original) as checkpoint, cut:
        verifier_hash(checkpoint)


def test_links_out_of_the_folder_are_not_copied(spd_run: Callable, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_folder("demo"), source, ignore=shutil.ignore_patterns("eagle3"))
    (tmp_path / "secret").write_text("a key of the user's")
    (source / "extra.json").symlink_to(tmp_path / "secret")
    (source / "readme.txt").symlink_to("/dev/zero")
    os.mkfifo(source / "pipe.txt")
    with (source / "sparse.model").open("wb") as sparse:
        sparse.truncate(1 << 40)
    (source / "inside.txt").symlink_to("config.json")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "other.jinja").symlink_to(tmp_path / "secret")
    ran = spd_run("quantize", source, tmp_path / "written")
    assert ran.code == 0
    files = {
        str(path.relative_to(tmp_path / "written"))
        for path in (tmp_path / "written").rglob("*")
        if path.is_file()
    }
    assert not files & {"extra.json", "readme.txt", "pipe.txt", "sparse.model"}
    assert "additional_chat_templates/other.jinja" not in files
    assert files >= {"inside.txt", "tokenizer.json", "additional_chat_templates/tool_use.jinja"}
    for name in ("extra.json", "readme.txt", "pipe.txt", "sparse.model", "other.jinja"):
        assert re.search(rf"not copied: \S*{re.escape(name)}: is ", ran.err)


def test_a_snapshot_of_the_hubs_cache_is_copied_through_its_links(
    spd_run: Callable, tmp_path: Path
) -> None:
    repository = tmp_path / "models--org--small"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in demo_folder("demo").glob("*.*"):
        shutil.copyfile(path, repository / "blobs" / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    other = tmp_path / "models--org--private" / "blobs" / "hash"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (snapshot / "other.json").symlink_to(other)
    ran = spd_run("quantize", snapshot, tmp_path / "written", "-q")
    assert ran.code == 0
    copied = (tmp_path / "written" / "tokenizer.json").read_bytes()
    assert copied == demo_folder("demo").joinpath("tokenizer.json").read_bytes()
    assert not (tmp_path / "written" / "tokenizer.json").is_symlink()
    assert not (tmp_path / "written" / "other.json").exists()
