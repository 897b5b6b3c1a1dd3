"""The GPU suite without a GPU: its isolation, its report, and checks that can find what they look for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

pytest.importorskip("triton")

from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite import report as report_module
from benchmarks.gpu_suite import suite
from benchmarks.gpu_suite.digest import RENDERERS, digest
from benchmarks.gpu_suite.gemm_equality import (
    position_differences,
    random_operands,
    row_count_differences,
)
from benchmarks.gpu_suite.graph_nodes import slope
from benchmarks.gpu_suite.report import REPORT, digest_of_sources
from benchmarks.gpu_suite.sdpa_equality import count_differences
from benchmarks.gpu_suite.suite import PROBES, Probe, load_function, rounded, run_suite, seconds_of

HERE = "tests.benchmarks.fake_probes"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpu_is_there", lambda: False)
    assert command.main(["--out", str(tmp_path / "out")]) == 5
    captured = capsys.readouterr()
    assert captured.out == "" and "needs a CUDA GPU" in captured.err
    assert not (tmp_path / "out").exists()


def test_unknown_probe_is_refused() -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--only", "bandwidth,nothing"])
    assert stop.value.code == 2


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
        ({"self_draft": {**MET, "status": "timed out"}}, 1),
        ({"self_draft": MET, "device": {"status": "failed", "error": ["E"]}}, 1),
        ({"self_draft": {**MET, "status": "cut short"}}, 4),
        ({"peers_static": {"status": "ok", "result": STATIC}}, 0),
        ({"peers_static": {"status": "ok", "result": {}}}, 0),
        ({"self_draft": MET, "plain": {"status": "not run", "why": "no time"}}, 4),
        ({"self_draft": MET, "draft": {"status": "ok", "result": {"pairs": {}}}}, 4),
        ({"self_draft": {"status": "cut short", "result": {**COMPARED, "differing_counts": 2}}}, 1),
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
    only = ",".join(probes)
    assert command.main(["--out", str(tmp_path), "--only", only]) == status
    assert ("NOT met" in capsys.readouterr().out) <= (status == 1)


def test_the_exit_status_is_of_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report that is gone on with has others' answers, too."""
    probes = {"self_draft": MET, "device": {"status": "failed", "error": ["E"]}}
    monkeypatch.setattr(command, "gpu_is_there", lambda: True)
    monkeypatch.setattr(command, "run_suite", lambda *given, **more: {"probes": probes})
    assert command.main(["--out", str(tmp_path), "--only", "self_draft"]) == 0
    assert "device: failed" in capsys.readouterr().out


def test_help_says_what_runs_how_long_and_what_becomes_of_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert "\n  4  nothing of that, but a probe was cut short" in text
    usual, named = text.split("seconds that each may take:")[1].split("only when named by --only:")
    usual, named = (" ".join(part.split()) for part in (usual, named))
    assert all(f"{one.name} {one.seconds:g}" in (usual if one.usual else named) for one in PROBES)
    assert "with --only it is left alone, and gpu_suite.2.json" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 110


def run_named(out: Path, *names: str, keep: bool = True) -> dict[str, Any]:
    """A run of probes of these names, each of which says its name."""
    return run_suite(
        out, [Probe(name, f"{HERE}:say:{name}", 60) for name in names], 200, lambda line: None, keep=keep
    )


def test_a_named_run_goes_on_with_the_report_of_the_same_sources(tmp_path: Path) -> None:
    run_named(tmp_path, "first", "second", keep=False)
    run_suite(tmp_path, [Probe("second", f"{HERE}:fail", 60)], 200, lambda line: None, keep=True)
    run_named(tmp_path, "third")
    [file] = tmp_path.iterdir()
    probes = json.loads(file.read_text())["probes"]
    assert list(probes) == ["first", "second", "third"] and file.name == REPORT
    assert [probes[name]["status"] for name in probes] == ["ok", "failed", "ok"]
    # What it had found before is not lost, and the next that ends well takes its place.
    assert probes["second"]["earlier"]["result"] == {"word": "second"}
    assert "earlier" not in run_named(tmp_path, "second")["probes"]["second"]


