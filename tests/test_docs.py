"""README and docs say what the program says: tables, commands, options and layouts; links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.formats.mtp import FAMILIES as LAYOUTS
from spd.formats.mtp import head_config
from spd.runtime.models import FAMILIES
from tests.recipes.mtp_folders import write_deepseek

ROOT = Path(__file__).resolve().parents[1]


def written(script: str) -> bytes:
    """What a script of docs/ writes anew."""
    command = [sys.executable, f"docs/{script}.py"]
    return subprocess.run(
        command, capture_output=True, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)}
    ).stdout


def test_supported_models_is_current() -> None:
    """To write it anew: `python docs/supported_models.py > docs/supported-models.md`."""
    assert written("supported_models") == (ROOT / "docs" / "supported-models.md").read_bytes()


def test_what_is_read_is_what_can_be_built() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(FAMILIES) | set(WRAPPERS)
    assert {text for _, text in WRAPPERS.values()} <= set(FAMILIES)
    page = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in SUPPORTED_ARCHITECTURES)
    assert "docs/supported-models.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_of_ranks_are_the_cost_models() -> None:
    """To write them anew: `python docs/parallel_tables.py`, whose tables stand under their names."""
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    tables = written("parallel_tables").decode().strip().split("\n\n")
    assert len(tables) == 3 and all(f"{table}\n" in page for table in tables)


@pytest.mark.slow
def test_the_table_of_hybrids_is_the_plans() -> None:
    """To write it anew: `PYTHONPATH=. python docs/hybrid_tables.py`, for the one in hybrids.md."""
    assert written("hybrid_tables").decode() in (ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")


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


MTP_PAGE = (ROOT / "docs" / "mtp.md").read_text()
MTP_COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", MTP_PAGE, re.DOTALL)
    for line in block.splitlines()
    if line
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
    light = [line for line in MTP_COMMANDS if not any(word in line for word in (*LOADING, "explain"))]
    assert len(light) >= 3
    run_all(light, tmp_path, str(model))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head"}


@pytest.mark.slow
def test_every_command(tmp_path: Path) -> None:
    """In the demo, as it stands there."""
    assert len(MTP_COMMANDS) >= 10
    run_all(MTP_COMMANDS, tmp_path, "demo")


def test_layouts_and_keys_are_all_there() -> None:
    for family in LAYOUTS:
        assert f"`{family.name}`" in MTP_PAGE
    config = head_config({"architectures": ["X"]}, "x", "y", 1, quantized=False)
    for key in config:
        assert f"`{key}" in MTP_PAGE, key
    for key in config["speculators_config"]:
        assert f"speculators_config.{key}" in MTP_PAGE, key
    for key in config["speculators_config"]["verifier"]:
        assert f"verifier.{key}`" in MTP_PAGE, key
