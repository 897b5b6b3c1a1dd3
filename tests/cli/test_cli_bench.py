"""`spd bench`, `compare`, `verify` and `explain`: tables, certificates and planted faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spd.cli.bench_table import bench_lines, with_short_models
from spd.cli.commands.bench import BenchOptions, split_models, sweep_configs
from spd.cli.commands.compare import read_bench_result
from spd.cli.commands.verify import with_settings
from spd.cli.terminal.bars import ASCII_GLYPHS, UNICODE_GLYPHS
from spd.errors import UsageError
from spd.formats.demo import demo_draft_folder
from spd.formats.folder import ModelFolder
from spd.runtime import EngineConfig
from spd.runtime.lab.load import Workload
from spd.runtime.lab.rows import compare_results, make_rows
from spd.runtime.lab.sweep import Sweep
from tests.cli.bench_results import make_bench_result
from tests.cli.conftest import assert_refused, write_model
from tests.json_schema import faults
from tests.runtime import seeded_faults as planted
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def test_lists_are_combined_and_lookup_has_no_ranks_of_its_own() -> None:
    options = BenchOptions(
        spec="mtp,ngram+mtp,ngram", tp="1,2", draft_tp="1,2", draft_max="2,3", lag="1"
    )
    configs = sweep_configs(options)
    assert [(config.spec, config.tp) for config in configs[:2]] == [("off", 1), ("off", 2)]
    assert {config.lag for config in configs} == {1} and not any(
        config.adaptive for config in configs
    )
    combinations = [
        (config.spec, config.tp, config.draft_tp, config.draft_max) for config in configs[2:]
    ]
    both: list[tuple[int, int | None]] = [(1, 1), (2, 1), (2, 2)]
    alone: list[tuple[int, int | None]] = [(1, None), (2, None)]
    ranks = {"mtp": both, "mtp+ngram": both, "ngram": alone}
    expected = {(spec, *size, k) for spec, sizes in ranks.items() for size in sizes for k in (2, 3)}
    assert len(combinations) == len(expected) and set(combinations) == expected
    rules = sweep_configs(BenchOptions(verify="coupled,block"))[1:]
    assert [config.adaptive for config in rules] == [True, False]


def test_a_draft_model_goes_to_the_methods_of_its_kind(spd_run: Callable, tmp_path: Path) -> None:
    """MTP has a head of its own, and takes another one only."""
    head = tmp_path / "head"
    assert spd_run("convert-mtp", "demo", head).code == 0
    for draft, specs in ((demo_draft_folder(), {"draft"}), (head, {"mtp", "draft"})):
        options = BenchOptions(spec="mtp,draft,ngram", draft_model=str(draft))
        configs = sweep_configs(options)
        drafters = {config.spec: config.draft_model for config in configs if config.draft_model}
        assert drafters == dict.fromkeys(specs, ModelFolder(draft)), drafters
        assert [config.spec for config in configs] == ["off", "mtp", "draft", "ngram"]
    for spec in ("ngram", "off,ngram", "mtp,ngram"):
        with pytest.raises(UsageError, match="--draft-model"):
            sweep_configs(BenchOptions(spec=spec, draft_model=str(demo_draft_folder())))


def test_the_table_fits_the_width_and_names_the_best_row(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = {"drafted_per_position": [10, 8], "accepted_per_position": [7, 2]}
    samples = [make_sample(0, 0, 1.0), make_sample(1, 0, 0.5, **drafted)]
    ended_sample = make_sample(
        1, 0, 0.0, work=Workload(category="code", temperature=0.8), tokens_after_first=0
    )
    plan = {"model": "/m", "dtype": "float32", "device": "cpu", "threads": 1, "load": "auto"}
    rows = make_rows([*samples, ended_sample], [PLAIN, DRAFT], ["demo"] * 2)
    sample_fields = [asdict(sample) for sample in (*samples, ended_sample)]
    result = make_bench_result("demo", rows, [plan], sample_fields, compared_tokens=11)
    result["machine"] = {"cpu": "AMD EPYC"}
    header = "category T method tok/s ± ×plain ± len acc TTFT TPOT"
    for columns, wide_columns in (("80", ""), ("100", "ITL by position")):
        monkeypatch.setenv("COLUMNS", columns)
        lines = bench_lines(result)
        assert lines[0].split() == [*header.split(), *wide_columns.split()]
        assert max(map(len, lines[:3])) <= int(columns)
    assert lines[2].endswith("70/25")
    facts = {line[:16].strip(): line[18:] for line in lines[3:-1]}
    best = "draft k=2 (code, T 0), 2.00 × plain"
    assert facts["texts"] == "equal to plain decoding (11 tokens compared)"
    assert facts["rows left out"] == "1, where replies ended at the first token"
    assert facts["best"] == f"one repetition does not say: {best} in it; -r 3 or more"
    assert facts["run"].startswith("AMD EPYC · threads 1 · ")
    plain_best = "plain decoding: no drafter is faster beyond noise; "
    drafter = "draft k=2 (code, T 0)"
    for median, best in (
        (0.8, f"{plain_best}{drafter}, 0.80 × plain, slower"),
        (1.05, f"{plain_best}{drafter}, 1.05 × plain"),
        (1.2, f"{drafter}, 1.20 × plain, faster"),
    ):
        rows[1]["speed_up"] |= {
            "median": median,
            "low": median - 0.1,
            "high": median + 0.1,
            "half_width": 0.85,
        }
        text = "\n".join(bench_lines(result))
        assert f"best              {best}\n" in text and ">99%" not in text
    rows[1]["speed_up"]["half_width"] = 70.0
    assert ">99%" in "\n".join(bench_lines(result))


def test_two_models_are_compared_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row names its model, each model has its best row, and the second is compared with the first."""
    comma = tmp_path / "a,b"
    comma.mkdir()
    assert split_models(str(comma)) == [str(comma)] and split_models("a, b,a") == ["a", "b"]
    monkeypatch.setenv("COLUMNS", "120")
    samples = [
        make_sample(config, r, (1.0 + r) / speed)
        for r in range(3)
        for config, speed in enumerate((1, 2, 4, 6))
    ]
    plan = {"dtype": "float32", "device": "cpu", "threads": 1, "load": "auto"}
    plans = [PLAIN | plan | {"model": "/a"}, DRAFT | plan | {"model": "/a"}]
    plans += [
        config_plan | plan | {"model": "/b", "dtype": "bfloat16"} for config_plan in (PLAIN, DRAFT)
    ]
    rows = make_rows(samples, plans, ["m/a_1", "m/a_1", "m/b", "m/b"])
    ratios = [(row["speed_up"], row["over_first_model"]) for row in rows]
    medians = [tuple(ratio and round(ratio["median"], 3) for ratio in pair) for pair in ratios]
    assert medians == [(None, None), (2.0, None), (None, 4.0), (1.5, 3.0)]
    result = make_bench_result("m/a_1,m/b", rows, plans, same_tokens=False)
    lines = bench_lines(result)
    assert [line.split()[0] for line in lines[:5]] == ["model", "a_1", "a_1", "b", "b"]
    assert lines[0].split()[-2:] == ["×first", "±"] and lines[3].split()[-2] == "4.00"
    wide_header = "model category T method tok/s ± ×plain ± ×first ±"
    for columns, header in (("80", wide_header), ("40", "model method tok/s ×plain")):
        monkeypatch.setenv("COLUMNS", columns)
        narrow = bench_lines(result)[:5]
        assert narrow[0].split() == header.split() and max(map(len, narrow)) < int(columns)
    facts = {line[:16].strip(): line[18:] for line in lines[5:-1]}
    assert facts["model"] == "m/a_1 float32, m/b bfloat16"
    assert facts["best of a_1"] == "draft k=2 (code, T 0), 2.00 × plain, faster"
    assert facts["over a_1"] == "b, plain decoding, 4.00 × (4.00 to 4.00) at T 0"
    assert facts["best of b"] == "draft k=2 (code, T 0), 1.50 × plain, faster"
    assert "other tokens" in facts["tokens"]
    alike = [{**row, "model": f"{number}/a"} for number, row in enumerate(rows)]
    assert with_short_models(alike) == alike


