"""Scripts at small scale: an agent's replay, the soak, changed tokens, two trees compared."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest

from benchmarks import agent_replay, equality, rounded_cache, serve_equality, slow_tests, soak
from benchmarks.freeze import __main__ as freeze
from benchmarks.freeze.cells import Run
from spd.cli.commands.serve import ServeOptions
from spd.cli.options import GenerateOptions
from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.kernels.capabilities import CAPABILITIES
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.round.limits import PAGE_SIZE
from tests.server.conftest import serving


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo-hybrid", "demo"])
def test_a_turn_prefills_what_it_adds(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And less than a chunk more, compacted or not; cached tokens are not written again."""
    monkeypatch.setitem(agent_replay.METHODS, model, ("ngram",))
    for name, value in {"OWN": 4, "LEAST": 200, "MOST": 900}.items():
        monkeypatch.setattr(agent_replay, name, value)
    arguments = argparse.Namespace(turns=6, window=3200, threads=1, parts=tmp_path, cold_every=2)
    measurements = agent_replay.measure(model, arguments)
    (lookup,) = measurements["methods"].values()
    assert lookup["turns"] == 6 and lookup["turns_equal_to_cold"] == lookup["turns_cold"] == 3
    assert lookup["cached_is_true"] and lookup["compactions"] > 0
    assert lookup["prefilled_beyond_new_most"] < CAPABILITIES["native"].chunk
    assert lookup["prefilled_again"] <= 6 * (PAGE_SIZE - 1) * (model == "demo"), (
        "a page's beginning, without states"
    )
    assert lookup["prefilled_tokens"] < lookup["prompt_tokens"] * 0.8
    assert lookup["tokens_per_round"] > 1.5 and lookup["said_tokens"] > 100
    changing = measurements["without_rule"]
    assert (
        changing["prefilled_tokens"] > changing["prompt_tokens"] - CAPABILITIES["native"].chunk * 6
    )
    cold = tmp_path / f"{model}-cold.jsonl"
    cold.write_text("".join(cold.read_text().splitlines(keepends=True)[:-1]))
    assert agent_replay.measure(model, arguments) == measurements


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the requests over a socket, which this server does not have."""
    monkeypatch.setattr(soak, "SHARES", {"plain": 5, "aborted": 1, "malformed": 2, "canary": 1})
    monkeypatch.setattr(soak, "GROWTH", {"memory_mib": 1000, "descriptors": 100, "threads": 100})
    with serving(adaptive=False) as served:
        soak_test = soak.Soak(served.port, os.getpid(), tmp_path, GenerateOptions())
        soak_test.run(24, 4, 8)
        assert soak.faults_of(soak_test) == [] and len(soak_test.samples) == 4
        assert soak_test.counts.total() == 24 and set(soak_test.counts) == set(soak.SHARES)
        soak_test._canary_text = "another"
        monkeypatch.setattr(soak, "SHARES", {"canary": 1, "socket": 1})
        monkeypatch.setattr(soak, "GROWTH", {"memory_mib": -1000})
        soak_test.run(6, 2, 6)
    faults = " ".join(soak.faults_of(soak_test))
    for words in ("instead of 'another'", "no server is found", "memory_mib grew by"):
        assert words in faults


@pytest.mark.usefixtures("keep_threads")
def test_a_server_says_what_generate_says() -> None:
    """While others leave; a different text is counted."""
    chats = serve_equality.make_chats(4, 3, 0.8, 24)
    right = serve_equality.generated("demo", chats, 1)
    options = ServeOptions(
        model="demo", ctx=serve_equality.CTX, concurrency=4, threads=1, adaptive=False, spec="mtp"
    )
    wrong = [(right[0][0] + ".", right[0][1]), *right[1:]]
    result = serve_equality.run_cell(options, chats, wrong)
    assert (result["tokens"], result["differ"], result["still_open"]) == (96, 24, 0)


CELL = ["--requests", "6", "--tokens", "8", "--only", "bfloat16/ngram/k2", "-m", "demo"]


@pytest.mark.slow
def test_nothing_differs_and_a_later_call_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(
        equality, "describe_commit", lambda *paths: {"commit": "c", "changed": False}
    )
    assert equality.main([*CELL, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cells"].values()
    assert row["tokens"] == 3 * 7 * 8 and row["differ"] == 0 and row["drafted"]
    monkeypatch.setattr(equality, "run_cell", lambda *args, **_: dict(row, differ=1))
    assert equality.main([*CELL, "--out", str(out)]) == 0
    assert equality.main([*CELL, "--tokens", "9", "--out", str(out)]) == 6, "other cells"
    assert equality.main([*CELL, "--minutes", "0"]) == 7


def test_the_cache_is_too_small_for_all_requests() -> None:
    params = SamplingParams(max_tokens=24)
    lengths = [41, 41, 41, 105, 297]
    # With the tokens to come each needs one position more than 1, 1, 1, 2 and 5 pages have.
    requests = [Request(str(n), tuple(range(n)), params) for n in lengths]
    assert equality.few_pages(requests) == 16 * (2 + 2 + 2 + 3 + 6) // 10
    assert equality.few_pages(requests[-1:]) == 16 * 6 // 2


def test_files_of_many_types_have_their_k_in_turn() -> None:
    settings = equality.parse_settings(["-m", "x", "--rotate", "--dtype", "bfloat16"])
    names = [name for name, _ in equality.cells(settings, [Path("a.gguf"), Path("b.gguf")])]
    assert names == [
        "bfloat16/off/a",
        "bfloat16/ngram/k2/a",
        "bfloat16/off/b",
        "bfloat16/ngram/k4/b",
    ]
    assert equality.models_name([Path("a.gguf"), Path("b.gguf")]) == "a.gguf and 1 more"


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("changed", ["token", "draft", pytest.param("end", marks=pytest.mark.slow)])
def test_a_change_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str) -> None:
    honest = equality.run
    out = tmp_path / "found.json"

    def run_changed(engine: Engine, requests: Sequence[Request]) -> list[equality.Text]:
        texts = honest(engine, requests)
        if engine.plan.config.lag == 2 and len(requests) > 1:
            if changed == "token":
                texts[1].tokens[3] += 1
            elif changed == "draft":
                texts[1].drafts[0] = ((1, 2), 0)
            else:
                texts[1].finish = "stop"
        return texts

    monkeypatch.setattr(equality, "run", run_changed)
    assert equality.main([*CELL, "--out", str(out)]) == 6
    (row,) = json.loads(out.read_text())["cells"].values()
    assert (row["differ"], row["drafts_differ"]) == ((0, 1) if changed == "draft" else (1, 0))


PROGRAM = """
import json, pathlib, sys, time
def main():
    head, round = {{"plan": {{"lag": 1}}}}, {{"draft": [5, 6], "accepted": {accepted}, "ms": time.time()}}
    pathlib.Path(sys.argv[3]).write_text(json.dumps(head) + "\\n" + json.dumps(round))
    print(json.dumps({{"token_ids": [5, 7], "model": __file__}}))
    return 0