def test_a_named_run_leaves_other_reports_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another commit, of changed sources, of another GPU; a usual run begins anew."""
    run_named(tmp_path, "first", keep=False)
    before = (tmp_path / REPORT).read_text()
    monkeypatch.setattr(report_module, "digest_of_sources", lambda: "others")
    run_named(tmp_path, "second")
    monkeypatch.setattr(report_module, "gpu_and_driver", lambda: "another")
    run_named(tmp_path, "third")
    run_named(tmp_path, "fourth")
    found = {path.name: list(json.loads(path.read_text())["probes"]) for path in tmp_path.iterdir()}
    assert found == {
        "gpu_suite.json": ["first"],
        "gpu_suite.2.json": ["second"],
        "gpu_suite.3.json": ["third", "fourth"],
    }
    assert (tmp_path / REPORT).read_text() == before
    run_named(tmp_path, "fifth", keep=False)
    assert list(json.loads((tmp_path / REPORT).read_text())["probes"]) == ["fifth"]


def test_sources_have_digits_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "spd").mkdir()
    file = tmp_path / "spd" / "one.c"
    file.write_text("int a;")
    first = digest_of_sources(tmp_path)
    (tmp_path / "spd" / "figures.json").write_text("{}")
    assert digest_of_sources(tmp_path) == first
    file.write_text("int b;")
    assert digest_of_sources(tmp_path) != first


def test_what_is_left_of_the_budget_is_shared() -> None:
    probes = [Probe("a", "", 90), Probe("b", "", 60), Probe("c", "", 30)]
    assert [seconds_of(probes, i, 540, False) for i in range(3)] == [90, 60, 30]
    assert seconds_of(probes, 0, 540, True) == 450 and seconds_of(probes, 2, 300, True) == 300
    # No one takes what a later one needs, nor more than there is.
    assert seconds_of(probes, 0, 100, True) == 90 and seconds_of(probes, 1, 40, True) == 40
    assert seconds_of(probes[:1], 0, 540, True) == 540


def test_a_probe_that_is_named_alone_may_take_the_whole_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def run_probe(probe: Probe, seconds: float) -> dict[str, Any]:
        given.append(seconds)
        return {"status": "ok", "seconds": 0.0, "result": {"files": 1, "of": 1, "passed": 1, "skipped": 0}}

    monkeypatch.setattr(command, "gpu_is_there", lambda: True)
    monkeypatch.setattr(command, "digest", lambda report: "")
    monkeypatch.setattr(command, "exit_status", lambda probes: 0)
    monkeypatch.setattr(suite, "run_probe", run_probe)
    command.main(["--out", str(tmp_path), "--only", "gpu_tests", "--budget", "500"])
    assert given == [pytest.approx(500, abs=5)]


def test_a_probe_that_fails_dies_or_hangs_loses_no_other(tmp_path: Path) -> None:
    probes = [
        Probe("fails", f"{HERE}:fail", 60),
        Probe("dies", f"{HERE}:die", 60),
        Probe("hangs", f"{HERE}:hang", 6),
        Probe("works", f"{HERE}:work", 60),
    ]
    seen: list[list[str]] = []

    def say(line: str) -> None:
        if not line.startswith("report: "):
            seen.append(list(json.loads((tmp_path / REPORT).read_text())["probes"]))

    report = run_suite(tmp_path, probes, 200, say)
    assert [report["probes"][name]["status"] for name in ("fails", "dies", "hangs", "works")] == [
        "failed",
        "died",
        "timed out",
        "ok",
    ]
    assert "ValueError: on purpose" in report["probes"]["fails"]["error"]
    assert report["probes"]["dies"]["exit_status"] == -9
    assert report["probes"]["hangs"]["log"] == ["said before hanging"]
    assert report["probes"]["works"]["result"] == {"answer": 42}
    # The report was on disk after each probe, not only at the end.
    assert [len(names) for names in seen] == [1, 2, 3, 4]
    assert json.loads((tmp_path / REPORT).read_text()) == json.loads(json.dumps(report))


def test_what_a_probe_had_found_outlives_it(tmp_path: Path) -> None:
    probes = [
        Probe("hangs", f"{HERE}:grow_and_hang", 8),
        Probe("fails", f"{HERE}:grow_and_fail", 60),
        Probe("is long", f"{HERE}:grow_forever", 8),
        Probe("says", f"{HERE}:say:hello", 60),
    ]
    report = run_suite(tmp_path, probes, 200, lambda line: None)["probes"]
    assert [report[probe.name]["status"] for probe in probes] == ["timed out", "failed", "cut short", "ok"]
    assert report["hangs"]["result"] == {"found": [1, 2]}
    assert report["fails"]["result"] == {"found": [1]} and "on purpose" in report["fails"]["error"][-1]
    assert len(report["is long"]["result"]["found"]) > 2
    assert set(report["is long"]["result"]["found"]) == {0.33333}
    assert report["says"]["result"] == {"word": "hello"}
    assert json.loads((tmp_path / REPORT).read_text())["probes"] == report


def test_the_budget_is_kept(tmp_path: Path) -> None:
    probes = [Probe("hangs", f"{HERE}:hang", 4), Probe("works", f"{HERE}:work", 60)]
    began = time.monotonic()
    report = run_suite(tmp_path, probes, 6, lambda line: None)
    assert time.monotonic() - began < 30
    assert report["probes"]["hangs"]["status"] == "timed out"
    assert report["probes"]["works"]["status"] == "not run"


def test_every_probe_is_a_function_and_has_words() -> None:
    assert all(callable(load_function(probe.function)) for probe in PROBES)
    assert {probe.name for probe in PROBES} == set(RENDERERS)
    assert sum(probe.seconds for probe in PROBES if probe.usual) <= 540


def test_figures_are_short() -> None:
    values = {"a": [1.23456789, {"b": 123456789.0}], "c": (1, True, None, "1.23456789")}
    assert rounded(values) == {"a": [1.2346, {"b": 123460000.0}], "c": [1, True, None, "1.23456789"]}


def _even_linear(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.linear(row, w) for row in x])


def test_row_counts_that_change_bits_are_found() -> None:
    w, x = random_operands(24, 32, 6, torch.float32, "cpu", 0)

    def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        # What a library does that changes its algorithm from four rows on.
        return _even_linear(w, x) * (1 + 1e-6) if len(x) >= 4 else _even_linear(w, x)

    assert row_count_differences(_even_linear, w, x) == []
    assert row_count_differences(product, w, x) == [4, 5, 6]


def test_positions_and_neighbours_that_change_bits_are_found() -> None:
    w, x = random_operands(24, 32, 6, torch.float32, "cpu", 0)

    def by_position(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = _even_linear(w, x)
        out[3] *= 1 + 1e-6
        return out

    def by_neighbour(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _even_linear(w, x) + x.abs().amax() * 1e-5

    assert position_differences(_even_linear, w, x) == []
    assert position_differences(by_position, w, x) == [3]
    assert position_differences(by_neighbour, w, x) == [1, 2, 3, 4, 5]


def test_sdpa_cases_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = count_differences(SDPBackend.MATH, torch.float32, (5, 40), "cpu", heads=2)
    assert found["cases"] == 30 and found["differing"] == len(found["length_and_queries"])

    def shifted(query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(query) * query.shape[2]

    monkeypatch.setattr(F, "scaled_dot_product_attention", shifted)
    assert count_differences(SDPBackend.MATH, torch.float32, (5,), "cpu")["differing"] == 15


def test_slope_of_a_line() -> None:
    rise, fixed = slope((50.0, 100.0, 400.0), (70.0, 130.0, 490.0))
    assert rise == pytest.approx(1.2) and fixed == pytest.approx(10.0)


def test_digest_names_what_went_wrong() -> None:
    case: dict[str, Any] = {"equal_to_tile_16": True, "rows_that_differ": [], "positions_that_differ": []}
    bad = {**case, "rows_that_differ": [5]}
    triton = {"config": {"block_n": 64, "block_k": 128}, "tiles": {"16": case, "32": bad}}
    equality = {"n": 8, "k": 16, "dtype": "bfloat16", "linear_rows_that_differ": [2], "triton": [triton]}
    report = {
        "probes": {
            "gemm_equality": {"status": "ok", "result": {"equality": [equality], "speed": []}},
            "graph_nodes": {"status": "timed out", "log": ["still capturing"]},
        }
    }
    text = digest(report)
    assert "bfloat16 N 8 K 16 triton 64x128: DIFFER at tiles ['32']" in text
    assert "F.linear differs at rows [2]" in text
    assert "graph_nodes: timed out still capturing" in text
