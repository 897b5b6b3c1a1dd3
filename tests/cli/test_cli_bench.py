"""`spd bench`: what it compares, what its table holds, which results fail, and results read back."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spd.cli.commands.bench import BenchOptions, bench_text, read_result, sweep_configs
from spd.errors import UsageError
from spd.runtime.lab.load import Load, Work
from spd.runtime.lab.rows import compare_results, make_rows
from spd.runtime.lab.sweep import Sweep
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def test_lists_are_combined_and_lookup_has_no_ranks_of_its_own() -> None:
    options = BenchOptions(spec="mtp,ngram+mtp,ngram", tp="1,2", draft_tp="1,2", draft_max="2,3", lag="1")
    configs = sweep_configs(options)
    assert [(each.spec, each.tp) for each in configs[:2]] == [("off", 1), ("off", 2)]
    assert {each.lag for each in configs} == {1} and not any(each.adaptive for each in configs)
    found = [(each.spec, each.tp, each.draft_tp, each.draft_max) for each in configs[2:]]
    ranks = dict.fromkeys(("mtp", "mtp+ngram"), ((1, 1), (2, 1), (2, 2)))
    ranks["ngram"] = ((1, None), (2, None))
    expected = {(spec, *size, k) for spec, sizes in ranks.items() for size in sizes for k in (2, 3)}
    assert len(found) == len(expected) and set(found) == expected
    rules = sweep_configs(BenchOptions(verify="coupled,block"))[1:]
    assert [each.adaptive for each in rules] == [True, False]


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = {"drafted_per_position": [10, 8], "accepted_per_position": [7, 2]}
    samples = [make_sample(0, 0, 1.0), make_sample(1, 0, 0.5, **drafted)]
    ended = make_sample(1, 0, 0.0, work=Work("code", 0.8, None, Load()), tokens_after_first=0)
    result: dict[str, Any] = {
        "model": "demo",
        "versions": {"spd": "1"},
        "machine": {},
        "settings": {"max_tokens": 8},
        "plans": [{"dtype": "float32", "device": "cpu", "threads": 1, "load": "auto"}],
        "rows": make_rows([*samples, ended], [PLAIN, DRAFT]),
        "samples": [asdict(sample) for sample in (*samples, ended)],
        "equality": {"tokens": 11, "differences": []},
        "interrupted": False,
    }
    header = "category T method tok/s ± ×plain ± len acc TTFT TPOT"
    for columns, more in (("80", ""), ("100", "ITL by position")):
        monkeypatch.setenv("COLUMNS", columns)
        lines = bench_text(result)
        assert lines[0].split() == [*header.split(), *more.split()]
        assert max(map(len, lines[:3])) <= int(columns)
    assert lines[2].endswith("70/25")
    facts = {line[:16].strip(): line[18:] for line in lines[3:-1]}
    assert facts["texts"] == "equal to plain decoding (11 tokens compared)"
    assert facts["rows left out"] == "1, where replies ended at the first token"
    assert facts["best"] == "draft k=2 (code, T 0), 2.00 × plain, no difference beyond noise"


def test_nothing_measured_is_a_failure(spd_run, monkeypatch) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: None)
    for words in (("demo",), ("-m", "demo")):
        ran = spd_run("bench", *words)
        assert ran.code == 6 and ran.text == "nothing was measured\n" and "nothing was measured" in ran.err


def write_result(path: Path, *removed: str | int, value: Any = None) -> Path:
    """A small whole result, with something in it taken away or replaced."""
    samples = [make_sample(config, r, 1.0 + 0.1 * r) for config in (0, 1) for r in range(3)]
    result: Any = {
        "schema": "spd.bench/1",
        "model": "m",
        "settings": {"max_tokens": 8, "ignore_eos": True},
        "prompts": {"code/1": "0"},
        "plans": [{"load": "auto"}],
        "rows": make_rows(samples, [PLAIN, DRAFT]),
    }
    inner = result = copy.deepcopy(result)
    for name in removed[:-1]:
        inner = inner[name]
    if removed:
        inner[removed[-1]] = value
        if value is None:
            del inner[removed[-1]]
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize("name", ["bench_demo", "bench_pairs", "bench_concurrency", "bench_rate_draft_tp"])
def test_results_that_are_kept_without_their_passes_compare(name: str) -> None:
    kept = read_result(Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json")
    changes = compare_results(kept, kept, 0.03)["changes"]
    assert len(changes) == len(kept["rows"]) > 0 and "samples" not in kept


LACKING = [["rows"], ["settings"], ["model"], ["rows", 1, "method"], ["rows", 0, "tokens_per_second"]]
ODD = (
    (("rows", 0, "tokens_per_second", "low"), "slow"),
    (("rows",), 3),
    (("rows",), ["a"]),
    (("settings",), []),
)


@pytest.mark.parametrize(("removed", "value"), [*((each, None) for each in LACKING), *ODD])
def test_a_damaged_result_is_refused(tmp_path: Path, removed: Any, value: Any) -> None:
    assert len(read_result(write_result(tmp_path / "a.json"))["rows"]) == 2
    path = write_result(tmp_path / "a.json", *removed, value=value)
    with pytest.raises(UsageError, match=r"a\.json is not a result of spd bench") as caught:
        read_result(path)
    if value is None:
        assert caught.value.reason == (f"'{removed[-1]}' is missing",)
