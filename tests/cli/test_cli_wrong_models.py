"""What is no model that spd can open: every command says in one line what it is, and what to type instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spd.formats.demo import demo_eagle3_folder
from spd.formats.mtp import head_config
from tests.cli.conftest import refused, write_model

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 100\n"
HUB = "https://huggingface.co/org/name"
COMMANDS = {
    "generate": ("generate", "-m", "?", "Hi"),
    "chat": ("chat", "?", "--no-save"),
    "bench": ("bench", "-m", "?"),
    "verify": ("verify", "-m", "?"),
    "inspect": ("inspect", "?"),
    "convert-mtp": ("convert-mtp", "?", "head"),
    "draft": ("generate", "--draft-model", "?", "Hi"),
}
INCOMPLETE = "the copy in the local cache is incomplete: "
THINGS = [  # what is named, the exit code, its words, what is to be typed, and the commands that take it
    ("ggufs/m.gguf", 4, "ggufs/m.gguf: GGUF is not supported", "spd pull ORG/NAME", ""),
    ("gone/m.GGUF", 4, "gone/m.GGUF: GGUF is not supported", "spd pull ORG/NAME", ""),
    ("ggufs", 4, "ggufs/m.gguf: GGUF is not supported", "spd pull ORG/NAME", ""),
    ("lora", 4, "lora: is a LoRA adapter of 'org/base'", "-m org/base", ""),
    ("lfs", 4, "lfs/model.safetensors: is a git-lfs pointer", "git -C lfs lfs pull", ""),
    ("pickle", 4, "pickle/pytorch_model.bin: pickle formats", " -I -m spd.cli.unpickle pickle\n", ""),
    ("mtp", 4, "mtp: an MTP head drafts for another model", "-m TARGET --mtp mtp", "convert-mtp"),
    ("eagle3", 4, "eagle3: an EAGLE-3 head", "-m TARGET --draft-model eagle3", "inspect draft"),
    ("qwen3", 3, "a model on the hub is named ORG/qwen3", "spd pull ORG/qwen3", ""),
    (HUB, 2, f"{HUB}: is an address", "spd pull org/name\n       -m org/name\n", ""),
    (f"{HUB}/tree/main", 2, "is an address", "spd pull org/name\n", ""),
    ("hf.co/org/name:Q4_K_M", 2, "is an address", "spd pull org/name\n", ""),
    (f"{HUB}/blob/v2/config.json", 2, "is an address", "spd pull org/name --revision v2\n", ""),
    ("org/half", 3, f"org/half: {INCOMPLETE}there is no model.safetensors", "spd pull org/half", ""),
    ("org/parts", 3, f"org/parts: {INCOMPLETE}", "spd pull org/parts", "convert-mtp"),
    (
        "org/begun",
        4,
        "has no tokenizer.json",
        "spd pull org/begun, if",
        "bench verify inspect convert-mtp draft",
    ),
    ("org/empty", 3, f"org/empty: {INCOMPLETE}there is no config.json", "spd pull org/empty", ""),
    ("org/adapter", 4, "org/adapter: is a LoRA adapter", "-m org/base", ""),
    ("dem", 3, "did you mean demo?", "-m demo", ""),
    ("half", 3, "did you mean org/half?", "-m org/half", ""),
    ("parent", 4, "parent: is no model folder, but holds 2", "-m parent/one\n       -m parent/two\n", ""),
    ("deep", 4, "deep: is no model folder, but holds 1", "-m deep/org/name\n", ""),
    ("hub/models--org--half", 4, "is no model folder, but holds 1", "-m org/half", ""),
    ("pickle/config.json", 4, "pickle/config.json: is a file", "-m pickle\n", ""),
    ("lfs/model.safetensors", 4, "lfs/model.safetensors: is a file", "-m lfs\n", ""),
]


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a cache that hold each of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def model(name: str, **files: str) -> Path:
        folder = write_model(tmp_path / name, max_position_embeddings=2048)
        for file, text in files.items():
            (folder / file.replace("__", ".")).write_text(text)
        return folder

    def cached(name: str) -> str:
        (tmp_path / f"hub/models--org--{name}/refs").mkdir(parents=True)
        (tmp_path / f"hub/models--org--{name}/refs/main").write_text("a" * 40)
        return f"hub/models--org--{name}/snapshots/{'a' * 40}"

    adapter = json.dumps({"base_model_name_or_path": "org/base"})
    for folder in ("ggufs", cached("empty"), "mtp"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("lora", cached("adapter")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "adapter_config.json").write_text(adapter)
        (tmp_path / folder / "adapter_model.safetensors").write_text("")
    (tmp_path / "ggufs" / "m.gguf").write_bytes(b"GGUF")
    model("lfs", model__safetensors=POINTER)
    model("pickle", pytorch_model__bin="")
    model(cached("half"))
    (model(cached("begun")) / "tokenizer.json").unlink()
    parts = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    model(cached("parts"), model__safetensors__index__json=json.dumps(parts))
    config = json.loads((model("parent/one") / "config.json").read_text())
    model("parent/two")
    model("deep/org/name")
    (tmp_path / "mtp" / "config.json").write_text(
        json.dumps(head_config(config, "x", "", 1, quantized=False))
    )
    shutil.copytree(demo_eagle3_folder(), tmp_path / "eagle3")
    return tmp_path


@pytest.mark.parametrize(("thing", "code", "words", "fix", "taken"), THINGS, ids=[row[0] for row in THINGS])
def test_it_is_said_what_it_is(
    thing: str, code: int, words: str, fix: str, taken: str, things: Path, spd_run: Callable
) -> None:
    for name, argv in COMMANDS.items():
        if name not in taken.split():
            ran = spd_run(*(thing if word == "?" else word for word in argv), stdin=b"Hi\n")
            said, _, fixes = ran.err.partition("\n  fix: ")
            assert ran.code == code and said.startswith("error: ") and words in said, (name, ran)
            assert "\n" not in said and fix in fixes, (name, ran)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("gone/m.GGUF", 4, "GGUF is not supported"),
        (f"{HUB}/tree/main", 2, "fix: spd pull org/name\n"),
        ("demo", 2, "is built in"),
    ],
)
def test_what_cannot_be_downloaded(name: str, code: int, words: str, spd_run: Callable) -> None:
    refused(spd_run("pull", name), code, words)
