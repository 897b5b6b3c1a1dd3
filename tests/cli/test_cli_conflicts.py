"""Every combination in the table of conflicts is refused with its own words, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spd.cli.text.conflicts import CHAT_CONFLICTS, CONFLICTS, SHARED_CONFLICTS
from tests.cli.conftest import refused

CASES: dict[str, list[str]] = {
    "raw-system": ["Hi", "--raw", "-s", "x"],
    "raw-messages": ["--raw", "--messages", "x"],
    "raw-template-arg": ["Hi", "--raw", "--template-arg", "a=1"],
    "ids-text": ["--prompt-ids", "1", "-f", "x"],
    "ids-messages": ["--prompt-ids", "1", "--messages", "x"],
    "ids-system": ["--prompt-ids", "1", "-s", "x"],
    "ids-template-arg": ["--prompt-ids", "1", "--template-arg", "a=1"],
    "messages-text": ["Hi", "--messages", "x"],
    "messages-system": ["--messages", "x", "-s", "@x"],
    "adaptive-no-drafts": ["Hi", "--draft-max", "0", "--adaptive"],
    "logprobs-json": ["Hi", "--logprobs", "2"],
    "dry-run-measures": ["Hi", "--dry-run", "--stats"],
    "grammars": ["Hi", "--schema", "{}", "--grammar", "/a/"],
    "jsonl-prompt": ["Hi", "--jsonl"],
    "jsonl-ids": ["--jsonl", "--prompt-ids", "1"],
    "jsonl-files": ["--jsonl", "-f", "x", "-f", "y"],
    "two-stdins": ["--jsonl", "--messages", "-"],
    "jsonl-output": ["--jsonl", "-f", "model/config.json", "-o", "model/../model/config.json"],
    "jsonl-json": ["--jsonl", "--json"],
    "jsonl-dry-run": ["--jsonl", "--dry-run"],
    "jsonl-trace": ["--jsonl", "--trace", "x"],
    "concurrency-jsonl": ["Hi", "--concurrency", "4"],
    "resume-jsonl": ["Hi", "-o", "x", "--resume"],
    "quiet-verbose": ["Hi", "-qv"],
    "think-twice": ["Hi", "--think", "9", "--template-arg", "enable_thinking=false"],
}

CHAT_CASES: dict[str, list[str]] = {
    "two-models": ["-m", "demo"],
    "drafts-markdown": ["--show-drafts", "--markdown", "on"],
}


def test_every_conflict_has_a_case_and_its_own_words() -> None:
    assert {conflict.name for conflict in CONFLICTS} == set(CASES)
    assert {conflict.name for conflict in CHAT_CONFLICTS} == set(CHAT_CASES)
    assert len({conflict.message for conflict in CONFLICTS}) == len(CONFLICTS)


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, spd_run: Callable, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    conflict = next(conflict for conflict in CONFLICTS if conflict.name == name)
    ran = spd_run("generate", "-m", model, *CASES[name])
    if "--json" in CASES[name]:
        assert ran.code == 2 and ran.json["error"]["message"] == conflict.message
        assert ran.json["error"]["fix"] == [conflict.fix]
    else:
        refused(ran, 2, conflict.message, conflict.fix)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("two-stdins", ["--jsonl", "-f", "-", "-s", "@-"]),
        ("two-stdins", ["--jsonl", "--grammar", "-"]),
        ("two-stdins", ["-f", "-", "--schema", "-"]),
        ("two-stdins", ["Hi", "-f", "-", "-f", "-"]),
        ("raw-template-arg", ["Hi", "--raw", "--think", "hide"]),
        ("ids-template-arg", ["--prompt-ids", "1", "--think", "9"]),
        ("jsonl-ids", ["--jsonl", "-f", "x", "--prompt-ids", "1"]),
    ],
)
def test_refused_in_other_words(name: str, argv: list[str], spd_run: Callable, model: Path) -> None:
    conflict = next(conflict for conflict in CONFLICTS if conflict.name == name)
    refused(spd_run("generate", "-m", model, *argv, stdin=b"x"), 2, conflict.message, conflict.fix)


@pytest.mark.parametrize("name", [*CHAT_CASES, *(conflict.name for conflict in SHARED_CONFLICTS)])
def test_refused_in_a_chat(name: str, spd_run: Callable, model: Path) -> None:
    conflict = next(c for c in (*CHAT_CONFLICTS, *SHARED_CONFLICTS) if c.name == name)
    argv = CHAT_CASES.get(name) or [word for word in CASES[name] if word != "Hi"]
    refused(spd_run("chat", model, *argv, stdin=b"Hi\n"), 2, conflict.message, conflict.fix)


@pytest.mark.parametrize(
    "argv",
    [
        ["--prompt-ids", "1", "--raw"],
        ["Hi", "--draft-max", "0"],
        ["Hi", "--spec", "off", "--no-adaptive"],
        ["Hi", "--json", "--logprobs", "2"],
        ["Hi", "-s", "x", "--template-arg", "a=1"],
    ],
)
def test_allowed(argv: list[str], spd_run: Callable, model: Path, script: object) -> None:
    assert spd_run("generate", "-m", model, *argv).code == 0
