"""docs/mtp.md is true: its commands run in the order in which they stand, and it names every layout."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.mtp import FAMILIES, head_config
from tests.recipes.mtp_folders import write_deepseek

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "mtp.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line
]
LOADING = ("generate", "bench")


def run_all(commands: list[str], folder: Path, model: str) -> None:
    """Each command in one folder, one after the other; `demo` stands for `model`."""
    for line in commands:
        words = [model if word == "demo" else word for word in shlex.split(line)]
        assert words[0] == "spd"
        ran = subprocess.run(
            [sys.executable, "-m", "spd", *words[1:]],
            capture_output=True,
            text=True,
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        )
        assert ran.returncode == 0 and ran.stdout, (line, ran.stderr)


def test_commands_that_load_no_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_deepseek(model)
    light = [line for line in COMMANDS if not any(word in line for word in (*LOADING, "explain"))]
    assert len(light) >= 3
    run_all(light, tmp_path, str(model))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head"}


@pytest.mark.slow
def test_every_command(tmp_path: Path) -> None:
    """In the demo, as it stands there."""
    if ModelFolder(demo_folder()).mtp_source() is None:
        pytest.skip("this edition of the demo has no MTP layers")
    assert len(COMMANDS) >= 10
    run_all(COMMANDS, tmp_path, "demo")


def test_layouts_and_keys_are_all_there() -> None:
    for family in FAMILIES:
        assert f"`{family.name}`" in PAGE
    config = head_config({"architectures": ["X"]}, "x", "y", 1, quantized=False)
    for key in config:
        assert f"`{key}" in PAGE, key
    for key in config["speculators_config"]:
        assert f"speculators_config.{key}" in PAGE, key
    for key in config["speculators_config"]["verifier"]:
        assert f"verifier.{key}`" in PAGE, key
