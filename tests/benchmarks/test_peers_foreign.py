"""The workers of vLLM and llama.cpp against stand-ins of what they drive: no peer is installed for tests."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.peers import llama_worker
from benchmarks.peers.protocol import Speculation, WorkerOptions
from spd.formats.demo import demo_draft_folder


def options(**given: Any) -> WorkerOptions:
    fields: dict[str, Any] = dict.fromkeys(("draft", "eagle3", "imposed", "build")) | {"slots": 2, "ctx": 64}
    fields |= {"model": demo_draft_folder(), "draft_max": 3, "threads": 1, "dtype": "bfloat16"}
    fields |= {"ngram": False, "mtp": False}
    return WorkerOptions(**{**fields, **given})


class FakeVllm:
    """Counts up two tokens a step for each request, and counts its drafts as vLLM does, by process."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.llm_engine = self
        self.waiting: dict[str, list[int]] = {}
        self.drafts = 7  # earlier ones

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.waiting[name] = [sum(prompt["prompt_token_ids"]) + i for i in range(params.max_tokens)]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        outputs = []
        for name, left in list(self.waiting.items()):
            now, self.waiting[name] = left[:2], left[2:]
            done = not self.waiting[name]
            if done:
                del self.waiting[name]
            self.drafts += 1
            one = SimpleNamespace(token_ids=now, finish_reason="length" if done else None)
            outputs.append(SimpleNamespace(request_id=name, outputs=[one], finished=done))
        return outputs

    def get_metrics(self) -> list[Any]:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        values = (self.drafts, 3 * self.drafts, self.drafts)
        counters = [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=float(value))
            for name, value in zip(names, values, strict=True)
        ]
        positions = SimpleNamespace(
            name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.drafts, 0, 0]
        )
        return [*counters, positions, SimpleNamespace(name="vllm:other", value=1.0)]


@pytest.fixture
def vllm_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.__version__, vllm.LLM, vllm.SamplingParams = "0.0", FakeVllm, SimpleNamespace  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    yield importlib.import_module("benchmarks.peers.vllm_worker")
    sys.modules.pop("benchmarks.peers.vllm_worker", None)


def test_vllm_is_stepped_and_its_counters_are_read(vllm_worker: Any) -> None:
    engine = vllm_worker.VllmEngine(options(draft=Path("d"), imposed=2.5))
    given = engine.llm.given["speculative_config"]
    assert given["rejection_sample_method"] == "synthetic"
    assert 1 + sum(given["synthetic_acceptance_rates"]) == pytest.approx(2.5)
    assert engine.llm.given["max_num_seqs"] == 2 and engine.llm.given["disable_log_stats"] is False
    first = engine.run([[1, 2], [3], [4]], 5, 2, None)
    assert [one.token_ids for one in first.requests] == [[n + i for i in range(5)] for n in (3, 3, 4)]
    assert [[chunk.tokens for chunk in one.chunks] for one in first.requests] == [[2, 2, 1]] * 3
    again = engine.generate([9], 4)
    assert again.extra["speculation"] == {
        "drafts": 2,
        "draft_tokens": 6,
        "accepted": 2,
        "per_position": (2, 0, 0),
    }
    assert engine.run([[1]], 2, 1, [0.01]).requests[0].token_ids == [1, 2]
    assert vllm_worker.speculative_config(options(mtp=True)) == {"num_speculative_tokens": 3, "method": "mtp"}
    head = {"model": "h", "num_speculative_tokens": 3, "method": "eagle3"}
    assert vllm_worker.speculative_config(options(eagle3=Path("h"))) == head
    plain = vllm_worker.VllmEngine(options())
    assert "speculative_config" not in plain.llm.given and plain.run([[1]], 2, 1, None).speculation is None


class Completions(BaseHTTPRequestHandler):
    """A llama-server that counts up, token by token."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        for i in range(body["n_predict"]):
            self.say({"content": "x", "tokens": [sum(body["prompt"]) + i], "stop": False})
        timings = {"draft_n": 6, "draft_n_accepted": 4}
        self.say({"content": "", "tokens": [1, 2, 3], "stop": True, "timings": timings})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Completions) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join()


def test_llama_streams_and_its_drafts_are_counted(server: int) -> None:
    engine = llama_worker.LlamaEngine(options(ngram=True), port=server)
    result = engine.run([[1, 2], [5]], 9, 2, None)
    assert [one.token_ids for one in result.requests] == [list(range(3, 12)), list(range(5, 14))]
    # 8 tokens after the first of each, 4 of them drafts: 4 rounds each.
    assert result.speculation == Speculation(8, 12, 8, ())
    alone = engine.generate([1], 9)
    assert alone.extra["tokens_per_step"] == 2.0 and len(alone.chunks) == 9
    body = Completions.asked[-1]
    assert body["ignore_eos"] and not body["cache_prompt"] and body["temperature"] == 0
    plain = llama_worker.LlamaEngine(options(), port=server)
    assert plain.generate([1], 4).extra == {} and plain.run([[1]], 4, 1, [0.0]).speculation is None
