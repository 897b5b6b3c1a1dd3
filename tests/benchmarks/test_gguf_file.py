"""The comparison with llama.cpp on one file, with workers that need no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import gguf_file
from benchmarks.peers.entries import entries
from benchmarks.peers.llama_worker import server_command
from benchmarks.peers.options import parse_options
from benchmarks.peers.protocol import parse_options as parse_worker_options
from tests.benchmarks.test_peers import fake

Compare = Callable[..., tuple[int, Any]]
NAMES = ("spd-plain", "spd-ngram", "llama-plain", "llama-ngram")


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Run the comparison of fake engines over short texts; return its exit status and report."""
    model = tmp_path / "a.gguf"
    model.write_bytes(b"GGUF")
    vocabulary = SimpleNamespace(encode=lambda text: [*range(4000)])
    monkeypatch.setattr(
        gguf_file, "ModelFolder", lambda path: SimpleNamespace(tokenizer=vocabulary)
    )
    short_tasks = tuple(replace(task, tokens=min(6, task.tokens + 2)) for task in gguf_file.TASKS)
    monkeypatch.setattr(gguf_file, "TASKS", short_tasks)
    monkeypatch.setattr(gguf_file, "WARM_UP_TOKENS", 4)

    def run(*arguments: str, modes: dict[str, str] | None = None) -> tuple[int, Any]:
        found = [fake(name, (modes or {}).get(name, "good")) for name in NAMES]
        monkeypatch.setattr(gguf_file, "entries", lambda options: found)
        out = tmp_path / "out.json"
        words = [str(model), "--llama-cpp", str(tmp_path), "--threads", "1", "--pause", "0"]
        status = gguf_file.main([*words, *arguments, "--out", str(out)])
        return status, json.loads(out.read_text())

    return run


def test_every_figure_is_of_pairs(compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = compare("--pairs", "2", "--starts", "1")
    assert status == 0
    assert report["texts_changed_by_lookup"] == 0
    figures = report["figures"]
    assert [*figures] == [
        *(figure.name for figure in gguf_file.FIGURES),
        "start, s",
        "peak memory, MiB",
    ]
    # A step of two tokens takes the fake at least 5 ms; its first token comes at once.
    assert 0 < figures["plain, tokens/s"]["spd"] <= 2 / 0.005
    assert figures["prompt of 2048, tokens/s"]["spd"] > 2048
    for figure in figures.values():
        assert figure["ratio"]["median"] > 0
    assert len(figures["plain, tokens/s"]["ratio"]["values"]) == 2
    assert figures["peak memory, MiB"]["spd"] > 5
    assert "prompt of 512, tokens/s" in capsys.readouterr().out


def test_a_text_that_lookup_changed_is_no_success(compare: Compare) -> None:
    status, report = compare("--pairs", "1", "--starts", "0", modes={"spd-ngram": "lies"})
    assert (status, report["texts_changed_by_lookup"]) == (1, 1)


def test_ratios_above_one_are_advantages() -> None:
    speeds = gguf_file.figure_report([20.0] * 6, [10.0] * 6)
    assert (speeds["ratio"]["median"], speeds["ratio"]["interval"]) == (2.0, (2.0, 2.0))
    times = gguf_file.figure_report([20.0, 20.0], [10.0, 30.0], is_time=True)
    assert times["ratio"]["values"] == [0.5, 1.5]
    assert times["ratio"]["interval"] is None


def test_prompts_differ_between_pairs_and_repeat_themselves() -> None:
    plain, _, _, repeating = gguf_file.TASKS
    ids = [*range(3000)]
    prompts = gguf_file.make_prompts(ids, plain, 3)
    assert [len(prompt) for prompt in prompts] == [plain.prompt_tokens] * 3
    assert [prompt[0] for prompt in prompts] == [0, 978, 1957]
    (prompt,) = gguf_file.make_prompts(ids, repeating, 1)
    assert prompt == [*range(gguf_file.FRAGMENT)] * 6


def test_both_open_the_file_itself(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    words = [str(model), "--llama-cpp", str(tmp_path), "--only", "spd-ngram,llama-ngram"]
    words += ["--activations", "int8"]
    for entry in entries(parse_options([*words, "--threads", "1"])):
        options = parse_worker_options(entry.command[3:])
        assert options.model == model
        assert options.activations == ("int8" if entry.name == "spd-ngram" else "whole")
        if entry.name.startswith("llama"):
            command = server_command(options, 1)
            assert command[1:3] == ["-m", str(model)]
            assert command[command.index("--spec-type") + 1] == "ngram-simple"
