"""The command line around the real engine and the embedded demos: few runs, since each loads a model."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

from spd.formats.demo import DEMOS
from tests.cli.conftest import saved_chat
from tests.cli.test_cli_signals import finish, start

PROMPT = r"prompt n +(\d+)\ncache n +(\d+)\n"
RAW = ["generate", "--raw", "--ctx", "512", "-n", "24", "--seed", "7", "def read_lines(path):"]

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.mark.parametrize(
    ("model", "methods"),
    [("demo", ("off", "draft", "eagle3", "ngram")), ("demo-hybrid", ("off", "mtp", "draft", "ngram"))],
)
def test_the_text_is_the_same_with_each_method(spd_run, tmp_path, model, methods) -> None:
    replies: dict[str, list[object]] = {}
    for spec in methods:
        fixed = [] if spec == "off" else ["--no-adaptive", "--draft-max", "3"]
        trace = tmp_path / spec
        how = ["--temperature", "0.8", "--spec", spec, *fixed, "--logprobs", "2", "--trace", trace]
        ran = spd_run(*RAW, "-m", model, *how, "--json")
        assert ran.code == 0, ran
        shown = ran.json
        replies[spec] = [shown[key] for key in ("text", "token_ids", "finish_reason", "logprobs")]
        assert [entry["token_id"] for entry in shown["logprobs"]] == shown["token_ids"]
        for entry in shown["logprobs"]:
            assert entry["logprob"] <= entry["top"][0]["logprob"] <= 0 and len(entry["top"]) == 2
        timings, counts = shown["timings"], shown["metrics"]["speculative_decoding"]
        assert timings["predicted_n"] == len(shown["token_ids"]) == shown["usage"]["completion_tokens"]
        assert timings["predicted_n"] == counts["num_spec_steps"] + timings["draft_n_accepted"]
        assert counts["method"] == spec == shown["plan"]["spec"]
        _, *records = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [token for record in records for token in record["committed"]] == shown["token_ids"]
    assert all(reply == replies["off"] for reply in replies.values())


@pytest.mark.parametrize("model", DEMOS)
def test_a_chat_prefills_only_what_is_new_with_the_same_text(spd_run, tmp_path, model) -> None:
    first, second = "What does os.path.join do?", "And what does os.path.split do, in a few words?"
    how = ["chat", model, "--ctx", "1024", "-n", "40", "--seed", "7", "--temperature", "0.8"]
    ran = spd_run(*how, "-c", "a", stdin=f"{first}\n/stats\n{second}\n/stats\n".encode())
    assert ran.code == 0, ran
    (prompt, none), (new, cached) = [tuple(map(int, counts)) for counts in re.findall(PROMPT, ran.err)]
    turns = saved_chat(tmp_path, "a")[1:]
    generated = len(turns[0]["reply_ids"])
    assert none == 0 and cached == prompt + generated - 1  # the last token's keys come with the next prompt
    assert 0 < new < prompt + generated
    for name, spec in (("b", "off"), ("c", "ngram")):
        for line in (first, second):
            spd_run(*how, "-c", name, "--spec", spec, stdin=f"{line}\n".encode())
        assert saved_chat(tmp_path, name)[1:] == turns, "from cached keys or from a fresh start"


@pytest.mark.parametrize("lag", [0, 2])
def test_turns_of_a_hybrid_taken_back_go_on_from_checkpoints(spd_run, tmp_path, lag) -> None:
    """A reply said again and a turn taken back find their prompt's states."""
    lines = ("What does len do?", "What does zip do?", "/regen", "/undo\nWhat does bool do?")
    how = ["chat", "demo-hybrid", "--ctx", "2048", "-n", "24", "--seed", "3", "--lag", lag, "-c", "a"]
    ran = spd_run(*how, stdin="".join(f"{line}\n/stats\n" for line in lines).encode())
    first, second, again, other = [(int(a) + int(b), int(b)) for a, b in re.findall(PROMPT, ran.err)]
    reply = len(saved_chat(tmp_path, "a")[1]["reply_ids"])
    assert ran.code == 0 and second[1] == other[1] == first[0] + reply - 1
    assert again[1] == second[0] - 1 == again[0] - 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, None])
def test_a_real_run_ends_by_a_signal_or_with_its_reader(how: int | None) -> None:
    argv = [sys.executable, "-m", "spd", *RAW[:-1], "-n", "400", "--ignore-eos", "--spec", "off", "import os"]
    process = start(argv)
    first = os.read(process.stdout.fileno(), 1)
    if how is None:
        process.stdout.close()
        assert process.wait(100) == 141 and process.stderr.read() == b""
        return
    process.send_signal(how)
    code, out, err = finish(process)
    assert (code, err) == (-how, "stopping…\n") and (first + out).endswith(b"\n")
