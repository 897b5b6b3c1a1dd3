"""The GPU suite without a GPU: its isolation, its report, and checks that can find what they look for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite.digest import RENDERERS
from benchmarks.gpu_suite.report import REPORT
from benchmarks.gpu_suite.suite import PROBES, Probe, load_function, run_suite

HERE = "tests.benchmarks.fake_probes"


COMPARED = {"differing_tokens": 0, "compared_tokens": 50_000, "differing_counts": 0, "settings": {}}
MET = {"status": "ok", "result": COMPARED}
STATIC = {"a": {"ratios": {"spd plain / transformers static compiled": {"median": 0.9}}, "errors": {}}}
"""Asks for nothing, also below 1."""


@pytest.mark.parametrize(
    ("probes", "status"),
    [
        ({"self_draft": MET}, 0),
        ({"self_draft": {"status": "ok", "result": {**COMPARED, "differing_tokens": 1}}}, 1),
        ({"self_draft": MET, "spd_demo": {"status": "ok", "result": {**COMPARED}}}, 1),  # too few tokens
        ({"self_draft": MET, "device": {"status": "failed", "error": ["E"]}}, 1),
        ({"self_draft": {**MET, "status": "cut short"}}, 4),
        ({"peers_static": {"status": "ok", "result": STATIC}}, 0),
        ({"self_draft": MET, "draft": {"status": "ok", "result": {"pairs": {}}}}, 4),
        ({"self_draft": {"status": "cut short", "result": {**COMPARED, "differing_counts": 2}}}, 1),
        ({"self_draft": MET, "warm_up": {"status": "failed", "error": ["E"]}}, 0),  # of an earlier run
    ],
)
def test_the_exit_status_says_what_was_missed_and_what_was_left_out(
    probes: dict[str, Any],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "gpu_is_there", lambda: True)
    monkeypatch.setattr(command, "run_suite", lambda *given, **more: {"probes": probes})
    only = ",".join(name for name in probes if name != "warm_up")
    assert command.main(["--out", str(tmp_path), "--only", only]) == status
    assert ("NOT met" in capsys.readouterr().out) <= (status == 1)


def test_a_probe_that_fails_dies_or_hangs_loses_neither_others_nor_what_it_had_found(tmp_path: Path) -> None:
    probes = [
        Probe("fails", f"{HERE}:grow_and_fail", 60),
        Probe("dies", f"{HERE}:die", 60),
        Probe("is long", f"{HERE}:grow_forever", 12),
        Probe("works", f"{HERE}:say:hello", 60),
        Probe("is late", f"{HERE}:say:late", 60),
    ]
    report = run_suite(tmp_path, probes[:4], 200, lambda line: None)["probes"]
    ends = ["failed", "died", "cut short", "ok"]
    assert [report[probe.name]["status"] for probe in probes[:4]] == ends
    assert report["fails"]["result"] == {"found": [1]} and report["works"]["result"] == {"word": "hello"}
    assert len(report["is long"]["result"]["found"]) > 2
    assert set(report["is long"]["result"]["found"]) == {0.33333}
    assert json.loads((tmp_path / REPORT).read_text())["probes"] == report
    late = run_suite(tmp_path, [probes[2], probes[4]], 5, lambda line: None)["probes"]
    assert late["is late"]["status"] == "not run", "the budget is kept"


def test_every_probe_is_a_function_and_has_words() -> None:
    assert all(callable(load_function(probe.function)) for probe in PROBES)
    assert {probe.name for probe in PROBES} == set(RENDERERS)
    assert sum(probe.seconds for probe in PROBES if probe.usual) <= 540
