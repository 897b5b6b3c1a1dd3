"""The README says what the program says: its first two commands, its option names, its listed output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The fenced block after `<!-- marker -->`."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, f"no block marked {marker}"
    return found.group(1)


def test_it_opens_with_the_two_commands() -> None:
    first, second = README.index("<!-- run -->"), README.index("<!-- test -->")
    assert first < second < README.index("\n## ")
    for marker in ("run", "test"):
        commands = [line for line in block(marker).splitlines() if line.strip()]
        assert len(commands) == 1 and "venv" in commands[0], "one command each, from nothing"


def test_every_option_it_names_exists() -> None:
    known = {"--help", "--version"}
    for command in ("chat", "generate", "inspect", "bench", "compare", "explain", "verify", "convert-mtp"):
        done = subprocess.run(
            [sys.executable, "-m", "spd", command, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
            check=True,
        )
        known |= set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    section = README[README.index("## Use") :]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section[: section.index("\n## ", 5)]))
    assert named and named <= known, named - known


def test_the_tree_is_the_folder() -> None:
    listed = set(re.findall(r"^([\w.]+/) ", block("tree"), re.MULTILINE))
    assert listed
    for name in listed:
        assert (ROOT / name).is_dir(), name
