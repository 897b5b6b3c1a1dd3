"""GGUF files without a vocabulary on the command line, and commands that read folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.formats.gguf.gguf_helpers import write_gguf
from tests.recipes.tiny_gguf import tiny_metadata, tiny_tensors, write_tiny_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.Q4_K_M.gguf", "Q4_K")


def test_a_file_without_a_vocabulary_writes_tokens(spd_run: Any, file: Path) -> None:
    arguments = ["generate", "-m", str(file), "--prompt-ids", "1,2,3", "-n", "8"]
    arguments += ["--set", "ignore_eos=on"]
    reply = spd_run(arguments, "--temperature", "0", "--json").json
    assert len(reply["token_ids"]) == 8
    assert reply["plan"]["weights_reason"].startswith("Q4_K")


@pytest.mark.parametrize("other", ["Q2_K", "Q4_K"])
def test_types_of_few_bits_say_what_they_cost(spd_run: Any, tmp_path: Path, other: str) -> None:
    """Blocks of 256 weights have 84 bytes in the file, and 512 in memory."""
    file = write_tiny_gguf(tmp_path / "a.gguf", {"ffn_up.weight": "Q2_K", "": other}, layers=1)
    arguments = ["generate", "-m", str(file), "--prompt-ids", "1,2,3", "-n", "2"]
    err = " ".join(spd_run(arguments).err.split())
    assert "Q2_K multiplied out to bfloat16, 6.1 times its bytes" in err
    assert ("what has four bits or more is multiplied as stored; Q2_K" in err) == (other == "Q4_K")


def test_inspect_shows_lists_of_the_file(spd_run: Any, tmp_path: Path) -> None:
    lists: dict[str, Any] = {"tags": ["chat", "code"], "languages": ["en"], "sizes": [1, 2]}
    metadata = {f"general.{key}": value for key, value in {**lists, "none": []}.items()}
    file = write_gguf(tmp_path / "a.gguf", {**tiny_metadata(), **metadata}, tiny_tensors("F32"))
    general = spd_run("inspect", str(file), "--json").json["target"]["gguf"]["general"]
    joined = {"tags": "chat, code", "languages": "en", "sizes": "1, 2"}
    assert general == {"architecture": "llama", "name": "Tiny", **joined}


def test_inspect_shows_the_file(spd_run: Any, file: Path) -> None:
    target = spd_run("inspect", str(file), "--json").json["target"]
    assert target["gguf"]["architecture"] == "llama"
    assert target["gguf"]["types"] == ["16 Q4_K", "5 F32"]
    assert target["gguf"]["general"] == {"architecture": "llama", "name": "Tiny"}
    assert target["stored_dtypes"] == ["F32", "Q4_K"]
    assert target["template"] == "none: use --raw"


@pytest.mark.parametrize("command", ["quantize", "convert-mtp"])
def test_commands_that_write_folders_refuse_files(
    spd_run: Any, file: Path, tmp_path: Path, command: str
) -> None:
    result = spd_run(command, str(file), str(tmp_path / "new"))
    assert result.code == 2
    assert f"is a GGUF file, spd {command} reads a folder" in result.err.replace("\n", " ")
    assert not (tmp_path / "new").exists()
