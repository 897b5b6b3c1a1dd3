"""Histories of clients are read: no conversation is refused for one odd turn, and no word is
lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spd.conversation.prompt import encode_prompt
from spd.server.app import ENDPOINTS
from tests.server.conftest import Served, scripted
from tests.server.history_recipes import (
    ARGUMENTS,
    PATHS,
    TEMPLATES,
    WITHOUT_CALLS,
    Turn,
    body_of,
    history,
)

USER = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions"


def prompt_of(served: Served, path: str, body: dict[str, Any]) -> str:
    """Return the text that a body makes the model read."""
    vocabulary = served.service.settings.vocabulary
    (prompt,) = ENDPOINTS[path].read(body, served.service.settings).prompts
    ids = encode_prompt(prompt, vocabulary, 1 << 20)
    return vocabulary.need_tokenizer().decode(ids, skip_special=False)


def words_of(turns: list[Turn]) -> list[str]:
    """All that was said, thinking and calls left aside."""
    results = [call.result for turn in turns for call in turn.calls]
    return [words for words in (*(turn.words for turn in turns), *results) if words]


def check_histories(served: Served, template: str, seeds: range) -> None:
    """Read histories in each API; every word has to be in the prompt."""
    with scripted(served, template=TEMPLATES[template]):
        for seed in seeds:
            turns = history(seed, calls=template not in WITHOUT_CALLS)
            for path in PATHS:
                prompt = prompt_of(served, path, body_of(path, turns))
                missing = [words for words in words_of(turns) if words not in prompt]
                assert not missing, (template, path, seed, missing)


@pytest.mark.parametrize("template", TEMPLATES)
def test_histories_keep_every_word(served: Served, template: str) -> None:
    check_histories(served, template, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_two_hundred_more_histories_keep_every_word(served: Served, template: str) -> None:
    check_histories(served, template, range(12, 212))


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_reach_the_template_in_its_own_form(served: Served, arguments: Any) -> None:
    """As an object that holds what is none, or as text where the template joins texts."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}
    is_empty = arguments in ("", "  ", "null", None)
    is_object = arguments in ('{"path": "a"}', {"path": "a"})
    with scripted(served, template="{{ messages[1].tool_calls[0].function.arguments | tojson }}"):
        rendered = json.loads(prompt_of(served, CHAT, body))
    if is_object or is_empty:
        assert rendered == ({"path": "a"} if is_object else {})
    elif arguments not in ("{}", '{"a": NaN}'):
        assert rendered == {"arguments": arguments}
    joined = "{{ '' + messages[1].tool_calls[0].function.arguments }}"
    with scripted(served, template=joined):
        text = prompt_of(served, CHAT, body)
    if isinstance(arguments, str) and not is_empty and not is_object and arguments != '{"a": NaN}':
        assert text == arguments


def test_later_instructions_are_said_in_the_users_turn(served: Served) -> None:
    """Those at the beginning are one message, in each API."""
    turns = [Turn("system", "s"), Turn("developer", "d"), Turn("user", "u"), Turn("assistant", "a")]
    turns += [Turn("system", "late"), Turn("assistant", "b"), Turn("user", "v")]
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    expected = "system=s\n\nd;user=u;assistant=a;user=late;assistant=b;user=v;"
    for path in PATHS:
        with scripted(served, template=template):
            assert prompt_of(served, path, body_of(path, turns)) == expected


def test_a_turn_without_content_is_read(served: Served) -> None:
    """It may be the assistant's or a tool's; a user's is refused by name."""
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}/{{ m.reasoning_content }};{% endfor %}"
    )
    refused: list[dict[str, Any]] = [
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
    ]
    empty: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    cases = [
        *((turn, "assistant=/;") for turn in empty),
        *((turn, "assistant=no/;") for turn in refused),
        ({"reasoning_content": "hm"}, "assistant=/hm;"),
        ({"reasoning": "hm", "content": None}, "assistant=/hm;"),
    ]
    for turn, expected in cases:
        with scripted(served, template=template):
            body = {"messages": [USER, {"role": "assistant", **turn}, USER]}
            assert prompt_of(served, CHAT, body) == f"user=Hi/;{expected}user=Hi/;"
    for role in ("user", "system"):
        status, answer = served.send("POST", CHAT, {"messages": [{"role": role, "content": None}]})
        assert status == 400 and answer["error"]["param"] == "messages[0].content"


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_fields_of_a_message_that_would_be_lost_are_refused(served: Served, field: str) -> None:
    message = {"role": "assistant", "content": "", field: {"name": "f", "arguments": "{}"}}
    status, answer = served.send("POST", CHAT, {"messages": [USER, message, USER]})
    assert status == 400 and answer["error"]["param"] == f"messages[1].{field}"
