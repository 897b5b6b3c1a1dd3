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
from benchmarks.gpu_suite.digest import RENDERERS, digest
from benchmarks.gpu_suite.gemm_equality import (
    position_differences,
    random_operands,
    row_count_differences,
)
from benchmarks.gpu_suite.graph_nodes import slope
from benchmarks.gpu_suite.sdpa_equality import count_differences
from benchmarks.gpu_suite.spd_rounds import Setting, compare, differing_tokens
from benchmarks.gpu_suite.suite import PROBES, REPORT, Probe, load_function, run_suite
from tests.recipes.medium import write_medium, write_medium_draft

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


def test_a_probe_that_fails_dies_or_hangs_loses_no_other(tmp_path: Path) -> None:
    probes = [
        Probe("fails", f"{HERE}:fail", 60),
        Probe("dies", f"{HERE}:die", 60),
        Probe("hangs", f"{HERE}:hang", 6),
        Probe("works", f"{HERE}:work", 60),
    ]
    seen: list[list[str]] = []

    def say(line: str) -> None:
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


def test_the_budget_is_kept(tmp_path: Path) -> None:
    probes = [Probe("hangs", f"{HERE}:hang", 4), Probe("works", f"{HERE}:work", 60)]
    began = time.monotonic()
    report = run_suite(tmp_path, probes, 6, lambda line: None)
    assert time.monotonic() - began < 30
    assert report["probes"]["hangs"]["status"] == "timed out"
    assert report["probes"]["works"]["status"] == "not run"


def test_every_probe_is_a_function_and_has_words() -> None:
    assert all(callable(load_function(probe.function)) for probe in PROBES)
    assert set(RENDERERS) == {probe.name for probe in PROBES}


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


def test_differing_tokens_counts_positions_and_length() -> None:
    assert differing_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert differing_tokens([1, 9, 3], [1, 2, 3, 4]) == 2


def test_rounds_are_compared_on_the_cpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
    folder = write_medium(tmp_path / "target", "float32", vocab=300, max_positions=256, **shape)
    draft = write_medium_draft(tmp_path / "draft", folder)
    prompts = [[5, 6, 7, 8, 9], list(range(40, 60))]
    settings = (Setting("draft", 2), Setting("ngram", 2))
    result = compare(folder, draft, prompts, tokens=12, device="cpu", settings=settings)
    assert result["differing_tokens"] == 0
    rows = result["temperature_0.8"]
    assert [rows[name]["tokens"] for name in ("off", "draft_k2", "ngram_k2")] == [24, 24, 24]
    assert rows["draft_k2"]["acceptance_length"]["median"] > 1
    text = digest({"probes": {"spd_demo": {"status": "ok", "result": result}}})
    assert "0 tokens changed by speculation" in text and "draft_k2" in text


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
