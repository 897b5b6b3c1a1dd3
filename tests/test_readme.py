"""README and guide say what the program says: the first two commands, option names, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = (ROOT / "docs" / "guide.md", ROOT / "docs" / "mtp.md")
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
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


COMMANDS = (
    *("chat", "generate", "inspect", "bench", "compare", "explain", "verify", "convert-mtp"),
    *("pull", "ls", "rm", "doctor"),
)


def test_every_option_they_name_exists() -> None:
    known = {"--help", "--version"}
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "spd", command, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
            check=True,
        )
        known |= set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    before, _, rest = README.partition("\n## Install\n")  # which names options of pipx and uv
    pages = [before, rest[rest.index("\n## ") :], *(path.read_text("utf-8") for path in GUIDES)]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(pages)))
    assert len(named) > 30 and named <= known, named - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_they_link_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_and_architecture_are_short() -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150, name
