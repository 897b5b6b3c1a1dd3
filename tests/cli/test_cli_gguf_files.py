"""GGUF files without a vocabulary on the command line: what shows them, and what reads folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.tiny_gguf import write_tiny_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.Q4_K_M.gguf", "Q4_K")


def test_it_writes_tokens(spd_run: Any, file: Path) -> None:
    words = ["generate", "-m", str(file), "--prompt-ids", "1,2,3", "-n", "8", "--ignore-eos"]
    found = spd_run(*words, "--temperature", "0", "--json").json
    assert len(found["token_ids"]) == 8
    assert found["plan"]["weights_reason"].startswith("Q4_K")


def test_it_is_shown(spd_run: Any, file: Path) -> None:
    found = spd_run("inspect", str(file), "--json").json["target"]
    assert found["gguf"]["architecture"] == "llama"
    assert found["gguf"]["types"] == ["16 Q4_K", "5 F32"]
    assert found["gguf"]["general"] == {"architecture": "llama", "name": "Tiny"}
    assert found["stored_dtypes"] == ["F32", "Q4_K"]
    assert found["template"] == "none: use --raw"


@pytest.mark.parametrize("command", ["quantize", "convert-mtp"])
def test_what_writes_folders_reads_folders(
    spd_run: Any, file: Path, tmp_path: Path, command: str
) -> None:
    told = spd_run(command, str(file), str(tmp_path / "new"))
    assert told.code == 2
    assert f"is a GGUF file, spd {command} reads a folder" in told.err.replace("\n", " ")
    assert not (tmp_path / "new").exists()
