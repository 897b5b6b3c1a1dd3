"""The built wheel, not the checkout: it carries the demos, and its executable does the main job."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.json_schema import SCHEMAS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_the_demos_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    needed = {
        f"spd/formats/{name}/model.safetensors" for name in ("demo", "demo/draft", "demo-hybrid")
    }
    needed |= {"spd/py.typed", "spd/formats/demo/tokenizer.json", "spd/runtime/lab/prompts.jsonl"}
    needed |= {f"spd/cli/completions/{name}" for name in ("spd.bash", "_spd", "spd.fish")}
    needed |= {str(path.relative_to(ROOT)) for path in SCHEMAS.glob("*.json")}
    assert needed - set(names) == set()
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "drafters/"))]
    assert wheel.stat().st_size < 50 * 2**20


@pytest.mark.slow
def test_the_installed_executable_answers(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    assert [p.name for p in (site / "bin").iterdir()] == ["spd"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [str(site / "bin" / "spd"), "generate", "-m", "demo", "What does os.path.join do?"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "path" in done.stdout and done.stdout.endswith("\n") and "\x1b" not in done.stdout
    print_location = [sys.executable, "-c", "import spd; print(spd.__file__)"]
    completed = subprocess.run(
        print_location, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert str(site) in completed.stdout
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        ran = subprocess.run(
            [sys.executable, "-c", snippet],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()
