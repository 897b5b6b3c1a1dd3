"""Paths and names that are no usable model: each command says in one line what they are, with a fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_eagle3_folder
from spd.formats.hub import MODEL_FIX
from spd.formats.mtp import make_head_config
from tests.cli.conftest import write_model
from tests.recipes.mtp_folders import Entry, write_hollow
from tests.recipes.published_hybrids import Release, config_of, mtp_tensors, text_tensors

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 100\n"
HUB = "https://huggingface.co/org/name"
COMMANDS = {"generate": "generate -m ? Hi", "chat": "chat ? --no-save", "bench": "bench -m ?"}
COMMANDS |= {"verify": "verify -m ?", "inspect": "inspect ?", "convert-mtp": "convert-mtp ? head"}
COMMANDS |= {"draft": "generate --draft-model ? Hi"}
INCOMPLETE = "the copy in the local cache is incomplete: "
READS_NO_TEXT = "bench verify inspect convert-mtp draft"


@dataclass(frozen=True)
class WrongModel:
    """A model, the exit code, texts of the message and the fix, and the commands that accept it."""

    name_or_path: str
    code: int
    expected: str
    fix: str
    accepted_by: str = ""


WRONG_MODELS = [
    WrongModel(
        "ggufs/m.gguf", 4, expected="ggufs/m.gguf: is truncated: it ends in its header", fix=""
    ),
    WrongModel("gone/m.GGUF", 3, expected="gone/m.GGUF: there is no such file", fix=""),
    WrongModel("ggufs", 4, expected="one of which is to be named: m.gguf", fix="-m ggufs/m.gguf"),
    WrongModel("lora", 4, expected="lora: is a LoRA adapter of 'org/base'", fix="-m org/base"),
    WrongModel(
        "lfs", 4, expected="lfs/model.safetensors: is a git-lfs pointer", fix="git -C lfs lfs pull"
    ),
    WrongModel(
        "pickle",
        4,
        expected="pickle/pytorch_model.bin: pickle formats",
        fix=" -I -m spd.cli.unpickle pickle\n",
    ),
    WrongModel(
        "mtp",
        4,
        expected="mtp: an MTP head drafts for another model",
        fix="-m TARGET --draft-model mtp",
        accepted_by="draft",
    ),
    WrongModel(
        "eagle3",
        4,
        expected="eagle3: an EAGLE-3 head",
        fix="-m TARGET --draft-model eagle3",
        accepted_by="inspect draft",
    ),
    WrongModel(
        "qwen3", 3, expected="a model on the hub is named ORG/qwen3", fix="spd pull ORG/qwen3"
    ),
    WrongModel(
        HUB, 2, expected=f"{HUB}: is an address", fix="spd pull org/name\n       -m org/name\n"
    ),
    WrongModel(f"{HUB}/tree/main", 2, expected="is an address", fix="spd pull org/name\n"),
    WrongModel("hf.co/org/name:Q4_K_M", 2, expected="is an address", fix="spd pull org/name\n"),
    WrongModel(
        f"{HUB}/blob/v2/config.json",
        2,
        expected="is an address",
        fix="spd pull org/name --revision v2\n",
    ),
    WrongModel(
        "org/half",
        3,
        expected=f"org/half: {INCOMPLETE}there is no model.safetensors",
        fix="spd pull org/half",
    ),
    WrongModel(
        "org/parts",
        3,
        expected=f"org/parts: {INCOMPLETE}",
        fix="spd pull org/parts",
        accepted_by="convert-mtp",
    ),
    WrongModel(
        "org/begun",
        4,
        expected="has no tokenizer.json",
        fix="spd pull org/begun, if",
        accepted_by=READS_NO_TEXT,
    ),
    WrongModel(
        "org/empty",
        3,
        expected=f"org/empty: {INCOMPLETE}there is no config.json",
        fix="spd pull org/empty",
    ),
    WrongModel("org/adapter", 4, expected="org/adapter: is a LoRA adapter", fix="-m org/base"),
    WrongModel("dem", 3, expected="did you mean demo?", fix="-m demo"),
    WrongModel("half", 3, expected="did you mean org/half?", fix="-m org/half"),
    WrongModel(
        "parent",
        4,
        expected="parent: is no model folder, but holds 2",
        fix="-m parent/one\n       -m parent/two\n",
    ),
    WrongModel(
        "deep", 4, expected="deep: is no model folder, but holds 1", fix="-m deep/org/name\n"
    ),
    WrongModel(
        "hub/models--org--half", 4, expected="is no model folder, but holds 1", fix="-m org/half"
    ),
    WrongModel(
        "pickle/config.json", 4, expected="pickle/config.json: is a file", fix="-m pickle\n"
    ),
    WrongModel(
        "lfs/model.safetensors", 4, expected="lfs/model.safetensors: is a file", fix="-m lfs\n"
    ),
    WrongModel(
        "text/notes", 4, expected="text/notes: is a file, and not a GGUF file", fix=MODEL_FIX
    ),
    WrongModel("text", 3, expected="text: is no model folder: there is no", fix=MODEL_FIX),
    WrongModel("./gone", 3, expected="gone: there is no such folder or file", fix=""),
]


@pytest.fixture
def wrong_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder and a cache that hold the wrong models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def cached(name: str) -> str:
        refs = tmp_path / f"hub/models--org--{name}/refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text("a" * 40)
        return f"hub/models--org--{name}/snapshots/{'a' * 40}"

    adapter, half, parts, begun = (cached(name) for name in ("adapter", "half", "parts", "begun"))
    for name in ("lfs", "pickle", half, begun, parts, "parent/one", "parent/two", "deep/org/name"):
        config = write_model(tmp_path / name, max_position_embeddings=2048) / "config.json"
    (tmp_path / begun / "tokenizer.json").unlink()
    head = make_head_config(json.loads(config.read_text()), "x", "", 1, quantized=False)
    base = json.dumps({"base_model_name_or_path": "org/base"})
    (tmp_path / cached("empty")).mkdir(parents=True)
    for file, text in {
        "ggufs/m.gguf": "GGUF",
        "mtp/config.json": json.dumps(head),
        **{f"{folder}/adapter_config.json": base for folder in ("lora", adapter)},
        **{f"{folder}/adapter_model.safetensors": "" for folder in ("lora", adapter)},
        "lfs/model.safetensors": POINTER,
        "pickle/pytorch_model.bin": "",
        "text/notes": "no model",
        f"{parts}/model.safetensors.index.json": '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    shutil.copytree(demo_eagle3_folder(), tmp_path / "eagle3")
    return tmp_path


@pytest.mark.covers(count=16)
@pytest.mark.parametrize("wrong", WRONG_MODELS, ids=[wrong.name_or_path for wrong in WRONG_MODELS])
def test_a_wrong_model_is_named_with_a_fix(
    wrong: WrongModel, wrong_models: Path, spd_run: Callable
) -> None:
    for name in COMMANDS.keys() - set(wrong.accepted_by.split()):
        ran = spd_run(COMMANDS[name].replace("?", wrong.name_or_path).split(), stdin=b"Hi\n")
        message, _, fixes = ran.err.partition("\n  fix: ")
        assert ran.code == wrong.code and message.startswith("error: "), (name, ran)
        assert wrong.expected in message, (name, ran)
        assert "\n" not in message and wrong.fix in fixes, (name, ran)


DENSE = Release(hidden=64, inner=96, layers=4, heads=2, key_value_heads=1, value_heads=32)
SPARSE = replace(DENSE, experts=(4, 2, 32))
ROPE = "rope_parameters"
IDS = ("--prompt-ids", "1,2,3")
Change = Callable[[list[Entry]], list[Entry]]


def write(folder: Path, row: Release, change: Change = list, **text: Any) -> Path:
    """Write a small model whose data is a hole; text: other values of its `text_config`."""
    config = config_of(row)
    config["text_config"] |= {"vocab_size": 512, "eos_token_id": 1, **text}
    entries = change([*text_tensors(row), *mtp_tensors(row)])
    tables = ("embed_tokens.weight", "lm_head.weight")
    entries = [(n, d, (512, *s[1:]) if n.endswith(tables) else s) for n, d, s in entries]
    write_hollow(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_shape(ending: str, *shape: int) -> Change:
    """Return a change that gives tensors with this ending a shape, or removes them without one."""
    return lambda entries: [
        (n, d, shape if n.endswith(ending) else s)
        for n, d, s in entries
        if shape or not n.endswith(ending)
    ]


def add_tensor(name: str, *shape: int) -> Change:
    return lambda entries: [*entries, (name, "BF16", shape)]


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["rwkv"] * 4}, "layer_types: 'rwkv' is not supported"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types: is not a list of 4 names"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types: no layer is full_attention"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: 0 is not"),
    ({"linear_num_key_heads": 12}, "linear_num_key_heads: 12 does not divide 32 heads"),
    ({"linear_num_value_heads": 0}, "linear_num_value_heads: 0 is not a whole number"),
    ({"linear_value_head_dim": 100_000}, "linear_value_head_dim: 100000 is not a whole"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not supported"),
    ({"attn_output_gate": False}, "attn_output_gate: false is not supported"),
    ({ROPE: {"partial_rotary_factor": 0.0}}, "partial_rotary_factor: 0 of 256 is no even"),
    ({ROPE: {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: 1.5 is not"),
    ({ROPE: {"rope_type": "spiral"}}, "rope_type: 'spiral' is not supported"),
    ({ROPE: {"rope_theta": 0}}, "rope_theta: 0 is not"),
    ({ROPE: [0.25]}, "rope_parameters: "),
]
"""Wrong keys of a configuration, and the expected messages."""


EXPERT = "layers.1.mlp.experts."
FC = "mtp.fc.weight"
IN_FILE = " in model.safetensors: "
GATE_UP = f"{EXPERT}gate_up_proj"
TWICE = f"{EXPERT}2.up_proj.weight"
QUERIES = "self_attn.q_proj.weight"
SHARED = "layers.1.mlp.shared_expert_gate.weight"
MTP_DOWN = "mtp.layers.0.mlp.experts."
RECURRENT = "mtp.layers.0.linear_attn.A_log"
EMBEDS = "mtp.embed_tokens.weight"
TENSORS: list[tuple[Release, Change, str]] = [
    (
        DENSE,
        change_shape("layers.0.linear_attn.A_log"),
        "model.layers.0.linear_attn.A_log: is missing",
    ),
    (DENSE, change_shape("A_log", 16), f"A_log{IN_FILE}shape is [16], expected [32]"),
    (
        DENSE,
        change_shape(QUERIES, 512, 64),
        f"{QUERIES}{IN_FILE}shape is [512, 64], expected [1024, 64]",
    ),
    (SPARSE, change_shape(f"{EXPERT}down_proj"), f"{EXPERT}0.down_proj.weight: is missing"),
    (SPARSE, change_shape(GATE_UP, 256, 64), f"{EXPERT}0.gate_proj.weight: is missing"),
    (
        SPARSE,
        change_shape(GATE_UP, 4, 64, 32),
        f"{EXPERT}0.gate_proj.weight{IN_FILE}shape is [32, 32], expected",
    ),
    (
        SPARSE,
        add_tensor(f"model.language_model.{TWICE}", 32, 64),
        f"{TWICE}: is in model.safetensors too",
    ),
    (SPARSE, change_shape(SHARED), f"{SHARED}: is missing"),
    (DENSE, change_shape(FC, 32, 64), f"{FC}{IN_FILE}shape is [32, 64]"),
    (DENSE, change_shape("mtp.norm.weight"), "mtp.norm.weight: is missing"),
    (SPARSE, change_shape(f"{MTP_DOWN}down_proj"), f"{MTP_DOWN}0.down_proj.weight: is missing"),
    (DENSE, add_tensor(RECURRENT, 32), RECURRENT),
    (DENSE, add_tensor(EMBEDS, 512, 64), EMBEDS),
]
"""Changes of the tensors, and the expected messages."""


def first_line(ran: Any) -> str:
    """Return the first line of an error with exit code 4."""
    line = ran.err.partition("\n")[0]
    assert ran.code == 4 and line.startswith("error: ") and ran.out == b"", ran
    return line.replace("'", "")


@pytest.mark.parametrize(("changed", "expected"), CONFIGS)
def test_a_wrong_key_is_named(changed, expected, tmp_path, spd_run) -> None:
    folder = write(tmp_path, DENSE, **changed)
    for argv in (("generate", "-m", folder, *IDS), ("inspect", folder)):
        line = first_line(spd_run(argv))
        assert f"{tmp_path / 'config.json'}: " in line and expected.replace("'", "") in line, line


@pytest.mark.parametrize(("row", "change", "expected"), TENSORS)
def test_a_wrong_tensor_is_named(row, change, expected, tmp_path, spd_run) -> None:
    """A tensor of the MTP layer is named with --spec mtp, and by `inspect`."""
    folder = write(tmp_path, row, change)
    line = first_line(spd_run("generate", "-m", folder, "--spec", "mtp", IDS))
    assert str(folder) in line and expected in line, line
    report = spd_run("inspect", folder)
    assert report.code == (0 if expected.startswith("mtp.") else 4), report
    assert expected in " ".join((report.text + report.err).split()).replace("'", ""), report
