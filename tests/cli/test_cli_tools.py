"""The file of `spd chat --tools`, and the commands that run for it."""

from __future__ import annotations

import json
import os
import pty
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.chat import tools
from spd.cli.chat.tools import ChatTools, ask_consent, run_tool_command
from spd.cli.signals import SignalGuard
from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE
from spd.conversation.vocabulary import open_vocabulary
from spd.errors import IncompatibleError, UsageError
from spd.formats.folder import ModelFolder
from tests.cli.conftest import assert_refused, edit_json
from tests.server.conftest import TEMPLATE

PROPERTIES = {"path": {"type": "string"}, "n": {"type": "integer"}}
SHOW: dict[str, Any] = {"name": "show", "parameters": {"type": "object", "properties": PROPERTIES}}
SHOW["command"] = ["head", "-n{n}", "{path}", "{x y}"]


def read_tools_file(model: Path, loaded: Any) -> ChatTools:
    """Return the tools of a file for a model that supports tools."""
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    file = model / "tools.json"
    file.write_text(loaded if isinstance(loaded, str) else json.dumps(loaded))
    return ChatTools(str(file), open_vocabulary("demo", ModelFolder.from_path(model)))


def make_call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call of a message."""
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(("mark", "notes"), [("<tool_call>", []), ("<call>", [UNKNOWN_FORM_NOTE])])
def test_a_form_of_calls_that_is_not_known_is_noted(model: Path, mark: str, notes: list) -> None:
    file = model / "tools.json"
    file.write_text(json.dumps([SHOW]))
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE.replace("<tool_call>", mark))
    assert (
        ChatTools(str(file), open_vocabulary("demo", ModelFolder.from_path(model))).notes == notes
    )


INVALID_FILES = [
    ("[{", "is not JSON"),
    ({"tools": []}, "Invalid 'tools': expected an array"),
    ([3], "'tools[0]': expected an object"),
    ([{"name": "a"}], "'tools[0].command': it is missing"),
    ([{**SHOW, "name": "a b"}], "'tools[0].name'"),
    ([{**SHOW, "shell": True}], "'tools[0].shell'"),
    ([SHOW, {**SHOW, "command": "cat"}], "'tools[1].command': expected an array"),
    ([SHOW, SHOW], "name': show is given twice"),
    ([{**SHOW, "command": []}], "'tools[0].command': expected a program"),
    ([{**SHOW, "command": ["{path}"]}], "'tools[0].command[0]': the program has to be fixed"),
    ([{**SHOW, "command": ["cat", "{file}"]}], "'tools[0].command[1]': {file} is not among"),
]


@pytest.mark.parametrize(("loaded", "expected"), INVALID_FILES)
def test_a_wrong_file_is_refused_with_its_field(model: Path, loaded: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=r"tools\.json") as caught:
        read_tools_file(model, loaded)
    assert expected in str(caught.value)


def test_a_model_without_tools_and_a_pipe_are_refused(
    model: Path, spd_run: Callable, script: Any
) -> None:
    file = model / "tools.json"
    file.write_text(json.dumps([SHOW]))
    with pytest.raises(IncompatibleError, match="no place for tools"):
        ChatTools(str(file), open_vocabulary("demo", ModelFolder.from_path(model)))
    ran = spd_run("chat", model, "--tools", file, stdin=b"Hi\n")
    assert_refused(ran, 2, "standard input or error is not a terminal")
    assert not script.engines


def test_only_a_yes_runs_a_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are not split.

    Words of missing arguments are left out; an unknown tool runs nothing.
    """
    chat_tools = read_tools_file(model, [SHOW])
    ran = list[Any]()
    questions = list[Any]()
    assert chat_tools.definitions[0]["function"] == {
        name: SHOW[name] for name in ("name", "parameters")
    }

    def run_fake(command: object, guard: object) -> str:
        ran.append(command)
        return "out"

    def answer(command: object, guard: object) -> bool:
        questions.append(command)
        return yes

    monkeypatch.setattr(tools, "run_tool_command", run_fake)
    monkeypatch.setattr(tools, "ask_consent", answer)
    for yes in (False, True):
        message, is_allowed = chat_tools.run_call(
            make_call("show", path="a; rm b", n=3), SignalGuard()
        )
        assert (
            is_allowed is yes
            and len(ran) == yes
            and questions[-1] == ["head", "-n3", "a; rm b", "{x y}"]
        )
        assert message["content"] == ("out" if yes else "the user did not allow this call")
    assert chat_tools.run_call(make_call("show"), SignalGuard())[1] and ran[-1] == ["head", "{x y}"]
    assert (
        chat_tools.run_call(make_call("hide"), SignalGuard())[0]["content"]
        == "there is no tool hide"
    )
    assert len(ran) == 2 and len(questions) == 3


