"""Each path answers in the API's form with the text of the engine alone, also under load and
faults."""

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
from spd.runtime import Engine, RequestMetrics, SamplingParams
from spd.server import app as front
from spd.server import body as request_body
from spd.server import run
from tests.cli.conftest import wait_until
from tests.server.conftest import MESSAGES, QUESTION, SLOTS, Served, connected, serving


@pytest.fixture(scope="module")
def alone() -> Any:
    """Yield a function that returns the reply of an engine with one slot and no speculation."""
    settings = plan_settings(
        ServeOptions(concurrency=1, threads=1, spec="off").to_generate_options()
    )
    engine = Engine(settings.config)

    def say(content: str, **params: Any) -> str:
        prompt = Prompt(messages=({"role": "user", "content": content},), variables={})
        sampling = SamplingParams(**{"temperature": 0.7, **params})
        request, _ = settings.prepare_request("x", prompt, sampling)
        return engine.generate([request])[0].text

    yield say
    engine.close()


def test_many_clients_get_the_text_that_one_engine_gives_alone(served: Served, alone: Any) -> None:
    """Eight at once over four slots, streamed and whole, with and without drafts, while others
    leave.
    """
    texts: dict[tuple[int, bool], str] = {}

    def sampling_fields(seed: int) -> dict[str, Any]:
        return {"seed": seed, "max_tokens": 40 + seed, "temperature": 0.8 * (seed % 8 < 4)}

    def ask(seed: int, stream: bool) -> None:
        speculative = [{"draft_max": 1}, {"spec": "off"}, {}, {"draft_max": 3}][seed % 4]
        fields = {"speculative": speculative, **sampling_fields(seed)}
        if stream:
            messages = [{"role": "user", "content": f"Explain example {seed}."}]
            events = served.stream(messages=messages, **fields)
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        else:
            text = served.chat(f"Explain example {seed}.", **fields)["choices"][0]["message"][
                "content"
            ]
        texts[seed, stream] = text

    def leave(seed: int) -> None:
        """Request a long text, and disconnect when it begins."""
        body = json.dumps({"messages": MESSAGES, "max_tokens": 2000, "seed": seed, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with connected(served.port) as connection:
            connection.sendall((head + body).encode())
            connection.recv(300)

    with ThreadPoolExecutor(22) as pool:
        futures = [pool.submit(ask, seed, stream) for seed in range(8) for stream in (True, False)]
        futures += [pool.submit(leave, seed) for seed in range(6)]
    assert all(future.result() is None for future in futures)
    for seed in range(8):
        text = alone(f"Explain example {seed}.", **sampling_fields(seed))
        assert texts[seed, True] == texts[seed, False] == text


def test_a_complete_answer_and_its_stream_agree(served) -> None:
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
    reply = served.chat(**fields)
    events = served.stream(**fields, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"] | {"x": 0} != {"x": 0}
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][field] == reply["usage"][field]
    for choice in reply["choices"]:
        chunks = [
            e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]
        ]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == choice["message"]["content"]
        entries = [
            entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
        ]
        assert entries == choice["logprobs"]["content"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    first, second = reply["choices"]  # each has a seed of its own, derived from the first one's
    assert first["message"] != second["message"]


def test_stop_bias_and_limits_reach_the_engine(served: Served) -> None:
    plain = served.say(max_tokens=24)
    stopped = served.chat(temperature=0, max_tokens=24, stop=plain[10:16])["choices"][0]
    assert stopped["message"]["content"] == plain[:10] and stopped["finish_reason"] == "stop"
    answer = served.chat(temperature=0, max_completion_tokens=3, max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    token = served.ask("/tokenize", {"prompt": " the"})["tokens"][0]
    assert served.say(max_tokens=4, logit_bias={str(token): 100}) == " the" * 4


def test_completions_continue_raw_prompts(served: Served) -> None:
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


def test_structured_output_fits_its_schema(served: Served) -> None:
    kinds = {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}
    schema = {
        "type": "object",
        "properties": kinds,
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    choice = served.chat(response_format=response_format, max_tokens=60)["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert (
        isinstance(value["ok"], bool)
        and value["n"] in (1, 22)
        and choice["finish_reason"] == "stop"
    )
    response_format["json_schema"] = {"name": "x", "schema": {"type": 3}}
    body = {"messages": MESSAGES, "response_format": response_format}
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


@pytest.mark.covers(count=1)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
def test_required_calls_fit_their_schema(served: Served, choice: Any) -> None:
    """A stream gives the same calls as one body."""
    fields = {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 150,
        "parallel_tool_calls": False,
    }
    for seed in range(3):
        reply = served.chat(seed=seed, **fields)["choices"][0]
        (call,) = (tool_call["function"] for tool_call in reply["message"]["tool_calls"])
        assert reply["message"]["content"] is None and list(json.loads(call["arguments"])) == [
            "city"
        ]
        assert call["name"] in (
            ("get_weather", "get_time") if choice == "required" else ("get_time",)
        )
        assert reply["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        deltas = [event["choices"][0] for event in served.stream(seed=seed, **fields)]
        pieces = [
            tool_call["function"]
            for chunk in deltas
            for tool_call in chunk["delta"].get("tool_calls", ())
        ]
        assert [piece["name"] for piece in pieces if "name" in piece] == [call["name"]]
        assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
        assert not any(chunk["delta"].get("content") for chunk in deltas)
        assert deltas[-1]["finish_reason"] == reply["finish_reason"]


def test_a_template_without_tools_refuses_calls_that_may_come(served: Served) -> None:
    status, answer = served.send(
        "POST", "/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}
    )
    assert status == 400 and answer["error"]["param"] == "tools"
    assert "leave them out" in answer["error"]["message"]
    assert served.say(tools=[]) and served.say(tools=TOOLS, tool_choice="none")


def test_other_paths_answer_and_prefixes_are_cached(served) -> None:
    assert served.send("GET", "/health")[1]["status"] == "ok"
    assert served.send("GET", "/v1/models")[1]["data"][0]["id"] == "demo"
    assert [served.send("GET", f"/v1/models/{name}")[0] for name in ("demo", "other")] == [200, 404]
    ids = served.ask("/tokenize", {"messages": MESSAGES})["tokens"]
    text = served.ask("/detokenize", {"tokens": ids})["prompt"]
    assert text == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    figures = served.send("GET", "/metrics")[1]
    counters = dict(
        line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#")
    )
    assert (
        int(counters["spd_generation_tokens_total"]) > 100
        and counters["spd_requests_running"] == "0"
    )
    assert int(counters['spd_spec_decode_num_accepted_tokens_per_pos_total{position="0"}']) > 0
    faults = [name for name in counters if "spec_decode_faults" in name]
    assert not [name for name in faults if 'reason="cost"' not in name], "what it costs is measured"
    system = {"role": "system", "content": "Be exact about every function. " * 30}
    first, second = (
        served.chat(messages=[system, *MESSAGES], max_tokens=2)["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64


def test_drafts_that_do_not_help_are_counted_and_told_once(served: Served, capfd: Any) -> None:
    for tokens in (30, 40):
        metrics = RequestMetrics(
            completion_tokens=tokens, outcomes={(4, 0): tokens}, draft_fault="chance"
        )
        served.service.open_requests += 1
        served.service.count_ended(metrics, "length")
    counters = served.send("GET", "/metrics")[1]
    assert 'spd_spec_decode_faults_total{reason="chance"} 2\n' in counters
    assert capfd.readouterr().err.count("0 of 30 first drafts were accepted") == 1


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """Yield a server in which two may wait, and that wants a key."""
    with serving(waiting=2, key="secret") as server:
        yield server


KEY = {"Authorization": "Bearer secret"}
CHAT = "/v1/chat/completions"


def head(length: int) -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    lines = f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {length}"
    return "\r\n".join((*lines, "Authorization: Bearer secret", "", "")).encode()


def begin(served: Served, tokens: int = 3000, **fields: Any) -> http.client.HTTPConnection:
    """Return a request that is answered for long; a stream's head has come, and what follows is
    not read.
    """
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


def test_a_key_is_required(small: Served) -> None:
    for key in ("Bearer wrong", "secret", None):
        status, answer = small.send(
            "GET", "/v1/models", None, {"Authorization": key} if key else None
        )
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert small.send("GET", "/v1/models", None, KEY)[0] == small.send("GET", "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(small: Served) -> None:
    connections = [begin(small) for _ in range(SLOTS + 2)]
    response = begin(small, stream=False).getresponse()
    assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
    assert json.loads(response.read())["error"]["type"] == "rate_limit_error"
    for connection in connections:
        connection.close()
    settle(small)
    small.ask(CHAT, {"messages": MESSAGES, "max_tokens": 2}, KEY)


def test_leaving_frees_a_slot_within_a_round(small: Served) -> None:
    """All slots are taken by texts of thousands of tokens; one that leaves makes room at once."""
    connections = [begin(small) for _ in range(SLOTS)]
    answers: list[Any] = []
    body = {"messages": MESSAGES, "max_tokens": 1}
    client = threading.Thread(target=lambda: answers.append(small.ask(CHAT, body, KEY)))
    client.start()
    time.sleep(0.3)
    assert not answers
    connections.pop().close()
    client.join(5)
    assert answers
    unstreamed = begin(small, stream=False)
    wait_until(
        lambda: small.service.open_requests == SLOTS
    )  # one leaves before its answer is whole
    for connection in (*connections, unstreamed):
        connection.close()
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


def test_slow_bodies_and_heads_are_ended(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    for sent, expected in (
        (head(9) + b"{", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nHost: lo", b""),
        (b"", b""),
    ):
        with connected(small.port) as connection:
            connection.sendall(sent)
            assert connection.recv(1000)[: len(expected) or 1] == expected


def test_a_faulty_request_ends_no_other(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Each thread has memory of its own that the allocator keeps: 13 MiB where it encoded a long
    prompt.
    """
    thread_ids = set[int]()
    prepare = small.service.prepare_generation

    def slowly(generation: Any) -> Any:
        thread_ids.add(threading.get_ident())
        time.sleep(0.1)  # so that all the others come meanwhile
        return prepare(generation)

    monkeypatch.setattr(small.service, "prepare_generation", slowly)
    body = {"messages": MESSAGES, "max_tokens": 1}
    with ThreadPoolExecutor(SLOTS + 2) as pool:
        assert all(pool.map(lambda _: small.ask(CHAT, body, KEY), range(SLOTS + 2)))
    assert len(thread_ids) == run.PREPARE_THREADS


def test_a_client_of_the_socket_keeps_a_server_from_being_idle() -> None:
    with serving(idle=0.3) as served:
        clients: Any = served.service.clients
        clients.add("a connection")
        time.sleep(1.0)
        assert not served.server.should_exit
        clients.clear()
        wait_until(lambda: served.server.should_exit)


def test_compressed_bodies_and_two_lengths_are_refused(served: Served) -> None:
    """The encoding is named; behind two lengths the connection closes, for the body's end is not
    sure.
    """
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
        while chunk := connection.recv(4096):
            data += chunk
    assert data.startswith(b"HTTP/1.1 400") and b"ambiguous_length" in data


def test_further_names_of_the_model_are_accepted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    path = "/v1/completions"
    assert served.send("POST", path, {**body, "model": "small"})[0] == 404
    monkeypatch.setattr(served.service, "names", ("demo", "small"))
    assert served.ask(path, {**body, "model": "small"})["model"] == "demo"
    cards = served.send("GET", "/v1/models")[1]["data"]
    assert [card["id"] for card in cards] == ["demo", "small"]
    assert served.send("GET", "/v1/models/small")[1]["id"] == "small"
    assert served.send("POST", path, {**body, "model": "gpt-4"})[0] == 404
    monkeypatch.setattr(served.service, "accepts_any_model", True)
    assert served.send("POST", path, {**body, "model": "gpt-4"})[0] == 200
