"""The command line around the real engine and the embedded demo: few runs, since each loads a model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spd.formats.demo import demo_folder

ROOT = Path(__file__).resolve().parents[2]
RAW = ["generate", "--raw", "--ctx", "512", "-n", "24", "--seed", "7", "def read_lines(path):"]

pytestmark = [
    pytest.mark.skipif(not (demo_folder() / "config.json").exists(), reason="the demo is not there"),
    pytest.mark.usefixtures("keep_threads"),
]


def test_the_text_is_the_same_with_each_method(spd_run: Callable, tmp_path: Path) -> None:
    replies: dict[str, list[object]] = {}
    for spec in ("off", "draft", "eagle3", "ngram"):
        fixed = [] if spec == "off" else ["--no-adaptive", "--draft-max", "3"]
        trace = tmp_path / spec
        how = ["--temperature", "0.8", "--spec", spec, *fixed, "--logprobs", "2", "--trace", trace]
        ran = spd_run(*RAW, *how, "--json")
        assert ran.code == 0, ran
        shown = ran.json
        replies[spec] = [shown[key] for key in ("text", "token_ids", "finish_reason", "logprobs")]
        assert [entry["token_id"] for entry in shown["logprobs"]] == shown["token_ids"]
        assert all(
            e["logprob"] <= e["top"][0]["logprob"] <= 0 and len(e["top"]) == 2 for e in shown["logprobs"]
        )
        timings, counts = shown["timings"], shown["metrics"]["speculative_decoding"]
        assert timings["predicted_n"] == len(shown["token_ids"]) == shown["usage"]["completion_tokens"]
        assert timings["predicted_n"] == counts["num_spec_steps"] + timings["draft_n_accepted"]
        assert counts["method"] == spec == shown["plan"]["spec"]
        _, *records = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [token for record in records for token in record["committed"]] == shown["token_ids"]
    assert replies["off"] == replies["draft"] == replies["eagle3"] == replies["ngram"]


def chat_file(tmp_path: Path, name: str) -> list[dict]:
    """The lines of a saved chat."""
    path = tmp_path / "state" / "spd" / "sessions" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_chat_prefills_only_what_is_new_and_the_text_does_not_depend_on_it(
    spd_run: Callable, tmp_path: Path
) -> None:
    first, second = "What does os.path.join do?", "And what does os.path.split do, in a few words?"
    how = ["chat", "--ctx", "1024", "-n", "40", "--seed", "7", "--temperature", "0.8"]
    lines = f"{first}\n/stats full\n{second}\n/stats full\n".encode()
    ran = spd_run(*how, "-c", "a", stdin=lines)
    assert ran.code == 0, ran
    found = re.findall(r"prompt +([\d,]+) tok \((\d+) cached, (\d+) new\)", ran.err)
    (prompt, none, _), (longer, cached, new) = [tuple(map(int, counts)) for counts in found]
    turns = chat_file(tmp_path, "a")[1:]
    generated = len(turns[0]["reply_ids"])
    assert none == 0 and cached == prompt + generated - 1  # the last token's keys come with the next prompt
    assert new == longer - cached

    for name, spec in (("b", "off"), ("c", "ngram")):
        spd_run(*how, "-c", name, "--spec", spec, stdin=f"{first}\n".encode())
        spd_run(*how, "-c", name, "--spec", spec, stdin=f"{second}\n".encode())
        assert chat_file(tmp_path, name)[1:] == turns, "the text came from cached keys or from a fresh start"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, None])
def test_a_real_run_ends_by_a_signal_or_with_its_reader(how: int | None) -> None:
    argv = [sys.executable, "-m", "spd", *RAW[:-1], "-n", "400", "--ignore-eos", "--spec", "off", "import os"]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert process.stdout is not None and process.stderr is not None
    first = os.read(process.stdout.fileno(), 1)
    if how is None:
        process.stdout.close()
        assert process.wait(100) == 141 and process.stderr.read() == b""
        return
    process.send_signal(how)
    out, err = process.communicate(timeout=100)
    assert process.returncode == -how and (first + out).endswith(b"\n") and err == "stopping…\n".encode()
