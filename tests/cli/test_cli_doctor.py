"""`spd doctor`: real runs, what a fault looks like, and that asking for help costs nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spd.formats.demo
from spd.formats.demo import demo_faults, demo_folder
from spd.runtime.lab import diagnostics, smoke
from spd.runtime.lab.diagnostics import FAILED, OK, WARNING, Finding, Step
from tests.cli.conftest import refused
from tests.json_schema import faults

pytestmark = pytest.mark.usefixtures("keep_threads")

ROOT = Path(__file__).resolve().parents[2]
LOOKED_AT = ["packages", "memory", "disk", "hf cache", "demo", "terminal", "torch", "cpu", "cuda"]
LOOKED_AT += ["triton", "compile cache", "plan"]
TRIED = ["gpu kernel", "gpu tiles", "cpu kernel", "generation"]


def statuses(shown: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in shown["checks"]}


def one(shown: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(check for check in shown["checks"] if check["name"] == name)
    return found


def test_a_real_run() -> None:
    """Everything at once, in a process of its own that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "spd", "doctor", "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert time.perf_counter() - began < 90, "fifteen on an idle machine; a wide margin"
    assert done.returncode == 0 and done.stderr == "", done
    shown = json.loads(done.stdout)
    assert faults(shown, "doctor") == [] and shown["ok"] is True
    assert list(statuses(shown)) == LOOKED_AT + TRIED
    for check in shown["checks"]:
        assert check["line"] and "\n" not in check["line"]
        assert bool(check["fix"]) == (check["status"] != OK)
    kernel = one(shown, "gpu kernel")
    if one(shown, "cuda")["facts"]["devices"]:
        assert (
            kernel["facts"]["ran"] and kernel["facts"]["error"] <= 2 * kernel["facts"]["torch_error"] + 1e-3
        )
    else:
        assert kernel["line"] == "none is compiled or run: there is no GPU"
        assert one(shown, "gpu tiles")["line"] == "not asked: there is no GPU"
    product = one(shown, "cpu kernel")["facts"]
    assert 0 < product["error"] < 1e-2 and product["microseconds"] > 0
    text = one(shown, "generation")["facts"]
    assert len(text["tokens"]["off"]) == 8 == text["rounds"]["off"] > text["rounds"]["draft"]
    assert one(shown, "plan")["facts"]["model"] == str(demo_folder())


