"""The official clients, in another interpreter, and what the pages show: curl, Python, fields,
flags."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spd.cli.parser import parse_token_count
from spd.formats.folder import ModelFolder
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory_fit import longest_context
from spd.runtime.plan.plan import resolve_plan
from spd.server.api_request import PASSED_OVER
from spd.server.chat_completions import CHAT_FIELDS
from tests.cli.conftest import wait_until
from tests.recipes.published_hybrids import RELEASES, write_published
from tests.server.conftest import QUESTION, Served

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")

SHARED = """
import json, sys
weather = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
weather["additionalProperties"] = False
tool = {"name": "get_weather", "description": "Weather."}
messages = [{"role": "user", "content": "What does os.path.join do?"}]
"""
SCRIPT = """
import openai, pydantic, typing
client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
assert [m.id for m in client.models.list()] == ["demo"]
ask = lambda **f: client.chat.completions.create(
    **{"model": "demo", "messages": messages, "max_tokens": 24, **f})

whole = ask(temperature=0, logprobs=True, top_logprobs=2)
text = whole.choices[0].message.content
assert text.startswith("Join") and whole.usage.completion_tokens == 24
assert whole.usage.prompt_tokens_details.cached_tokens is not None
assert len(whole.choices[0].logprobs.content) == 24
assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
chunks = list(ask(temperature=0, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
assert chunks[-1].usage.completion_tokens == 24

forced = {"tools": [{"type": "function", "function": {**tool, "parameters": weather}}], "max_tokens": 200,
    "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
called = ask(**forced)
message = called.choices[0].message
assert called.choices[0].finish_reason == "tool_calls"
call = message.tool_calls[0]
assert call.function.name == "get_weather" and list(json.loads(call.function.arguments)) == ["city"]
with client.chat.completions.stream(model="demo", messages=messages, **forced) as stream:
    events = [event.type for event in stream]
    final = stream.get_final_completion().choices[0].message.tool_calls[0]
assert "tool_calls.function.arguments.delta" in events
assert final.function.arguments == call.function.arguments
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
answered = ask(max_tokens=8, messages=[*messages, message, result])
assert answered.choices[0].message.role == "assistant"

class Answer(pydantic.BaseModel):
    ok: bool
    kind: typing.Literal["a", "bc"]
parsed = client.chat.completions.parse(
    model="demo", messages=messages, response_format=Answer, max_tokens=80, logit_bias={})
assert isinstance(parsed.choices[0].message.parsed, Answer)

stream = ask(stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
next(iter(stream))
stream.close()
completed = client.completions.create(model="demo", prompt="def read(", max_tokens=6, temperature=0)
assert completed.choices[0].text and completed.object == "text_completion"

asked = {"model": "demo", "input": messages[0]["content"], "temperature": 0, "max_output_tokens": 24}
answer = client.responses.create(**asked)
assert answer.output_text == text and answer.status == "incomplete" and answer.usage.output_tokens == 24
assert answer.usage.input_tokens_details.cached_tokens is not None
scored = client.responses.create(
    **asked, include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0]
assert "".join(one.token for one in scored.logprobs) == text and len(scored.logprobs[0].top_logprobs) == 2
echoed = client.completions.create(
    model="demo", prompt="def read(", max_tokens=0, logprobs=1, echo=True).choices[0]
assert echoed.text == "def read(" and echoed.logprobs.token_logprobs[0] is None
begun = [*messages, {"role": "assistant", "content": "Join two"}]
streamed = ask(messages=begun, temperature=0, stream=True, stream_options={"include_usage": True})
continued = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
assert continued == ask(messages=begun, temperature=0).choices[0].message.content
assert text.startswith("Join two") and not continued.startswith("Join")
with client.responses.stream(**asked) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
tool = {"type": "function", "strict": True, "parameters": weather, **tool}
called = client.responses.create(model="demo", input="x", tools=[tool], tool_choice="required",
                                 parallel_tool_calls=False, max_output_tokens=200)
(call,) = [item for item in called.output if item.type == "function_call"]
assert call.name == "get_weather" and list(json.loads(call.arguments)) == ["city"]
parsed = client.responses.parse(model="demo", input="x", text_format=Answer, max_output_tokens=80)
assert isinstance(parsed.output_parsed, Answer)
print("all held")
"""

ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="unused", max_retries=0)
ask = {"model": "demo", "messages": messages, "max_tokens": 24, "extra_body": {"temperature": 0}}
whole = client.messages.create(**ask)
text = whole.content[0].text
assert text.startswith("Join") and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream) == text
    final = stream.get_final_message()
assert final.usage.output_tokens == 24 and final.stop_reason == "max_tokens"
assert client.messages.create(**ask, stop_sequences=["two"]).stop_sequence == "two"
count = client.messages.count_tokens(model="demo", messages=messages).input_tokens
assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
begun = [*messages, {"role": "assistant", "content": "Join two"}]
continued = client.messages.create(**{**ask, "messages": begun}).content[0].text
with client.messages.stream(**{**ask, "messages": begun}) as stream:
    assert "".join(stream.text_stream) == continued != "" and not continued.startswith("Join")
tool["input_schema"] = weather
forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 200}
with client.messages.stream(**{**ask, **forced}) as stream:
    called = stream.get_final_message()
(call,) = called.content
assert called.stop_reason == "tool_use" and call.name == "get_weather" and list(call.input) == ["city"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
turns = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(**{**ask, "messages": turns}).content
print("all held")
"""


def blocks(language: str) -> list[str]:
    """Return the page's code of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def python_with(package: str) -> str:
    """Return an interpreter that has a package."""
    python = os.environ.get("OPENAI_PYTHON", sys.executable)
    if subprocess.run(
        [python, "-c", f"import {package}"], check=False, capture_output=True
    ).returncode:
        pytest.skip(f"no interpreter has the {package} package; OPENAI_PYTHON names one")
    return python


@pytest.mark.openai
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_the_official_clients_are_served(served: Served, package: str) -> None:
    """Everything above, then what the page shows."""
    prints = blocks("python")[0].replace("7373", str(served.port))
    code = SHARED + (SCRIPT + prints if package == "openai" else ANTHROPIC)
    command = [python_with(package), "-c", code, f"http://127.0.0.1:{served.port}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout.startswith("all held\n" + "Join two or more" * (package == "openai")), (
        ran.stderr
    )
    wait_until(lambda: served.service.open_requests == 0)


@pytest.mark.openai
def test_llm_is_served(served: Served, tmp_path: Path) -> None:
    """The command `llm` with the page's lines: whole, streamed, and held to a schema."""
    command = [python_with("llm"), "-m", "llm", "-m", "spd", QUESTION, "-o", "temperature", "0"]
    lines = blocks("yaml")[0].replace("7373", str(served.port))
    (tmp_path / "extra-openai-models.yaml").write_text(lines, encoding="utf-8")

    def ask(options: Sequence[str]) -> str:
        ran = subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    short = ["-o", "max_tokens", "24"]
    streamed = ask(short)
    assert streamed.startswith("Join two or more") and ask([*short, "--no-stream"]) == streamed
    yes_or_no = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]'
    schema = yes_or_no + ', "additionalProperties": false}'
    constrained = ask(["-o", "max_tokens", "80", "--schema", schema])
    assert list(json.loads(constrained)) == ["ok"]


def test_the_documented_curl_is_served(served: Served) -> None:
    (command,) = (block for block in blocks("sh") if block.startswith("curl"))
    command = command.replace("curl", "curl -s", 1).replace("7373", str(served.port))
    ran = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"].startswith("Join two or more")


def test_every_field_is_listed() -> None:
    extra_names = {"messages", "model", "stream", "speculative", "temperature", *PASSED_OVER}
    penalties = {name for name in CHAT_FIELDS if name.endswith("_penalty")}
    assert {
        name for name in CHAT_FIELDS.keys() - extra_names - penalties if f"`{name}`" not in PAGE
    } == set()


AGENTS = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
ROWS = re.findall(r"\| (\d+) GB \| `spd serve Qwen/(\S+) ?(.*?)` \| ([\d,]+) \|", AGENTS)


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_recommended_flags_fit(number: int, tmp_path: Path) -> None:
    """And leave no fifth of the context unused that the card could hold."""
    assert {row[0] for row in ROWS} == {"24", "32", "48", "80"}, "every card is there"
    card, model, flags, output = ROWS[number]
    values = dict(re.findall(r"--(\S+) (\S+)", flags))
    ctx = parse_token_count(values.pop("ctx"))
    assert ctx == int(output.replace(",", "")) and values.keys() <= {"quantize", "concurrency"}
    folder = ModelFolder.resolve(str(write_published(tmp_path, RELEASES[model])))
    slots = int(values["concurrency"])
    config = EngineConfig(model=folder, quantize=values.get("quantize", "none"), slots=slots)
    plan = resolve_plan(
        config, Machine("cuda", int((int(card) - 0.5) * 2**30), (8, 9), is_foreseen=True)
    )
    longest = longest_context(plan.shape, plan.memory_budget_bytes)
    assert plan.spec == "mtp" and ctx <= longest <= 1.2 * ctx
