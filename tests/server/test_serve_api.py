"""Each path answers in the API's form with the text of the engine alone, also under load and faults."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spd.cli.commands.serve import ServeOptions
from spd.cli.run_settings import plan_settings
from spd.conversation.prompt import Prompt
from spd.runtime import Engine, SamplingParams
from spd.server import app as front
from spd.server import body as request_body
from spd.server import run
from tests.cli.conftest import wait_until
from tests.server.conftest import MESSAGES, QUESTION, SLOTS, Served, connected, serving


@pytest.fixture(scope="module")
def alone() -> Any:
    """What an engine of one slot, without speculation, says to messages."""
    settings = plan_settings(
        ServeOptions(concurrency=1, threads=1, spec="off").to_generate_options()
    )
    engine = Engine(settings.config)

    def say(content: str, **params: Any) -> str:
        asked = Prompt(messages=({"role": "user", "content": content},), variables={})
        wanted = SamplingParams(**{"temperature": 0.7, **params})
        request, _ = settings.prepare("x", asked, wanted)
        return engine.generate([request])[0].text

    yield say
    engine.close()


def test_many_clients_get_the_text_that_one_engine_gives_alone(served: Served, alone: Any) -> None:
    """Eight at once over four slots, streamed and whole, with and without drafts, while others leave."""
    found: dict[tuple[int, bool], str] = {}

    def wanted(seed: int) -> dict[str, Any]:
        return {"seed": seed, "max_tokens": 40 + seed, "temperature": 0.8 * (seed % 8 < 4)}

    def ask(seed: int, stream: bool) -> None:
        speculative = [{"draft_max": 1}, {"spec": "off"}, {}, {"draft_max": 3}][seed % 4]
        fields = {"speculative": speculative, **wanted(seed)}
        if stream:
            messages = [{"role": "user", "content": f"Explain example {seed}."}]
            events = served.stream(messages=messages, **fields)
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        else:
            text = served.chat(f"Explain example {seed}.", **fields)["choices"][0]["message"][
                "content"
            ]
        found[seed, stream] = text

    def leave(seed: int) -> None:
        """Ask for a long text, and go when it begins."""
        body = json.dumps({"messages": MESSAGES, "max_tokens": 2000, "seed": seed, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with connected(served.port) as connection:
            connection.sendall((head + body).encode())
            connection.recv(300)

    with ThreadPoolExecutor(22) as pool:
        asked = [pool.submit(ask, seed, stream) for seed in range(8) for stream in (True, False)]
        asked += [pool.submit(leave, seed) for seed in range(6)]
    assert all(one.result() is None for one in asked)
    for seed in range(8):
        text = alone(f"Explain example {seed}.", **wanted(seed))
        assert found[seed, True] == found[seed, False] == text


def test_a_whole_answer_and_the_stream_of_one(served) -> None:
    answer = served.chat(temperature=0, max_tokens=20, n=2, logprobs=True, top_logprobs=3)
    assert answer["object"] == "chat.completion" and answer["model"] == "demo"
    first, second = answer["choices"]
    assert first["message"]["content"] == second["message"]["content"]
    assert first["finish_reason"] == "length" and first["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 40 and usage["total_tokens"] == usage["prompt_tokens"] + 40
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_draft_tokens"] <= details["draft_tokens"]
    assert answer["metrics"]["speculative_decoding"]["method"] == "mtp"
    entries = first["logprobs"]["content"]
    assert len(entries) == 20 and all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all({"token", "bytes", "logprob", "top_logprobs"} <= set(entry) for entry in entries)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == first["message"]["content"]
    fields = {"seed": 5, "temperature": 0.8, "max_tokens": 30, "n": 2, "logprobs": True}
    whole = served.chat(**fields)
    events = served.stream(**fields, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"] | {"x": 0} != {"x": 0}
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][field] == whole["usage"][field]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(one["delta"].get("content", "") for one in own)
        assert said == choice["message"]["content"]
        entries = [entry for one in own if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    first, second = whole["choices"]  # each has a seed of its own, derived from the first one's
    assert first["message"] != second["message"]


def test_stop_bias_and_limits_reach_the_engine(served: Served) -> None:
    plain = served.say(max_tokens=24)
    stopped = served.chat(temperature=0, max_tokens=24, stop=plain[10:16])["choices"][0]
    assert stopped["message"]["content"] == plain[:10] and stopped["finish_reason"] == "stop"
    answer = served.chat(temperature=0, max_completion_tokens=3, max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    token = served.ask("/tokenize", {"prompt": " the"})["tokens"][0]
    assert served.say(max_tokens=4, logit_bias={str(token): 100}) == " the" * 4


def test_completions(served: Served) -> None:
    fields = {"max_tokens": 6, "temperature": 0}
    answer = served.ask("/v1/completions", {"prompt": ["def read(", "import "], **fields})
    assert answer["object"] == "text_completion" and len(answer["choices"]) == 2
    events = served.stream("/v1/completions", prompt="def read(", **fields)
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == answer["choices"][0]["text"]
    ids = served.service.settings.vocabulary.need_tokenizer().encode("def read(", add_special=True)
    choice = served.ask("/v1/completions", {"prompt": ids, "logprobs": 2, **fields})["choices"][0]
    assert choice["text"] == text and "".join(choice["logprobs"]["tokens"]) == text
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2


def test_structured_output(served: Served) -> None:
    kinds = {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}
    schema = {
        "type": "object",
        "properties": kinds,
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    said = served.chat(response_format=wanted, max_tokens=60)["choices"][0]
    value = json.loads(said["message"]["content"])
    assert (
        isinstance(value["ok"], bool) and value["n"] in (1, 22) and said["finish_reason"] == "stop"
    )
    wanted["json_schema"] = {"name": "x", "schema": {"type": 3}}
    body = {"messages": MESSAGES, "response_format": wanted}
    refused = served.send("POST", "/v1/chat/completions", body)
    assert refused[0] == 400 and refused[1]["error"]["code"] == "grammar"


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {**CITY, "additionalProperties": False}},
    }
    for name in ("get_weather", "get_time")
]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
def test_calls_that_have_to_come(served: Served, choice: Any) -> None:
    """Streamed as they are whole."""
    fields = {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 150,
        "parallel_tool_calls": False,
    }
    for seed in range(3):
        said = served.chat(seed=seed, **fields)["choices"][0]
        (call,) = (each["function"] for each in said["message"]["tool_calls"])
        assert said["message"]["content"] is None and list(json.loads(call["arguments"])) == [
            "city"
        ]
        assert call["name"] in (
            ("get_weather", "get_time") if choice == "required" else ("get_time",)
        )
        assert said["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        deltas = [event["choices"][0] for event in served.stream(seed=seed, **fields)]
        pieces = [each["function"] for one in deltas for each in one["delta"].get("tool_calls", ())]
        assert [piece["name"] for piece in pieces if "name" in piece] == [call["name"]]
        assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
        assert not any(one["delta"].get("content") for one in deltas)
        assert deltas[-1]["finish_reason"] == said["finish_reason"]


def test_a_template_without_tools_refuses_calls_that_may_come(served: Served) -> None:
    status, answer = served.send(
        "POST", "/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}
    )
    assert status == 400 and answer["error"]["param"] == "tools"
    assert "leave them out" in answer["error"]["message"]
    assert served.say(tools=[]) and served.say(tools=TOOLS, tool_choice="none")


def test_other_paths_and_what_is_cached(served) -> None:
    assert served.send("GET", "/health")[1]["status"] == "ok"
    assert served.send("GET", "/v1/models")[1]["data"][0]["id"] == "demo"
    assert [served.send("GET", f"/v1/models/{name}")[0] for name in ("demo", "other")] == [200, 404]
    ids = served.ask("/tokenize", {"messages": MESSAGES})["tokens"]
    text = served.ask("/detokenize", {"tokens": ids})["prompt"]
    assert text == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    figures = served.send("GET", "/metrics")[1]
    named = dict(line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#"))
    assert int(named["spd_generation_tokens_total"]) > 100 and named["spd_requests_running"] == "0"
    assert int(named['spd_spec_decode_num_accepted_tokens_per_pos_total{position="0"}']) > 0
    system = {"role": "system", "content": "Be exact about every function. " * 30}
    first, second = (
        served.chat(messages=[system, *MESSAGES], max_tokens=2)["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server in which two may wait, and that wants a key."""
    with serving(waiting=2, key="secret") as one:
        yield one