"""


def test_a_planted_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal trees differ in nothing; a tree whose answers are stored is not run again."""
    program = tmp_path / "repo/spd/__main__.py"
    program.parent.mkdir(parents=True)
    (program.parent / "__init__.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    monkeypatch.setattr(freeze, "ROOT", tmp_path / "repo")

    def compared(old: int, new: int) -> tuple[list[str], int]:
        """Return the differences between trees that accept so many drafts, and how many ran."""
        trees: list[freeze.Tree] = []
        for accepted in (old, new):
            program.write_text(PROGRAM.format(accepted=accepted))
            place = tmp_path / f"{old}-{new}/{len(trees)}"
            trees.append(freeze.Tree(freeze.tree_of(None), place, tmp_path / f"store-{len(trees)}"))
        before, after = trees
        ((_, row),) = freeze.compare({"a/b": [Run(["generate"], trace=True)]}, before, after, inf)
        assert (row["tokens"], row["rounds"], row["failed"]) == (2, 1, 0)
        running = sum(tree.process is not None for tree in trees)
        for tree in trees:
            tree.close()
        return [line.split(": ", 1)[1] for line in row["first"]], running

    assert compared(2, 2) == ([], 2)
    assert compared(2, 1) == (["trace 1 accepted: 2 became 1"], 1)
    monkeypatch.setattr(freeze, "RENAMED", {"accepted": None, "plan": "plan.engine"})
    moved = ["trace 0 plan.engine.lag: 1 became nothing", "trace 0 plan.lag: nothing became 1"]
    assert compared(2, 1) == (moved, 0)


@pytest.mark.slow
def test_slow_tests_are_run_and_their_outcome_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One passes, one fails, one is not slow, one takes too long."""
    slow = "import pytest\n@pytest.mark.slow\ndef test_it(): assert "
    texts = {"right": f"{slow}True", "wrong": f"{slow}False", "quick": "test_it = id"}
    files = {name: str(tmp_path / f"test_{name}.py") for name in texts}
    for name, text in texts.items():
        Path(files[name]).write_text(text)
    monkeypatch.setattr(slow_tests, "slow_files", lambda: list(files.values()))

    def outcomes(*arguments: str) -> tuple[int, dict[str, str]]:
        status = slow_tests.main([*arguments, "--processes", "0"])
        rows = [line.split() for line in capfd.readouterr().out.splitlines()]
        return status, {row[0]: row[-1] for row in rows if row and row[0] in files.values()}

    assert outcomes(files["right"]) == (0, {files["right"]: "passed"})
    status, output = outcomes()
    assert (status, output[files["wrong"]], output[files["quick"]]) == (1, "failed", "failed")
    assert outcomes("--minutes", "0") == (0, dict.fromkeys(files.values(), "begun"))
    monkeypatch.setattr(slow_tests, "FILE_SECONDS", 0.1)
    assert outcomes(files["right"]) == (1, {files["right"]: "failed"})


def test_a_rounded_cache_is_compared_token_by_token() -> None:
    """Prompts are of whole contexts; a ratio above 1 means that tokens became less likely."""
    result = rounded_cache.measure("demo", context=64, tokens=150, dtype="float32")
    assert result["tokens"] == 2 * 63
    assert result["perplexity"] != result["perplexity_int8"]
    assert 0.98 < result["ratio"] < 1.02 and result["likeliest_changed"] < 0.1
    reference = rounded_cache.Scores([-1.0, -2.0, -3.0], [4, 5, 6])
    rounded = rounded_cache.Scores([-1.5, -2.5, -3.5], [4, 5, 7])
    assert rounded_cache.compare(reference, rounded)["ratio"] == pytest.approx(math.exp(0.5))
    assert rounded_cache.compare(reference, rounded)["likeliest_changed"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_acceptance_is_measured_on_a_forced_text() -> None:
    """The target as its own drafter would have all drafts accepted on its own text, not on this."""
    options = {"spec": "mtp", "draft_model": None}
    result = rounded_cache.measure_acceptance("demo", 160, 300, "float32", **options)
    assert result["drafts"] >= 300
    assert 0.02 < result["acceptance"] < 0.6
    assert abs(result["acceptance"] - result["acceptance_int8"]) < 0.05
    folder = ModelFolder(demo_folder())
    texts = [(*text[:150], *[7] * 150) for text in rounded_cache.cut_text(folder, 150, 300)]
    (drafted, accepted), *_ = rounded_cache.count_accepted(
        folder, texts, spec="ngram", draft_model=None, dtype="float32"
    )
    assert accepted > 0.9 * 140 * 3 / 4 and drafted >= accepted
