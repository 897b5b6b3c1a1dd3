"""What docs/serve.md shows works: its curl, its Python, and the fields that it lists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from spd.cli.serve.wishes import CHAT, IGNORED, IGNORED_TOO
from tests.cli.serve.conftest import Served
from tests.cli.serve.test_serve_openai import interpreter

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The page's code of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_curl(served: Served) -> None:
    (command,) = (block for block in blocks("sh") if block.startswith("curl"))
    ran = subprocess.run(
        ["sh", "-c", "curl -s " + command.removeprefix("curl").replace("7373", str(served.port))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"].startswith("Join two or more")


@pytest.mark.openai
def test_python(served: Served) -> None:
    python = interpreter()
    if python is None:
        pytest.skip("no interpreter has the openai package; OPENAI_PYTHON names one")
    (code,) = blocks("python")
    command = [python, "-c", code.replace("7373", str(served.port))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.startswith("Join two or more")


def test_every_field_is_listed() -> None:
    beside = {"messages", "model", "stream", "speculative", "temperature", *IGNORED, *IGNORED_TOO}
    penalties = {name for name in CHAT if name.endswith("_penalty")}
    assert {name for name in CHAT - beside - penalties if f"`{name}`" not in PAGE} == set()