KEY = {"Authorization": "Bearer secret"}
CHAT = "/v1/chat/completions"


def head(length: int) -> bytes:
    """The head of a request whose body is so long."""
    lines = f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {length}"
    return "\r\n".join((*lines, "Authorization: Bearer secret", "", "")).encode()


def begin(served: Served, tokens: int = 3000, **fields: Any) -> http.client.HTTPConnection:
    """A request that is answered for long; a stream's head has come, and what follows is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    connection.request("POST", CHAT, json.dumps(body), KEY)
    assert not body["stream"] or connection.getresponse().status == 200
    return connection


def settle(served: Served) -> float:
    """Wait until no more requests run or wait; for how long that was."""
    began = time.monotonic()
    wait_until(lambda: served.service.open_requests == 0)
    return time.monotonic() - began


def test_a_key_is_wanted(small: Served) -> None:
    for key in ("Bearer wrong", "secret", None):
        found, answer = small.send(
            "GET", "/v1/models", None, {"Authorization": key} if key else None
        )
        assert (found, answer["error"]["code"]) == (401, "invalid_api_key")
    assert small.send("GET", "/v1/models", None, KEY)[0] == small.send("GET", "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(small: Served) -> None:
    open_ones = [begin(small) for _ in range(SLOTS + 2)]
    response = begin(small, stream=False).getresponse()
    assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
    assert json.loads(response.read())["error"]["type"] == "rate_limit_error"
    for one in open_ones:
        one.close()
    settle(small)
    small.ask(CHAT, {"messages": MESSAGES, "max_tokens": 2}, KEY)


def test_leaving_frees_a_slot_within_a_round(small: Served) -> None:
    """All slots are taken by texts of thousands of tokens; one that leaves makes room at once."""
    open_ones = [begin(small) for _ in range(SLOTS)]
    waiting: list[Any] = []
    asked = CHAT, {"messages": MESSAGES, "max_tokens": 1}, KEY
    asking = threading.Thread(target=lambda: waiting.append(small.ask(*asked)))
    asking.start()
    time.sleep(0.3)
    assert not waiting
    open_ones.pop().close()
    asking.join(5)
    assert waiting
    whole = begin(small, stream=False)
    wait_until(
        lambda: small.service.open_requests == SLOTS
    )  # one leaves before its answer is whole
    for one in (*open_ones, whole):
        one.close()
    assert settle(small) < 5


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_left(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "SEND_SECONDS", 0.3)
    before = small.service.counters.get('requests_total{reason="abort"}', 0)
    body = {
        "messages": MESSAGES,
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
    }
    data = json.dumps({**body, "top_logprobs": 20}).encode()  # large events, so that buffers fill
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", small.port))
        connection.sendall(head(len(data)) + data)
        wait_until(lambda: small.service.open_requests)
        settle(small)
    assert small.service.counters['requests_total{reason="abort"}'] == before + 1


def test_slow_bodies_and_heads(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    for sent, said in (
        (head(9) + b"{", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nHost: lo", b""),
        (b"", b""),
    ):
        with connected(small.port) as connection:
            connection.sendall(sent)
            assert connection.recv(1000)[: len(said) or 1] == said


def test_one_fault_ends_no_other(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the engine breaks on, though its check let it through: the others go on."""
    add = small.service.engine.add

    def breaks(request: Any) -> None:
        if request.params.seed == 13:
            raise RuntimeError("a fault of one request: /root/secret")
        add(request)

    monkeypatch.setattr(small.service.engine, "add", breaks)
    other = begin(small, tokens=40)
    status, answer = small.send(
        "POST", CHAT, {"messages": MESSAGES, "seed": 13, "max_tokens": 4}, KEY
    )
    assert status == 500 and answer["error"]["type"] == "api_error"
    assert "secret" not in answer["error"]["message"]
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += other.sock.recv(65536)
    assert data.count(b"data: [DONE]") == 1 and data.count(b'"finish_reason":"length"') == 1
    settle(small)


