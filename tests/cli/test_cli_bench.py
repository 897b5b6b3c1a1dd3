"""`spd bench` and `spd compare` from the command line, on random weights and on the demo."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.cli import app
from spd.cli.bench import sweep_configs
from spd.cli.bench_options import BenchOptions
from spd.cli.bench_report import best_row, summary_lines
from spd.cli.signals import Interrupted, SignalGuard
from spd.errors import UsageError
from tests.cli.conftest import write_model
from tests.json_schema import faults
from tests.runtime.seeded_faults import first_is_free, verify

QUICK = (
    "--load",
    "dummy",
    "--threads",
    1,
    "--spec",
    "ngram",
    "-n",
    6,
    "--temperature",
    0,
    "--dtype",
    "float32",
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abcabcabcabc", "category": "one"}, {"prompt": "xyxyxyxyxyx", "category": "two"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run(spd_run: Callable[..., Any], model: Path, prompts: Path) -> Callable[..., Any]:
    return lambda *words: spd_run("bench", "-m", model, "--prompts", prompts, *QUICK, *words)


def test_the_object_fits_its_schema(run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran = run("--json", "-r", 2, "-o", out)
    assert ran.code == 0 and faults(ran.json, "bench") == []
    assert json.loads(out.read_text())["rows"] == ran.json["rows"]
    assert [row["method"] for row in ran.json["rows"]] == ["plain", "ngram"] * 3
    assert ran.json["equality"]["tokens"] > 0 and not ran.json["interrupted"]
    broken = ran.json | {"surprise": 1}
    broken["rows"][0]["lag"] = "auto"
    del broken["rows"][1]["rounds"]
    assert len(faults(broken, "bench")) == 3


def test_the_table_fits_80_columns(run: Callable[..., Any]) -> None:
    ran = run(
        "-r",
        2,
        "--temperature",
        "0,0.8",
        "--draft-max",
        "1,12",
        "--prompt-tokens",
        "20,30",
        "--concurrency",
        "1,4",
        "--lag",
        "0,1",
    )
    assert ran.code == 0 and ran.err == ""
    lines = ran.text.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert "ngram k=12" in ran.text and "equal: every text" in ran.text and "random" not in ran.text
    assert "\x1b" not in ran.text and "dummy weights: speed only" in ran.text


def test_sizes_of_drafting_groups_go_with_models_that_draft(model: Path) -> None:
    """Lookup runs once for each --tp, and only who has others to meet is told where."""

    def asked(**words: str) -> list[tuple[int, str, int | None, bool]]:
        options = BenchOptions(model=str(model), spec="ngram,auto", **words)
        return [(c.tp, c.spec, c.draft_tp, c.rendezvous is not None) for c in sweep_configs(options)]

    assert asked(tp="1,2", draft_tp="2", rendezvous="localhost:1/2/0") == [
        (1, "off", None, False),
        (2, "off", None, True),
        (1, "ngram", None, False),
        (2, "ngram", None, True),
        (2, "auto", 2, True),
    ]
    assert len(asked(tp="2", draft_tp="1,2")) == 1 + 1 + 2
    with pytest.raises(UsageError, match="--tp 1 has no other rank"):
        asked(rendezvous="localhost:1/2/0")


def test_two_methods_at_once_in_either_order(model: Path) -> None:
    options = BenchOptions(model=str(model), spec="ngram+mtp,mtp,draft+ngram", draft_model=str(model))
    asked = [(c.spec, c.draft_model is not None) for c in sweep_configs(options)]
    assert asked == [("off", False), ("mtp+ngram", False), ("mtp", False), ("draft+ngram", True)]


def test_imposed_acceptance_is_labelled(run: Callable[..., Any]) -> None:
    ran = run("-r", 2, "--synthetic-acceptance", 2, "--draft-max", 3)
    assert ran.code == 0 and "imposed acceptance: drafts are taken unread" in ran.text
    assert "imposed acceptance" in ran.text.split("category")[0] and "equal:" not in ran.text
    assert max(map(len, ran.text.splitlines())) <= 80
    shown = run("-r", 1, "--synthetic-acceptance", 2, "--draft-max", 3, "--json").json
    assert {row["acceptance"] for row in shown["rows"] if row["method"] != "plain"} == {"imposed"}


def test_other_forms(run: Callable[..., Any]) -> None:
    rows = [json.loads(line) for line in run("-r", 1, "--jsonl").text.splitlines()]
    assert [(row.pop("schema"), type(row.pop("model"))) for row in rows] == [("spd.bench.row/1", str)] * 6
    assert [faults(row, "bench", "row") for row in rows] == [[]] * 6
    read = list(csv.DictReader(io.StringIO(run("-r", 1, "--csv").text)))
    assert [row["method"] for row in read] == ["plain", "ngram"] * 3
    assert float(read[0]["tokens_per_second.median"]) > 0
    lines = run("-r", 1, "--markdown").text.splitlines()
    assert lines[0].startswith("| category | T | method |") and lines[1].startswith("| --- |")
    assert lines[2].startswith("| one | 0 | plain |")


def test_ctrl_c_prints_what_is_done(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def check(guard: SignalGuard) -> None:
        if next(calls) == 60:
            raise Interrupted(2)

    monkeypatch.setattr(SignalGuard, "check", check)
    monkeypatch.setattr(app, "die_by", lambda signum: 128 + signum)
    monkeypatch.setattr(app, "release_streams", lambda: None)
    ran = run("-r", 1000)
    assert ran.code == 130
    assert "ngram" in ran.text and "interrupted: whole repetitions are counted" in ran.text


def test_a_changed_text_is_a_failed_check(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verify(first_is_free)(monkeypatch)
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    work = ("--ignore-eos", "-n", 40, "--temperature", 1.5)
    ran = run("-r", 1, "--spec", "draft", "--draft-model", draft, "--no-adaptive", *work)
    assert ran.code == 6 and "DIFFERENT:" in ran.text and "differ from plain decoding" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--spec", "magic"), 2, "magic"),
        (("--temperature", "hot"), 2, "--temperature hot is not a number"),
        (("--draft-max", "2,,3"), 2, "empty member"),
        (("--draft-max", "99"), 2, "out of range"),
        (("--graphs", "maybe"), 2, "--graphs maybe"),
        (("--category", "poems"), 2, "no prompts of category poems"),
        (("--prompt-tokens", "1000"), 2, "do not fit the context"),
        (("--fail-if-slower", "fast"), 2, "is not a share"),
        (("--goodput", "speed:3"), 2, "--goodput speed:3"),
        (("--json", "--csv"), 2, "two forms of one output"),
        (("--baseline", "missing.json"), 3, "no file missing.json"),
        (("--baseline", __file__), 2, "it is not JSON"),
        (("--rate", "0"), 2, "out of range"),
        (("-r", 0), 2, "--repetitions 0 is out of range"),
        (("--each", 0), 2, "--each 0 is out of range"),
        (("--time", "nan"), 2, "--time nan is out of range"),
        (("--time", "inf"), 2, "--time inf is out of range"),
        (("--goodput", "ttft:nan"), 2, "--goodput ttft:nan"),
        (("--lag", "auto,0"), 2, "auto comes to one of the others"),
        (("--fail-if-slower", "3%", "-r", 1), 2, "with one repetition"),
    ],
)
def test_refusals(
    run: Callable[..., Any], assert_refused: Callable[..., None], words: tuple[str, ...], code: int, said: str
) -> None:
    ran = run(*words)
    if "--json" in words:
        assert ran.code == code and said in ran.json["error"]["message"]
    else:
        assert_refused(ran, code, said)


def test_compare_and_baseline(run: Callable[..., Any], spd_run: Callable[..., Any], tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert run("-r", 3, "-o", old, "-q").code == 0
    result = json.loads(old.read_text())
    for row in result["rows"]:  # the same machine, a tenth as fast and as steady as a clock
        speed = row["tokens_per_second"]
        speed["values"] = [value / 10 for value in speed["values"]]
        speed["median"] /= 10
    new.write_text(json.dumps(result))
    same = spd_run("compare", old, old)
    assert same.code == 0 and "within noise" in same.text
    ran = spd_run("compare", old, new)
    assert ran.code == 6 and "-90.0%" in ran.text and "6 rows" in ran.err
    assert max(map(len, ran.text.splitlines())) <= 80
    assert spd_run("compare", new, old).code == 0
    told = spd_run("compare", "--json", old, new)
    assert told.code == 6 and all(change["regressed"] for change in told.json["comparisons"][0]["changes"])
    assert spd_run("compare", old, new, "--threshold", "95%").code == 0
    new.write_text(json.dumps(result | {"model": "another"}))
    unlike = spd_run("compare", "--json", old, new)
    assert unlike.code == 2 and "no row" in unlike.json["error"]["message"]
    unmatched = run("-r", 3, "--baseline", new, "--fail-if-slower", "3%")
    assert unmatched.code == 6 and "no row of the baseline is of the same work" in unmatched.err
    once = json.loads(old.read_text())
    for row in once["rows"]:
        row["repetitions"] = 1
    new.write_text(json.dumps(once))
    assert run("-r", 3, "--baseline", new, "--fail-if-slower", "3%").code == 2
    doubled = json.loads(old.read_text())
    for row in doubled["rows"]:
        row["tokens_per_second"]["values"] = [1e9 + i for i in range(3)]
        row["tokens_per_second"]["median"] = 1e9
    new.write_text(json.dumps(doubled))
    slower = run("-r", 3, "--baseline", new, "--fail-if-slower", "3%")
    assert slower.code == 6 and "6 rows are slower than the baseline" in slower.err


def test_what_cannot_be_written_is_printed_all_the_same(run: Callable[..., Any], tmp_path: Path) -> None:
    full = run("-r", 2, "-o", "/dev/full")
    assert full.code == 5 and "equal: every text" in full.text
    kept = run("-r", 2, "-o", "/proc/result.json", "--json")
    assert kept.code == 2 and kept.json["rows"] and "cannot write to /proc/result.json" in kept.err


def ratio_row(median: float, low: float, **changes: Any) -> dict[str, Any]:
    row = {"category": "all", "temperature": 0.0, "method": "mtp", "draft_max": 3, "adaptive": False}
    row |= {"verify": "coupled", "lag": 0, "graphs": False, "tp": 1, "draft_tp": 1, "rate": None}
    row |= {"concurrency": 1, "prompt_tokens_asked": None}
    return {**row, "speed_up": {"median": median, "low": low, "high": 2 * median - low}, **changes}


def test_the_advice_can_be_typed() -> None:
    noisy, sure = ratio_row(1.5, 0.4, draft_max=8), ratio_row(1.2, 1.1, verify="rejection", lag=2)
    assert best_row([noisy, sure]) is sure and best_row([noisy]) is noisy
    found = {"rows": [noisy, sure], "samples": [], "interrupted": False}
    found |= {"equality": {"tokens": 0, "differences": []}, "settings": {"goodput": {}}}
    for row in found["rows"]:
        row |= {"acceptance": "natural", "roofline": None}
    words = "\n".join(summary_lines(found))
    assert "best: --spec mtp --draft-max 3 --verify rejection --lag 2 at T 0, 1.20 × plain" in words
    found["rows"] = [sure | {"verify": "coupled"}, sure | {"verify": "coupled", "concurrency": 4}]
    assert "--no-adaptive at T 0, load 1, 1.20" in "\n".join(summary_lines(found))


def test_goodput_is_told(run: Callable[..., Any]) -> None:
    told = run("-r", 1, "--goodput", "ttft:100000,tpot:0.000001", "--spec", "off")
    assert "TTFT ≤ 100000 ms, TPOT ≤ 1e-06 ms: 0.00 of " in told.text and "plain, T 0, load 1" in told.text
    assert "equal:" not in told.text, "plain texts alone are compared with nothing"


def test_slower_than_plain_fails_where_asked() -> None:
    from spd.cli.bench import is_slower

    row = {"speed_up": {"median": 0.9, "low": 0.85, "high": 0.95}}
    assert is_slower(row, 0.03) and not is_slower(row, 0.2)
    assert not is_slower({"speed_up": {"median": 0.9, "low": 0.7, "high": 1.1}}, 0.03)
    assert not is_slower({"speed_up": None}, 0.03)
