"""Histories of OpenAI's API in `--messages` and in lines are read as by the server, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import edit_json

USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
    "[{{ k }}:{{ v }}]{% endfor %}{% endfor %};{% endfor %}"
)


def call_turn(arguments: Any) -> dict[str, Any]:
    """Return a message with a tool call."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


TURNS: list[tuple[dict[str, Any], str]] = [
    (call_turn('{"a": "x"}'), "assistant=[a:x]"),
    (call_turn({"a": "x"}), "assistant=[a:x]"),
    (call_turn(""), "assistant="),
    (call_turn('{"a": "x'), 'assistant=[arguments:{"a": "x]'),
    ({"role": "assistant"}, "assistant="),
    ({"role": "assistant", "content": None, "refusal": "no"}, "assistant=no"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "user=a"),
    ({"role": "developer", "content": "d"}, "system=d"),
    ({"role": "tool", "tool_call_id": "c", "content": "ok"}, "tool=ok"),
]


@pytest.mark.parametrize(("turn", "expected"), TURNS)
def test_histories_of_the_api_are_rendered(
    spd_run, model, script, tmp_path: Path, turn, expected: str
) -> None:
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([USER, turn]), encoding="utf-8")
    ran = spd_run("generate", "-m", model, "--dry-run", "--json", "--messages", chat)
    assert json.loads(ran.out)["prompt"] == f"user=Hi;{expected};"
    chat.write_text(json.dumps({"messages": [USER, turn]}), encoding="utf-8")
    assert spd_run("generate", "-m", model, "--jsonl", "-f", chat).code == 0
    assert len(script.request.prompt_ids) == len(json.loads(ran.out)["prompt_ids"])


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": None}, "message 1 has no text in `content`"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of `content` that holds no"),
        ({"content": "x"}, "message 1 has no text in `role`"),
        ({"role": "assistant", "tool_calls": "x"}, "no list of objects in `tool_calls`"),
        ("x", "message 1 is not an object"),
    ],
)
def test_an_unreadable_message_is_refused(
    spd_run, model, tmp_path: Path, turn: Any, reason: str
) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([USER, turn]), encoding="utf-8")
    ran = spd_run("generate", "-m", model, "--messages", chat)
    assert ran.code == 2
    assert reason in str(ran.err)
