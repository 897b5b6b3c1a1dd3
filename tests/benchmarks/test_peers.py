"""The peer comparison: its protocol, rounds and figures, with workers that need no engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import compare
from benchmarks.peers.agreement import agreement, figures
from benchmarks.peers.protocol import Speculation
from benchmarks.peers.worker import Entry
from tests.recipes.medium import write_medium, write_medium_draft

Runs = Callable[..., tuple[int, Any]]
SHAPE = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_medium(
        tmp_path_factory.mktemp("small"), "float32", vocab=320, max_positions=256, **SHAPE
    )
    write_medium_draft(folder / "draft", folder)
    return folder


def fake(name: str, mode: str = "good") -> Entry:
    command = (
        sys.executable,
        "-m",
        "tests.benchmarks.fake_worker",
        mode,
        "--model",
        "m",
        "--threads",
        "1",
    )
    return Entry(name, command, {})


@pytest.fixture
def run_fakes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Run the comparison of such entries; return its exit status and report."""

    def run(entries: list[Entry], *extra: str, rounds: int = 2) -> tuple[int, Any]:
        monkeypatch.setattr(compare, "entries", lambda options: entries)
        out = tmp_path / "peers.json"
        arguments = [str(checkpoint), "-n", "24", "--prompt-tokens", "4", "--rounds", str(rounds)]
        status = peers.main(
            [*arguments, *extra, "--threads", "1", "--pause", "0", "--out", str(out)]
        )
        return status, json.loads(out.read_text())

    return run


def test_rounds_give_figures_ratios_and_equality(
    run_fakes: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [fake("spd-plain"), fake("vllm-plain", "differs"), fake("spd-rows")]
    status, report = run_fakes(entries)
    assert status == 0
    names = report["entries"]
    assert isinstance(names, dict) and list(names) == ["spd-plain", "vllm-plain"]
    plain = names["spd-plain"]
    # 23 tokens after the first in 12 steps of at least 5 ms.
    assert plain["tokens_per_step"]["median"] == pytest.approx(23 / 12)
    assert 0 < plain["decode_tokens_per_second"]["median"] <= 23 / 12 / 0.005
    assert len(plain["decode_tokens_per_second"]["values"]) == 2
    assert plain["versions"] == {"fake": "1.0", "cpus": "1"}
    assert plain["equal_to_spd_plain"] == {
        "equal_texts": 2,
        "texts": 2,
        "first_difference": [None, None],
    }
    assert names["vllm-plain"]["equal_to_spd_plain"]["first_difference"] == [11, 11]
    assert list(report["ratios"]) == ["spd-plain / vllm-plain"]
    assert report["verify_over_decode"]["ratio"]["median"] == pytest.approx(1.1)
    output = capsys.readouterr()
    assert "0/2" in output.out and "verify(8 rows)" in output.out and "chatter" not in output.out
    order = [line.split()[2] for line in output.err.splitlines() if line.startswith("round ")]
    assert order == ["spd-plain:", "vllm-plain:", "spd-rows:"] * 2


def test_loads_run_every_worker_that_can_and_counters_are_compared(
    run_fakes: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Entry("transformers-plain", fake("x").command, {}, together=False)
    entries = [fake("spd-plain"), fake("spd-draft"), fake("vllm-draft", "lucky"), alone]
    extra = ("--concurrency", "3", "--rates", "400", "--load-tokens", "8", "--load-rounds", "2")
    status, report = run_fakes(entries, *extra, rounds=1)
    assert status == 0
    assert list(report["loads"]) == ["3 together", "400 a second"]
    for load in report["loads"].values():
        assert list(load["entries"]) == ["spd-plain", "spd-draft", "vllm-draft"]
        entry = load["entries"]["spd-draft"]
        # The fake takes 10 ms for a pass of 16 requests.
        assert 0 < entry["output_tokens_per_second"]["median"] <= 16 * 8 / 0.01
        assert len(entry["output_tokens_per_second"]["values"]) == 2
        assert entry["requests"] == entry["equal_to_spd_plain"] == 32
        assert entry["acceptance"]["per_position"] == [0.5, 0.25]
        assert set(load["ratios"]) == {"spd-draft / vllm-draft", "spd-draft / spd-plain"}
        assert load["ratios"]["spd-draft / vllm-draft"]["low"] is not None
    comparison = report["agreement"]["spd-draft / vllm-draft"]
    # 0.75 of a draft a round here, 0.81 there.
    assert comparison["differences"]["acceptance_rate"] == pytest.approx(0.75 / 0.81 - 1)
    assert comparison["differences"]["acceptance_length"] == pytest.approx(1.75 / 1.81 - 1)
    assert not comparison["agree"]
    assert "spd-draft / vllm-draft: differ, 10.7% apart at most" in capsys.readouterr().out
    counted = figures(Speculation(100, 200, 75, (50, 25)))
    same = agreement(counted, counted)
    assert same["agree"] and same["largest"] == 0 and len(same["differences"]) == 4
    assert counted["acceptance_rate"] == 0.375 and counted["acceptance_length"] == 1.75


@pytest.mark.parametrize(("mode", "words"), [("dies", "died"), ("short", "gave 23 tokens, not 24")])
def test_a_peer_that_fails_is_left_out_and_named(run_fakes: Runs, mode: str, words: str) -> None:
    status, report = run_fakes([fake("spd-plain"), fake("vllm-plain", mode)], rounds=1)
    assert status == 1 and list(report["entries"]) == ["spd-plain"]
    assert words in report["failures"]["vllm-plain"]
    status, report = run_fakes([fake("spd-plain"), fake("spd-draft", "differs")], rounds=1)
    assert status == 1 and report["failures"] == {}, "speculation that changes tokens is no success"


@pytest.mark.slow
def test_the_real_worker_answers_and_speculation_changes_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "peers.json"
    arguments = [
        str(checkpoint),
        "-n",
        "20",
        "--prompt-tokens",
        "6",
        "--rounds",
        "1",
        "--rows",
        "3",
    ]
    arguments += [
        "--threads",
        "1",
        "--ctx",
        "128",
        "--dtype",
        "float32",
        "--pause",
        "0",
        "--out",
        str(out),
    ]
    arguments += ["--concurrency", "2", "--load-tokens", "6", "--load-rounds", "1"]
    assert peers.main(arguments) == 0
    report = json.loads(out.read_text())
    entries = report["entries"]
    loads = report["loads"]["2 together"]["entries"]
    assert list(entries) == list(loads) == ["spd-plain", "spd-draft", "spd-ngram"]
    assert all(
        entries[name]["equal_to_spd_plain"]["equal_texts"] == 1 for name in list(entries)[1:]
    )
    assert all(loads[name]["equal_to_spd_plain"] == 16 for name in list(loads)[1:])
    steps = entries["spd-draft"]["tokens_per_step"]["median"]
    assert entries["spd-plain"]["tokens_per_step"]["median"] == 1 < steps
    assert entries["spd-draft"]["acceptance"]["acceptance_length"] == pytest.approx(steps, abs=0.35)
    assert (
        report["verify_over_decode"]["rows"] == 3
        and report["verify_over_decode"]["ratio"]["median"] > 0
    )