def test_a_terminal_gets_bars_for_each_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workload has a heading and a bar per method; a narrow terminal may show bars alone."""
    speeds = ((0, 1.0), (1, 0.5), (0, 1.1), (1, 0.6))
    samples = [make_sample(config, n // 2, seconds) for n, (config, seconds) in enumerate(speeds)]
    plan = {"model": "/m", "dtype": "float32", "device": "cpu", "threads": 1, "load": "auto"}
    rows = make_rows(samples, [PLAIN, DRAFT], ["m", "m"])
    result = make_bench_result("m", rows, [plan])
    monkeypatch.setenv("COLUMNS", "80")
    assert not any("█" in line or "tok/s," in line for line in bench_lines(result))
    text = bench_lines(result, UNICODE_GLYPHS)
    at = text.index("tok/s, code, T 0")
    assert at > 3 and text[at + 1].startswith("plain      █") and text[at + 1].endswith(" 9.5")
    assert text[at + 2].startswith("draft k=2  █") and text[at + 2].endswith(" 18.3 1.92×")
    assert text[at + 1].index("┼") * 2 == pytest.approx(text[at + 2].index("┼"), abs=14)
    monkeypatch.setenv("COLUMNS", "40")
    lines = bench_lines(result, ASCII_GLYPHS)
    assert lines[:3] == ["", "tok/s, code, T 0", "plain"] and lines[3].startswith("  #")
    assert max(map(len, lines[:6])) < 40 and "".join(lines[:6]).isascii() is False
    monkeypatch.setattr("spd.cli.bench_table.MAX_BARS", 1)
    assert bench_lines(result, ASCII_GLYPHS)[0].split() == ["method", "tok/s", "×plain"]


def test_two_models_are_measured_in_turn(spd_run: Callable[..., Any]) -> None:
    ran = spd_run(
        "bench",
        "-m",
        "demo,demo-hybrid",
        "--spec",
        "mtp",
        "--category",
        "code",
        "--json",
        "-n",
        4,
        "-r",
        1,
        "--temperature",
        0,
        "--threads",
        1,
    )
    assert ran.code == 0 and faults(ran.json, "bench") == []
    assert [row["model"] for row in ran.json["rows"]] == [*["demo"] * 2, *["demo-hybrid"] * 2]
    turns = [sample["config"] for sample in ran.json["samples"]]
    assert turns[:4] == [0, 1, 2, 3] and turns[4:] == [1, 2, 3, 0]
    assert ran.json["same_tokens"] is True and ran.json["rows"][2]["over_first_model"]["median"] > 0


def test_results_of_different_models_are_compared_with_a_remark(
    spd_run: Callable[..., Any], tmp_path: Path
) -> None:
    """One model each is compared with a remark; results of several are refused with a fix."""
    first, other = (write_result(tmp_path / name, ["model"], value=name) for name in ("m", "n"))
    ran = spd_run("compare", first, other)
    assert ran.code == 0 and "not under the same conditions: model m → n" in ran.text
    assert "spd bench -m m,n measures both in turn" in ran.text and "within noise" in ran.text
    comparison = spd_run("compare", first, other, "--json").json
    assert faults(comparison, "compare") == [] and comparison["comparisons"][0]["models"] == [
        "m",
        "n",
    ]
    both = json.loads(other.read_text())
    both["rows"] += [{**row, "model": "o"} for row in both["rows"]]
    other.write_text(json.dumps(both))
    ran = spd_run("compare", first, other)
    assert_refused(
        ran, 2, "of different models: m and n, o", "spd bench -m m,n,o measures them in turn"
    )


def test_nothing_measured_is_a_failure(spd_run, monkeypatch) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: None)
    for arguments in (("demo",), ("-m", "demo")):
        ran = spd_run("bench", arguments)
        assert (
            ran.code == 6
            and ran.text == "nothing was measured\n"
            and "nothing was measured" in ran.err
        )


def write_result(path: Path, removed: Sequence[str | int] = (), value: Any = None) -> Path:
    """Write a small complete result with one value removed or replaced."""
    samples = [make_sample(config, r, 1.0 + 0.1 * r) for config in (0, 1) for r in range(3)]
    result: Any = {"schema": "spd.bench/1", "model": "m", "prompts": {"code/1": "0"}}
    result |= {"settings": {"max_tokens": 8, "ignore_eos": True}, "plans": [{"load": "auto"}]}
    result["rows"] = make_rows(samples, [PLAIN, DRAFT])
    inner = result
    for name in removed[:-1]:
        inner = inner[name]
    if removed and value is None:
        del inner[removed[-1]]
    elif removed:
        inner[removed[-1]] = value
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    "name", ["bench_demo", "bench_pairs", "bench_concurrency", "bench_rate_draft_tp"]
)
def test_results_that_are_kept_without_their_passes_compare(name: str) -> None:
    result = read_bench_result(
        Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
    )
    changes = compare_results(result, result, 0.03)["changes"]
    assert len(changes) == len(result["rows"]) > 0 and "samples" not in result


MISSING_KEYS = [
    ["rows"],
    ["settings"],
    ["model"],
    ["rows", 1, "method"],
    ["rows", 0, "tokens_per_second"],
]
INVALID_VALUES: tuple[Any, ...] = (
    (("rows", 0, "temperature"), "hot"),
    (("rows",), ["a"]),
    (("settings",), []),
)


@pytest.mark.parametrize(
    ("removed", "value"), [*((keys, None) for keys in MISSING_KEYS), *INVALID_VALUES]
)
def test_a_damaged_result_is_refused(tmp_path: Path, removed: Any, value: Any) -> None:
    assert len(read_bench_result(write_result(tmp_path / "a.json"))["rows"]) == 2
    path = write_result(tmp_path / "a.json", removed, value=value)
    with pytest.raises(UsageError, match=r"a\.json is not a result of spd bench") as caught:
        read_bench_result(path)
    if value is None:
        assert caught.value.reason == (f"'{removed[-1]}' is missing",)


@pytest.fixture
def run(spd_run: Callable[..., Any], tmp_path: Path, random_weights: None) -> Callable[..., Any]:
    """Return a function that runs `verify` on random weights.

    It samples, as their greedy text would repeat one token.
    """
    target = write_model(tmp_path / "m")
    draft = write_model(tmp_path / "d", num_hidden_layers=1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n")
    arguments = (
        "verify",
        "-m",
        target,
        "--draft-model",
        draft,
        "--prompts",
        prompts,
        "--temperature",
        1.5,
    )
    return lambda *extra_arguments: spd_run(
        arguments, "--threads", 1, "--dtype", "float32", "-n", 24, extra_arguments
    )


def test_a_certificate_holds_files_plans_and_counts(run) -> None:
    """Rules that promise no equal text are compared at temperature 0."""
    ran = run("--lag", 1, "--json", "--tokens", 100)
    assert ran.code == 0 and faults(ran.json, "verify") == []
    assert ran.json["passed"] and ran.json["tokens"] >= 100 and ran.json["drafts_accepted"] > 0
    assert set(ran.json["files"]) >= {"config.json", "tokenizer.json", "draft/config.json"}
    assert (
        ran.json["plans"]["reference"]["spec"] == "off"
        and ran.json["plans"]["candidate"]["lag"] == 1
    )
    ran = run("-n", 8, "--verify", "rejection", "--temperature", "0,0.5")
    assert ran.code == 0, ran
    facts = {line[:18].strip(): line[18:] for line in ran.text.splitlines()}
    assert (
        facts.items()
        >= {"temperatures": "0", "untested": "0.5", "tokens": "16", "texts": "2"}.items()
    )


def test_a_planted_fault_fails_the_check(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run()
    assert ran.code == 0 and ran.text.endswith("passed            yes\n") and ran.err == ""
    assert "tested little" not in ran.text and "no draft was accepted" in run("-n", 2).text
    planted.verify(planted.first_is_free)(monkeypatch)  # in torch's form
    ran = run("--kernels", "torch")
    assert (
        ran.code == 6
        and ran.text.endswith("passed            no\n")
        and "2 of 2 texts differ" in ran.err
    )
    assert re.search(
        r"differences .* · seed \d+ · position \d+ · expected \d+ · found \d+\n", ran.text
    )
    assert "spd promises equal texts" in ran.err
    ran = run("--kernels", "torch", "--against", "kernels=native,spec=off")
    assert ran.code == 6 and "other kernels may round otherwise" in ran.err


def test_settings_replace_fields_of_the_configuration(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, spec="draft", draft_model=tmp_path, draft_max=3, lag=2)
    plain = with_settings(config, "spec=off")
    assert (plain.spec, plain.draft_model, plain.draft_max, plain.lag) == ("off", None, None, 2)
    parallel = replace(config, tp=2, draft_tp=2, adaptive=True)
    assert (
        with_settings(parallel, "spec=off").draft_tp
        is with_settings(parallel, "spec=ngram").draft_tp
        is None
    )
    with_rendezvous = replace(parallel, rendezvous=2)
    assert with_settings(with_rendezvous, "spec=ngram").draft_tp is None
    assert with_settings(with_rendezvous, "tp=1,draft-tp=auto").rendezvous is None
    other = with_settings(config, "lag=0, --draft-max=5,adaptive=off,dtype=float32")
    assert (other.lag, other.draft_max, other.adaptive, other.dtype) == (0, 5, False, "float32")
    assert with_settings(config, "lag=auto").lag is None
    for pair in ("spec=draft,ngram", "spec=draft, ngram", "spec=draft+ngram"):
        combined = with_settings(config, f"{pair},lag=1")
        assert (combined.spec, combined.draft_model, combined.lag) == ("draft+ngram", tmp_path, 1)


QUICK = ("--threads", 1, "--ctx", 256, "-n", 40, "--temperature", 0)
ASK = "What does os.path.join do?"


def test_traces_are_explained(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    """A trace alone.

    Traces of a plain and a drafting run share costs; two methods are not mixed.
    """

    def traced(name: str, *arguments: object) -> Path:
        ran = spd_run("generate", QUICK, arguments, "--stats", "--trace", tmp_path / name, ASK)
        assert ran.code == 0 and ran.text.strip()
        speeds[name] = re.findall(r" · ([\d.]+) tok/s", ran.err)
        drafts[name] = re.findall(r" · drafts (\d+)/(\d+)", ran.err)
        return tmp_path / name

    speeds: dict[str, list[str]] = {}
    drafts: dict[str, list[tuple[str, str]]] = {}

    mtp = traced("mtp", "--no-adaptive")
    result = spd_run("explain", mtp)
    assert result.code == 0 and "holds no plain rounds" in result.text.replace("\n", " ")
    assert "What limits it is" in result.text.replace("\n", " ")
    assert max(map(len, result.text.splitlines())) <= 80
    assert "mtp k=3" in result.text and "← now" in result.text and "← best" in result.text
    run_row = next(line for line in result.text.splitlines() if "← now" in line).split()
    assert run_row[:2] == ["this", "run"]
    assert float(run_row[5]) == pytest.approx(float(speeds["mtp"][0]), rel=0.2)
    assert f"{' of '.join(drafts['mtp'][0])} drafts were accepted" in " ".join(result.text.split())
    explanation = spd_run("explain", mtp, "--json").json
    assert explanation["method"] == "mtp" and explanation["k"] == 3 and explanation["rounds"] > 5
    plain = traced("plain", "--spec", "off")
    two = traced("two", "--draft-max", 2, "--no-adaptive")
    explanation = spd_run("explain", plain, two, "--json").json
    assert set(explanation["costs"]["verify"]) == {"0", "2"} and explanation["k"] == 2
    result = spd_run("explain", mtp, traced("lookup", "--spec", "ngram", "--no-adaptive"))
    assert_refused(result, 4, "different ways of drafting", "mtp, --verify coupled, T 0", "ngram")
    assert spd_run("explain", mtp, mtp).code == 0