def test_lines_of_a_quick_look(spd_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd() -> Finding:
        return Finding(WARNING, "odd", ("mend it",))

    monkeypatch.setattr(diagnostics, "triton_library", odd)
    ran = spd_run("doctor", "--quick")
    assert ran.code == 0 and ran.err == ""
    lines = ran.text.splitlines()
    names = [line[2:15].strip() for line in lines if not line.startswith("    fix: ")][:-1]
    assert names == LOOKED_AT
    assert "! triton         odd\n    fix: mend it\n" in ran.text
    assert re.fullmatch(r"\d warnings? · details: spd doctor --json", lines[-1])


def test_a_check_that_raises_is_a_failed_one(spd_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("the numbers are\nnot there")

    monkeypatch.setattr(diagnostics, "main_memory", broken)
    ran = spd_run("doctor", "--quick")
    assert ran.code == 1 and ran.err == ""
    assert "✗ memory         RuntimeError: the numbers are\n    fix: " in ran.text
    assert ran.text.splitlines()[-1].startswith("1 problem")
    shown = spd_run("--json", "doctor", "--quick").json
    assert shown["ok"] is False and statuses(shown)["memory"] == FAILED
    assert "def broken" not in one(shown, "memory")["line"]
    assert "in broken" in one(shown, "memory")["facts"]["traceback"]
    assert all(status != FAILED for name, status in statuses(shown).items() if name != "memory")


def test_what_hangs_on_a_failure_is_not_asked(spd_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spd.formats.demo, "demo_faults", lambda folder: ["model.safetensors: gone"])
    ran = spd_run("doctor", "--quick", "--json")
    assert ran.code == 1
    assert (
        one(ran.json, "demo")["line"] == "demo/model.safetensors: gone; demo-hybrid/model.safetensors: gone"
        and one(ran.json, "demo")["fix"]
    )
    assert one(ran.json, "plan")["line"] == "not checked, because demo failed"
    assert Step("x", lambda: Finding(OK, "asked"), ("y",)).run({"y": Finding(WARNING, "")}).line == "asked"


def test_a_torch_that_cannot_be_imported(spd_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = spd_run("doctor", "--json")
    assert ran.code == 1 and one(ran.json, "torch")["line"].startswith("ModuleNotFoundError")
    for name in ("cpu", "cuda", "triton", "compile cache", "plan", *TRIED):
        assert one(ran.json, name)["line"] == "not checked, because torch failed"


def test_other_text_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def __init__(self, config: Any) -> None:
            self.spec = config.spec

        def stream(self, requests: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(token_ids=tuple(range(8)) if self.spec == "off" else (9,) * 8)]

        def metrics(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(rounds=8)

        def close(self) -> None:
            pass

    monkeypatch.setattr("spd.runtime.engine.engine.Engine", Liar)
    finding = smoke.equal_texts()
    assert finding.status == FAILED and "not the same text" in finding.line
    assert finding.facts["tokens"] == {"off": list(range(8)), "draft": [9] * 8}


def test_a_product_that_is_off_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from spd.kernels.native.library import NativeLibrary
    from spd.runtime.layers.linear import Linear

    for place, name in ((Linear, "product"), (NativeLibrary, "linear")):
        honest = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, honest=honest: honest(*given) + 9)
    monkeypatch.setattr(smoke, "SIZE", 256)
    assert smoke.cpu_kernel().status == FAILED


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.8.1", WARNING), ("2.9", OK), ("2.13.0+cpu", OK), ("2.14", WARNING), (None, FAILED)],
)
def test_versions(version: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name != "torch":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    finding = diagnostics.package_versions()
    assert finding.status == status
    assert finding.fix == (() if status == OK else ("pip install 'torch>=2.9,<2.14'",))


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    block = project[project.index("\ndependencies = [") : project.index("[project.optional")]
    asked = {}
    for name, words, marker in re.findall(r'"([\w-]+)([^";]*)([^"]*)"', block):
        if "python_version" in marker:  # stands in for a part of a newer Python
            continue
        bounds = {word[:1]: word.lstrip("<>=") for word in words.split(",")}
        asked[name] = (bounds[">"], bounds.get("<"))
    assert asked == dict(diagnostics.SUPPORTED)


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's that cannot be written, one that is not there, and the hub's."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = diagnostics.compile_cache()
    assert finding.status == WARNING and "cannot be written" in finding.line
    assert "TRITON_CACHE_DIR" in finding.fix[0]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert diagnostics.compile_cache().status == OK and not (tmp_path / "new").exists()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "not there yet" in diagnostics.hugging_face_cache().line
    (tmp_path / "hub" / "models--a--b" / "snapshots" / "c").mkdir(parents=True)
    assert diagnostics.hugging_face_cache().facts["models"] == ["a/b"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    assert diagnostics.hugging_face_cache().status == FAILED


def test_low_disk_and_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "LOW_MEMORY", 2**60)
    assert diagnostics.main_memory().status == WARNING
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert diagnostics.free_disk().status == WARNING


def test_every_file_of_the_demo_is_vouched_for(tmp_path: Path) -> None:
    """To write the list anew: `sha256sum $(git ls-files ...) > SHA256SUMS` in the demo's folder."""
    demo = demo_folder()
    assert demo_faults(demo) == []
    listed = {line.split(maxsplit=1)[1] for line in (demo / "SHA256SUMS").read_text().splitlines()}
    needed = {str(p.relative_to(demo)) for p in demo.rglob("*") if p.suffix in (".json", ".safetensors")}
    assert listed == needed - {"training.json", "eagle3/training.json"}
    shutil.copytree(demo, tmp_path / "demo")
    with (tmp_path / "demo" / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff")
    (tmp_path / "demo" / "draft" / "config.json").unlink()
    faults = demo_faults(tmp_path / "demo")
    assert [fault.split(":")[0] for fault in faults] == ["model.safetensors", "draft/config.json"]


def test_a_bug_report_holds_no_names(
    spd_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spd.cli.commands.doctor import redacted

    home = tmp_path / "home" / "someone"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "models"))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    ran = spd_run("doctor", "--quick", "--bug-report", tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert "read it before you send it" in ran.err and json.loads(text)["schema"] == "spd.doctor/1"
    assert {"packages", "plan"} <= {check["name"] for check in json.loads(text)["checks"]}
    assert str(home) not in text and "someone" not in text and "hf_abc" not in text and "~/models" in text
    assert redacted("x /h/me/a hf_12345678 box1 boxes", Path("/h/me"), "box1") == "x ~/a TOKEN HOST boxes"


def test_a_bug_report_that_cannot_be_written(spd_run: Callable) -> None:
    refused(spd_run("doctor", "--quick", "--bug-report", "/nowhere/x"), 2, "cannot write")
