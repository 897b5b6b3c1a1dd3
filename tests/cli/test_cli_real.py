"""The command line with the real engine, the demos and a tiny pair.

Few runs, as each loads a model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from operator import methodcaller
from pathlib import Path

import pytest

from spd.formats.demo import DEMOS
from spd.runtime.plan import machine
from tests.cli.cli_processes import finish, start
from tests.cli.conftest import assert_refused, read_saved_chat
from tests.helpers import edit_weights
from tests.recipes.tiny import VARIANTS, write_tiny
from tests.recipes.tiny_eagle3 import write_tiny_pair

PROMPT = r"prompt +new tokens (\d+) · cached tokens (\d+) "
RAW = ["generate", "--raw", "--ctx", "512", "-n", "24", "--seed", "7", "def read_lines(path):"]

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.mark.parametrize(
    ("model", "methods"),
    [
        ("demo", ("off", "draft", "eagle3", "ngram")),
        ("demo-hybrid", ("off", "mtp", "draft", "ngram")),
    ],
)
def test_the_text_is_the_same_with_each_method(spd_run, tmp_path, model, methods) -> None:
    replies: dict[str, list[object]] = {}
    for spec in methods:
        fixed = [] if spec == "off" else ["--no-adaptive", "--draft-max", "3"]
        trace = tmp_path / spec
        arguments = [
            "--temperature",
            "0.8",
            "--spec",
            spec,
            *fixed,
            "--logprobs",
            "2",
            "--trace",
            trace,
        ]
        ran = spd_run(RAW, "-m", model, arguments, "--json")
        assert ran.code == 0, ran
        reply = ran.json
        replies[spec] = [reply[key] for key in ("text", "token_ids", "finish_reason", "logprobs")]
        assert [entry["token_id"] for entry in reply["logprobs"]] == reply["token_ids"]
        for entry in reply["logprobs"]:
            assert entry["logprob"] <= entry["top"][0]["logprob"] <= 0 and len(entry["top"]) == 2
        timings = reply["timings"]
        counts = reply["metrics"]["speculative_decoding"]
        assert (
            timings["predicted_n"] == len(reply["token_ids"]) == reply["usage"]["completion_tokens"]
        )
        assert timings["predicted_n"] == counts["num_spec_steps"] + timings["draft_n_accepted"]
        assert counts["method"] == spec == reply["plan"]["spec"]
        _, *records = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [token for record in records for token in record["committed"]] == reply["token_ids"]
    assert all(reply == replies["off"] for reply in replies.values())


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("model", DEMOS)
def test_a_chat_prefills_only_what_is_new_with_the_same_text(spd_run, tmp_path, model) -> None:
    first = "What does os.path.join do?"
    second = "And what does os.path.split do, in a few words?"
    arguments = ["chat", model, "--ctx", "1024", "-n", "40", "--seed", "7", "--temperature", "0.8"]
    ran = spd_run(arguments, "-c", "a", stdin=f"{first}\n/stats\n{second}\n/stats\n".encode())
    assert ran.code == 0, ran
    (prompt, first_cached), (new, cached) = [
        tuple(map(int, counts)) for counts in re.findall(PROMPT, ran.err)
    ]
    turns = read_saved_chat(tmp_path, "a")[1:]
    generated = len(turns[0]["reply_ids"])
    assert (
        first_cached == 0 and cached == prompt + generated - 1
    )  # the last token's keys come with the next prompt
    assert 0 < new < prompt + generated
    for name, spec in (("b", "off"), ("c", "ngram")):
        for line in (first, second):
            spd_run(arguments, "-c", name, "--spec", spec, stdin=f"{line}\n".encode())
        assert read_saved_chat(tmp_path, name)[1:] == turns, (
            "from cached keys or from a fresh start"
        )


@pytest.mark.parametrize("lag", [0, 2])
def test_turns_of_a_hybrid_taken_back_go_on_from_checkpoints(spd_run, tmp_path, lag) -> None:
    """A regenerated reply and an undone turn reuse the state checkpoints of their prompts."""
    lines = ("What does len do?", "What does zip do?", "/regen", "/undo\nWhat does bool do?")
    arguments = [
        "chat",
        "demo-hybrid",
        "--ctx",
        "2048",
        "-n",
        "24",
        "--seed",
        "3",
        "--lag",
        lag,
        "-c",
        "a",
    ]
    ran = spd_run(arguments, stdin="".join(f"{line}\n/stats\n" for line in lines).encode())
    first, second, again, other = [
        (int(a) + int(b), int(b)) for a, b in re.findall(PROMPT, ran.err)
    ]
    reply = len(read_saved_chat(tmp_path, "a")[1]["reply_ids"])
    assert ran.code == 0 and second[1] == other[1] == first[0] + reply - 1
    assert again[1] == second[0] - 1 == again[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, None])
def test_a_real_run_ends_by_a_signal_or_with_its_reader(signum: int | None) -> None:
    process = start(
        [sys.executable, "-m", "spd", *RAW, "-n", "400", "--set=ignore_eos=on", "--spec", "off"]
    )
    assert os.read(process.stdout.fileno(), 1)
    if signum is None:
        process.stdout.close()
        assert process.wait(100) == 141 and process.stderr.read() == b""
        return
    process.send_signal(signum)
    code, out, err = finish(process)
    assert (code, err) == (-signum, "stopping…\n") and out.endswith(b"\n")


QUICK = ("--raw", "--threads", 1, "--ctx", 256, "-n", 16, "--seed", 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a target of two layers and a head that often agrees with it."""
    folder = tmp_path_factory.mktemp("pair")
    target = folder / "target"
    head = write_tiny_pair(
        target, folder / "head", kind="copy", aux=(1, 2), target_options={"layers": 2}
    )
    return target, head