def test_a_command_returns_its_output_and_exit_status() -> None:
    shell = ["bash", "-c"]
    cannot = "(it cannot be run: "
    for command, expected in (
        (["echo", "a b"], "a b\n"),
        ([*shell, "echo out; echo err >&2; exit 3"], "out\nerr\n\n(exit status 3)"),
        (["cat"], ""),
        (["no-such-program"], f"{cannot}[Errno 2] No such file or directory: 'no-such-program')"),
        (["echo", "\0"], f"{cannot}embedded null byte)"),
        (["echo", "x" * 3_000_000], f"{cannot}[Errno 7] Argument list too long: 'echo')"),
        (["printf", r"\377"], "\ufffd"),
        ([*shell, "sleep 60 & echo on"], "on\n"),
    ):
        assert run_tool_command(command, SignalGuard()) == expected


@pytest.mark.parametrize(
    "line", ["echo on; sleep 60", "exec >&- 2>&-; sleep 60", "while :; do :; done"]
)
def test_a_command_that_hangs_is_ended(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "COMMAND_SECONDS", 0.5)
    began = time.monotonic()
    later = f"sleep 2; touch {tmp_path}/left"
    output = run_tool_command(
        ["bash", "-c", f"({later}) & setsid bash -c '{later}' & {line}"], SignalGuard()
    )
    assert (
        output.endswith("(it was ended: more than 0.5 s, or 8 MiB)")
        and time.monotonic() - began < 20
    )
    time.sleep(2.5)
    assert not (tmp_path / "left").exists(), "what it has started goes on"


def test_ctrl_c_ends_a_command_and_not_the_chat() -> None:
    guard = SignalGuard()
    guard.install()
    try:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), 2)).start()
        assert (
            run_tool_command(["bash", "-c", "echo on; sleep 60"], guard) == "on\n\n(it was stopped)"
        )
        assert guard.received is None
    finally:
        guard.uninstall()


def test_megabytes_are_cut_in_the_middle_and_more_is_ended() -> None:
    output = run_tool_command(
        ["bash", "-c", "echo begin; yes | head -c 3000000; echo end"], SignalGuard()
    )
    assert output.startswith("begin\ny\n") and output.endswith("y\nend\n") and len(output) < 33_000
    assert f"… {3_000_010 - tools.MODEL_OUTPUT_LIMIT:,} characters are left out …" in output
    assert run_tool_command(["yes"], SignalGuard()).endswith(
        "y\n\n(it was ended: more than 120 s, or 8 MiB)"
    )


def test_a_yes_is_typed_after_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier input, the end of a long line, and a command too long to show are no consent."""
    controller, terminal = pty.openpty()
    guard: Any = SimpleNamespace(intercept_sigint=lambda action: nullcontext())

    def ask(answer: bytes, *command: str, before: bytes = b"") -> bool:
        os.write(controller, before)
        timer = threading.Timer(0.3, os.write, (controller, answer))
        timer.start()
        try:
            return ask_consent(command or ("ls",), guard)
        finally:
            timer.join()

    messages: list[str] = []
    with open(terminal, buffering=8192) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("spd.cli.chat.tools.write_stderr", messages.append)
        assert not ask(b"n\n", before=b"y\n") and ask(b" Yes\n")
        assert not ask(b"n" + b" " * 1100 + b"y\n") and not ask(b"\n")
        assert ask(b"y\n", "ls", "\u200b\u3164") and "ls '\\u200b\\u3164'" in messages[-1]
        assert not ask(b"y\n", "x" * 5000) and "5,000 characters" in messages[-1]
    os.close(controller)