def test_many_prompts_at_once_take_few_threads(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has memory of its own that the allocator keeps: 13 MiB where it encoded a long prompt."""
    used = set[int]()
    prepare = small.service.prepare

    def slowly(wish: Any) -> Any:
        used.add(threading.get_ident())
        time.sleep(0.1)  # so that all the others come meanwhile
        return prepare(wish)

    monkeypatch.setattr(small.service, "prepare", slowly)
    asked = CHAT, {"messages": MESSAGES, "max_tokens": 1}, KEY
    with ThreadPoolExecutor(SLOTS + 2) as pool:
        assert all(pool.map(lambda _: small.ask(*asked), range(SLOTS + 2)))
    assert len(used) == run.PREPARE_THREADS


def test_a_client_of_the_socket_keeps_a_server_from_being_idle() -> None:
    with serving(idle=0.3) as one:
        clients: Any = one.service.clients
        clients.add("a connection")
        time.sleep(1.0)
        assert not one.server.should_exit
        clients.clear()
        wait_until(lambda: one.server.should_exit)


def test_packed_bodies_and_two_lengths(served: Served) -> None:
    """Refused by name; behind two lengths the connection is closed, for the next request is not sure."""
    status, answer = served.send(
        "POST", "/v1/completions", b"\x1f\x8b", {"Content-Encoding": "gzip"}
    )
    assert status == 415 and "gzip" in answer["error"]["message"]
    plain = {"Content-Encoding": "identity"}
    served.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}, plain)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
        "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with connected(served.port) as connection:
        connection.sendall(head.encode())
        data = b""
        while more := connection.recv(4096):
            data += more
    assert data.startswith(b"HTTP/1.1 400") and b"ambiguous_length" in data


def test_other_names_of_the_model(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    path = "/v1/completions"
    assert served.send("POST", path, {**body, "model": "small"})[0] == 404
    monkeypatch.setattr(served.service, "names", ("demo", "small"))
    assert served.ask(path, {**body, "model": "small"})["model"] == "demo"
    cards = served.send("GET", "/v1/models")[1]["data"]
    assert [card["id"] for card in cards] == ["demo", "small"]
    assert served.send("GET", "/v1/models/small")[1]["id"] == "small"
    assert served.send("POST", path, {**body, "model": "gpt-4"})[0] == 404
    monkeypatch.setattr(served.service, "any_model", True)
    assert served.send("POST", path, {**body, "model": "gpt-4"})[0] == 200