def test_auto_takes_the_head_that_is_given_and_the_text_is_plain(spd_run, pair, tmp_path) -> None:
    target, head = pair
    arguments = ("generate", *QUICK, "-m", target, "--temperature", 0.8, "--json", "abc abc abc")
    plain = spd_run(arguments, "--spec", "off").json
    trace = tmp_path / "trace"
    reply = spd_run(arguments, "--draft-model", head, "--no-adaptive", "--trace", trace).json
    assert reply["token_ids"] == plain["token_ids"]
    counts = reply["metrics"]["speculative_decoding"]
    assert counts["method"] == reply["plan"]["spec"] == "eagle3" and counts["num_spec_tokens"] == 4
    assert 0 < counts["num_accepted_draft_tokens"] < counts["num_draft_tokens"]
    assert reply["plan"]["draft_model"] == str(head) and reply["plan"]["draft_weight_bytes"] > 0
    explanation = spd_run("explain", trace, "--json").json
    assert (explanation["method"], explanation["k"]) == ("eagle3", 4)
    assert "eagle3 k=4" in spd_run("explain", trace).text


def test_inspect_shows_a_head_and_a_pair(spd_run, pair) -> None:
    target, head = pair
    alone = spd_run("inspect", head)
    fields = "kind eagle3 · target hidden size 64 · draft vocab size 288 · aux layers 1, 2"
    assert alone.code == 0 and f"  head            {fields}\n" in alone.text
    facts = {"target_hidden_size": 64, "draft_vocab_size": 288, "aux_layers": [1, 2]}
    assert spd_run("inspect", head, "--json").json["target"]["head"].items() >= facts.items()
    report = spd_run("inspect", target, "--draft", head, "--json").json
    assert report["compatible"] and report["needs"]["parts"]["draft_weights"] > 0
    assert (report["speculation"]["method"], report["speculation"]["draft_max"]) == ("eagle3", 4)


def test_drafters_that_do_not_fit_are_refused(spd_run, pair, tmp_path: Path) -> None:
    """Other refusals are in the tests of formats and of the runtime."""
    other = write_tiny(tmp_path / "other", **{**VARIANTS["llama2"], "hidden": 96, "layers": 2})
    removed_tensors = ("fc.weight", "d2t")
    for name in removed_tensors:
        folder = shutil.copytree(pair[1], tmp_path / name)
        edit_weights(folder, methodcaller("pop", name))
    for target, spec, head, code, expected in (
        (pair[0], "draft", pair[1], 4, "is an EAGLE-3 head, not a model"),
        (pair[0], "eagle3", pair[0], 4, "is a model, not an EAGLE-3 head"),
        (pair[0], "eagle3", None, 2, "--spec eagle3 needs an EAGLE-3 head"),
        (other, "auto", pair[1], 4, "hidden size: head 64, target 96"),
        *(
            (pair[0], "eagle3", tmp_path / name, 4, f"'{name}': is missing")
            for name in removed_tensors
        ),
    ):
        drafts = () if head is None else ("--draft-model", head)
        assert_refused(
            spd_run("generate", "-m", target, "--spec", spec, drafts, "--raw", "Hi"),
            code,
            expected,
        )
    report = spd_run("inspect", other, "--draft", pair[1])
    assert report.code == 4 and "\ncompatible        no\n" in report.text


@pytest.mark.parametrize("command", ["generate", "bench", "verify"])
def test_a_refusal_for_memory_names_options_that_the_command_has(
    spd_run, pair, monkeypatch, command: str
) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**21)
    if command == "generate":
        ran = spd_run("generate", "-m", pair[0], "--draft-model", pair[1], "--ctx", 512, "Hi")
        assert "--spec ngram, without --draft-model" in ran.err
    else:
        ran = spd_run(command, "-m", "demo", "-n", 8)
        needed = float(re.findall(r"needed are ([\d.]+) MiB", ran.err)[0])
        # With so much more --memory-fraction would suffice, which verify lacks.
        monkeypatch.setattr(machine, "free_memory_bytes", lambda device: int(1.03 * 2**20 * needed))
        ran = spd_run(command, "-m", "demo", "-n", 8)
        assert ("--memory-fraction" in ran.err) is (command == "bench")
    assert ran.code == 5 and "not enough memory" in ran.err
    flags = set(re.findall(r"(?:fix:|^  ) +(--[a-z-]+) ", ran.err, re.MULTILINE))
    help_text = spd_run(command, "--help").text
    assert len(flags) > (2 if command == "generate" else 0), ran.err
    assert all(re.search(rf"{flag}\b", help_text) for flag in flags), flags
