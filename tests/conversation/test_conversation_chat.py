"""`spd.chat` and `spd.stream_chat`: turns of a chat from Python."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from typing import Any

import pytest

import spd
import spd.conversation.chat
from spd.errors import UsageError
from spd.formats.demo import demo_folder
from spd.runtime import Engine, EngineConfig

QUESTION = {"role": "user", "content": "What does os.path.join do?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Tell the weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield the demo, with its drafts."""
    demo = Engine(EngineConfig(model=demo_folder(), slots=2, ctx=512, threads=1))
    yield demo
    demo.close()


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(spd.conversation.chat)
    assert result.attempted == 3
    assert result.failed == 0


def test_a_stream_brings_the_text_that_plain_decoding_writes(engine: Engine) -> None:
    """A name and an engine give one text, whole and in parts, with and without drafts."""
    plain = Engine(EngineConfig(model=demo_folder(), slots=1, ctx=512, threads=1, spec="off"))
    expected = spd.chat(plain, [QUESTION], temperature=0.8, seed=7, max_tokens=24)
    plain.close()
    with spd.stream_chat(engine, [QUESTION], temperature=0.8, seed=7, max_tokens=24) as stream:
        parts = [delta.text for delta in stream]
    assert len(parts) > 3
    assert "".join(parts) == stream.reply.text == expected.text
    assert stream.reply.message == {"role": "assistant", "content": expected.text}
    assert stream.reply.finish_reason == "length"
    assert stream.reply.metrics.completion_tokens == 24
    named = spd.chat("demo", [QUESTION], temperature=0.8, seed=7, max_tokens=24)
    assert named.text == expected.text


def test_a_call_keeps_its_schema_and_the_chat_goes_on_behind_it(engine: Engine) -> None:
    reply = spd.chat(
        engine,
        [QUESTION],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=120,
    )
    (call,) = reply.calls
    assert call.name == "get_weather"
    assert json.loads(call.text)["city"] in ("Rome", "Oslo")
    (message_call,) = reply.message["tool_calls"]
    assert message_call["id"] == call.id
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    following = spd.chat(engine, [QUESTION, reply.message, result], temperature=0, max_tokens=4)
    assert following.metrics.prompt_tokens > reply.metrics.prompt_tokens


def test_an_answer_keeps_a_schema(engine: Engine) -> None:
    reply = spd.chat(engine, [QUESTION], schema=SCHEMA, temperature=1.0, seed=3, max_tokens=60)
    assert json.loads(reply.text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "holds no list of messages"),
        ([{"content": "x"}], {}, "role"),
        ([QUESTION], {"heat": 1}, "heat is no option"),
        ([QUESTION], {"temperature": -1}, "temperature"),
        ([QUESTION], {"tools": [{"name": "a"}, {"name": "a"}], "tool_choice": "required"}, "twice"),
        ([QUESTION], {"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        ([QUESTION], {"tools": [WEATHER]}, "no place for tools"),
        ([QUESTION], {"schema": {"type": "objekt"}}, "schema"),
    ],
)
def test_wrong_options_and_messages_are_refused(
    engine: Engine, messages: list[dict[str, Any]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        spd.chat(engine, messages, **options)
    assert not engine.has_work


def test_a_stream_that_is_left_ends_its_request(engine: Engine) -> None:
    with spd.stream_chat(engine, [QUESTION], temperature=0, max_tokens=60) as stream:
        next(stream)
        with pytest.raises(UsageError, match="has not ended"):
            _ = stream.reply
    assert not engine.has_work
    with pytest.raises(StopIteration):
        next(stream)
