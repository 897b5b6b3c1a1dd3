"""README and docs agree with the program: tables, commands, options and layouts; links resolve."""

import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from spd.formats.folder import ModelFolder
from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.formats.mtp import make_head_config
from spd.formats.mtp_layout import MTP_FAMILIES
from spd.runtime.models import FAMILIES
from tests.recipes.mtp_folders import write_deepseek

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MTP_PAGE = (ROOT / "docs" / "mtp.md").read_text(encoding="utf-8")
MTP_COMMANDS = re.sub(
    "\n+", "\n", "".join(re.findall(r"```sh\n(.*?)```", MTP_PAGE, re.DOTALL))
).splitlines()
COMMANDS = ["chat", "generate", "inspect", "bench", "compare", "explain", "verify", "convert-mtp"]
COMMANDS += ["pull", "ls", "rm", "doctor"]
GUIDES = (ROOT / "docs" / "guide.md", ROOT / "docs" / "mtp.md")
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def python(*words: str, folder: Path = ROOT) -> str:
    """Return the output of a Python command that ends well."""
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "200"}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder, env=env)
    assert done.returncode == 0 and done.stdout, (words, done.stderr)
    return done.stdout


def test_supported_models_is_current() -> None:
    """To write it anew: `python docs/supported_models.py > docs/supported-models.md`."""
    page = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert python("docs/supported_models.py") == page
    assert all(f"| `{name}` |" in page for name in SUPPORTED_ARCHITECTURES)
    assert "docs/supported-models.md" in README
    assert set(SUPPORTED_ARCHITECTURES) == set(FAMILIES) | set(WRAPPERS)
    assert {text for _, text in WRAPPERS.values()} <= set(FAMILIES)


def test_the_tables_of_ranks_are_the_cost_models() -> None:
    """To write them anew: `python docs/parallel_tables.py`."""
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    tables = python("docs/parallel_tables.py").strip().split("\n\n")
    assert len(tables) == 3 and all(f"{table}\n" in page for table in tables)


@pytest.mark.slow
def test_the_table_of_hybrids_is_the_plans() -> None:
    """To write it anew: `PYTHONPATH=. python docs/hybrid_tables.py`."""
    assert python("docs/hybrid_tables.py") in (ROOT / "docs" / "hybrids.md").read_text(
        encoding="utf-8"
    )


def test_it_opens_with_the_two_commands_and_is_short() -> None:
    first = README.index("<!-- run -->")
    second = README.index("<!-- test -->")
    assert first < second < README.index("\n## ")
    for marker in ("run", "test"):
        (block,) = re.findall(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.DOTALL)
        assert len(block.split("\n")) == 2 and "venv" in block, "one command each, from nothing"
    for name in ("README.md", "ARCHITECTURE.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 150, name


def test_they_count_the_demos_parameters_as_inspect_does() -> None:
    tensors = ModelFolder.resolve("demo").checkpoint.tensors.values()
    stored = sum(prod(meta.shape) for meta in tensors)
    assert f"parameters {stored:,} " in README
    for page in (README, GUIDES[0].read_text("utf-8")):
        assert f"({stored / 1e6:.1f} M stored" in page


def test_every_option_they_name_exists() -> None:
    options = {"--help", "--version"}
    for command in COMMANDS:
        options |= set(re.findall(r"--[a-z][a-z-]+", python("-m", "spd", command, "--help")))
    before, _, after_install = README.partition(
        "\n## Install\n"
    )  # which names options of pipx and uv
    pages = [
        before,
        after_install[after_install.index("\n## ") :],
        *(path.read_text("utf-8") for path in GUIDES),
    ]
    named_options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(pages)))
    assert len(named_options) > 30 and named_options <= options, named_options - options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_they_link_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def run_each(commands: list[str], folder: Path, model: str) -> None:
    for line in commands:
        first, *words = [model if word == "demo" else word for word in shlex.split(line)]
        assert first == "spd" and python("-m", "spd", *words, folder=folder)


def test_documented_commands_without_weights_run(tmp_path: Path) -> None:
    write_deepseek(tmp_path / "model")
    light = [line for line in MTP_COMMANDS if not re.search("generate|bench|explain", line)]
    assert len(light) >= 3
    run_each(light, tmp_path, str(tmp_path / "model"))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head"}


@pytest.mark.slow
def test_every_command_in_the_demo_as_it_stands_there(tmp_path: Path) -> None:
    assert len(MTP_COMMANDS) >= 9
    run_each(MTP_COMMANDS, tmp_path, "demo")


def test_layouts_and_keys_are_all_there() -> None:
    config = make_head_config({"architectures": ["X"]}, "x", "y", 1, quantized=False)
    keys = config["speculators_config"]
    key_texts = [f"`{key}" for key in config] + [f"speculators_config.{key}" for key in keys]
    key_texts += [f"verifier.{key}`" for key in keys["verifier"]] + [
        f"`{family.name}`" for family in MTP_FAMILIES
    ]
    assert [key_text for key_text in key_texts if key_text not in MTP_PAGE] == []


def test_the_list_of_changes_is_short_and_by_kind() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for release in text.split("\n## ")[1:]:
        title, *lines = release.rstrip().splitlines()
        assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+ \((unreleased|20[0-9-]{8})\)", title)
        assert len(lines) <= 60, f"{title}: {len(lines)} lines; say less, or leave out the smallest"
        kinds = [line.removeprefix("### ") for line in lines if line.startswith("#")]
        assert kinds == [kind for kind in ("Added", "Changed", "Fixed") if kind in kinds]
        assert {line[:2] for line in lines if line} <= {"- ", "  ", "##"}
        assert max(map(len, lines)) <= 120
