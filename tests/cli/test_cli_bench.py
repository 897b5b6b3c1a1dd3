"""`spd bench`: what it compares, what its table holds, and which results fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spd.cli.commands.bench import BenchOptions, sweep_configs
from spd.cli.commands.bench_report import bench_text
from spd.errors import UsageError
from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Sweep
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def test_lists_are_combined_and_lookup_has_no_ranks_of_its_own() -> None:
    options = BenchOptions(spec="mtp,ngram+mtp,ngram", tp="1,2", draft_tp="1,2", draft_max="2,3", lag="1")
    configs = sweep_configs(options)
    assert [(each.spec, each.tp) for each in configs[:2]] == [("off", 1), ("off", 2)]
    assert {each.lag for each in configs} == {1} and not any(each.adaptive for each in configs)
    found = [(each.spec, each.tp, each.draft_tp, each.draft_max) for each in configs[2:]]
    ranks = {
        "mtp": ((1, 1), (2, 1), (2, 2)),
        "mtp+ngram": ((1, 1), (2, 1), (2, 2)),
        "ngram": ((1, None), (2, None)),
    }
    assert sorted(found, key=str) == sorted(
        [(spec, tp, size, k) for spec, pairs in ranks.items() for tp, size in pairs for k in (2, 3)], key=str
    )
    assert [each.adaptive for each in sweep_configs(BenchOptions(verify="coupled,block"))[1:]] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draft_tp": "3", "tp": "1,2"}, "--draft-tp 3 divides no --tp of 1,2"),
        ({"graphs": "maybe"}, "--graphs maybe is neither on nor off"),
        ({"lag": "3"}, "--lag 3 is out of range"),
        ({"draft_max": "some"}, "--draft-max some is not a number"),
        ({"spec": "mtp,,ngram"}, "has an empty member"),
        ({"spec": "guess"}, "--spec guess is not known"),
    ],
)
def test_what_cannot_be_swept_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sweep_configs(BenchOptions(**given))


def test_the_table() -> None:
    drafted = {"drafted_per_position": [10, 8], "accepted_per_position": [7, 2]}
    samples = [make_sample(0, 0, 1.0), make_sample(1, 0, 0.5, **drafted)]
    result: dict[str, Any] = {
        "model": "demo",
        "versions": {"spd": "1"},
        "machine": {},
        "settings": {"max_tokens": 8},
        "plans": [{"dtype": "float32", "device": "cpu", "threads": 1, "load": "auto"}],
        "rows": make_rows(samples, [PLAIN, DRAFT]),
        "equality": {"tokens": 11, "differences": []},
        "interrupted": False,
    }
    lines = bench_text(result)
    header = "category T method tok/s ± ×plain ± len acc TTFT TPOT"
    assert lines[1].split() == header.split() and max(map(len, lines[1:4])) <= 80
    assert "equal: every text is that of plain decoding (11 tokens compared)" in lines


@pytest.mark.parametrize("words", [("demo",), ("-m", "demo")])
def test_nothing_measured_is_a_failure(
    words: tuple[str, ...], spd_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: None)
    ran = spd_run("bench", *words)
    assert ran.code == 6 and ran.text == "nothing was measured\n" and "nothing was measured" in ran.err
