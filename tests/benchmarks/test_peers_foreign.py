"""The workers of vLLM and llama.cpp against stand-ins of what they drive: no peer is installed for tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers.protocol import WorkerOptions
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
