"""A GGUF file in commands: its template, tokenizer and end of turn, and its name in a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spd.cli.commands.verify import file_hashes
from spd.formats.gguf.file_kind import model_files
from spd.formats.gguf.vocabulary import CONTROL
from spd.runtime.plan.config import EngineConfig
from spd.server.wire import engine_identity
from tests.formats.gguf.gguf_helpers import Value, write_gguf
from tests.formats.gguf.test_formats_gguf_tokenizer import byte_level, tokenizer_of
from tests.recipes.tiny_gguf import tiny_metadata, tiny_tensors

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)
VOCABULARY = byte_level([("<|user|>", CONTROL), ("<|end|>", CONTROL)], pre="qwen2")


def write_model(path: Path, **keys: Value) -> Path:
    """Write a tiny Llama with a byte-level vocabulary."""
    metadata = {**tiny_metadata(vocab=258), **VOCABULARY, **keys}
    return write_gguf(path, metadata, tiny_tensors("F32", vocab=258))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf", **{"tokenizer.chat_template": TEMPLATE})


def test_a_prompt_is_written_by_the_files_template(file: Path, spd_run: Callable) -> None:
    ran = spd_run("generate", "-m", file, "Hi <|end|>", "-n", "4", "--json")
    expected = tokenizer_of(dict(VOCABULARY)).encode("<|user|>", parse_special=True)
    expected += [*tokenizer_of(dict(VOCABULARY)).encode("Hi <|end|>"), 257]
    assert ran.code == 0 and ran.json["usage"]["prompt_tokens"] == len(expected)
    assert len(ran.json["token_ids"]) <= 4


def test_a_turn_ends_at_the_files_own_end(file: Path, spd_run: Callable) -> None:
    arguments = ("generate", "-m", file, "Hi", "-n", "8", "--json", "--set", "logit_bias=257=100")
    ended = spd_run(arguments).json
    assert ended["finish_reason"] == "stop" and ended["text"] == ""


def test_a_base_model_goes_on_with_a_text(tmp_path: Path, spd_run: Callable) -> None:
    file = write_model(tmp_path / "base.gguf")
    ran = spd_run("generate", "-m", file, "Hi")
    assert ran.code == 4 and "has no chat template" in ran.err and "--raw" in ran.err
    usage = spd_run("generate", "-m", file, "--raw", "Hi", "-n", "3", "--json").json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)


def test_a_file_that_ollama_keeps_answers_as_itself(
    file: Path, tmp_path: Path, spd_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    root = tmp_path / "ollama"
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (root / "blobs").mkdir()
    (root / "blobs" / f"sha256-{digest}").write_bytes(file.read_bytes())
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    arguments = ("Hi", "-n", "8", "--temperature", "0", "--json")
    stored_reply, file_reply = (
        spd_run("generate", "-m", model, arguments).json for model in ("tiny", file)
    )
    assert stored_reply["token_ids"] == file_reply["token_ids"]
    models = spd_run("ls", "--json").json["models"]
    assert [(model["model"], model["supported"]) for model in models] == [("tiny:latest", True)]


def test_a_server_knows_its_file_and_notices_another(file: Path) -> None:
    made_of = engine_identity(EngineConfig(model=file))
    assert made_of["model"][0] == str(file) and made_of["model"][1][0] == file.name
    file.write_bytes(file.read_bytes() + b"\0")
    assert engine_identity(EngineConfig(model=file)) != made_of


def test_the_files_of_a_model_are_all_of_its_splits(tmp_path: Path) -> None:
    names = [f"M-0000{number}-of-00003.gguf" for number in (1, 2)]
    for name in (*names, "M-00001-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert [path.name for path in model_files(tmp_path / names[1])] == names
    assert set(file_hashes(tmp_path / names[0], str(tmp_path / "other.gguf"))) == {
        *names,
        "draft/other.gguf",
    }
