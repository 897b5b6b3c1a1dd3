"""What the host may and may not do while rounds run on a GPU, and that its device equals the CPU's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from tests.helpers import replace_transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUESTION = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"


def demo_engine(**wishes: Any) -> Engine:
    """The demo on the GPU at fixed k."""
    defaults: dict[str, Any] = {"model": demo_folder(), "device": "cuda", "adaptive": False, "ctx": 1024}
    return Engine(EngineConfig(**{**defaults, **wishes}))


def prompt() -> tuple[int, ...]:
    return tuple(Tokenizer.open(demo_folder()).encode(QUESTION, parse_special=True))


def text_of(engine: Engine, ids: Sequence[int], **params: Any) -> list[int]:
    """The tokens of one request."""
    wanted = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, "seed": 5, **params}
    found: list[int] = []
    for event in engine.stream([Request("r", tuple(ids), SamplingParams(**wanted))]):
        found += event.token_ids
    return found


@pytest.mark.parametrize("spec", ["off", "ngram", "draft"])
@pytest.mark.parametrize("lag", [1, 2])
def test_no_round_waits_for_the_device(spec: str, lag: int) -> None:
    """A synchronizing call in a steady round raises; only the event of the copied ring is waited for."""
    engine = demo_engine(spec=spec, lag=lag, **({} if spec == "off" else {"draft_max": 4}))
    params = SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True, seed=3)
    engine.add(Request("r", prompt(), params))
    for _ in range(12):  # admission, capture
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            engine.step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine._parts.state.length[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()


def test_float32_text_equals_the_cpus() -> None:
    gpu = text_of(demo_engine(spec="off", dtype="float32"), prompt())
    cpu = text_of(demo_engine(spec="off", dtype="float32", device="cpu", threads=2), prompt())
    assert gpu == cpu and len(gpu) == 64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float) -> None:
    engine = demo_engine(spec="draft", draft_model=demo_folder(), draft_max=4)
    text_of(engine, prompt(), temperature=temperature, max_tokens=200)
    metrics = engine.metrics("r")
    # Drafts beyond the last token wanted are cut before they are verified.
    assert metrics.draft_n and metrics.draft_n_accepted_raw == metrics.draft_n


def test_an_edit_of_pinned_memory_in_flight_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads through one reused buffer, behind a slow device, reach it overwritten: the text changes."""
    ids = prompt()
    expected = text_of(demo_engine(spec="draft", draft_model=demo_draft_folder(), draft_max=4), ids)
    buffer = torch.empty(4096, dtype=torch.long).pin_memory()

    def careless(values: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)  # the copy comes late, as behind a long round
        view = buffer[: len(values)]
        view.copy_(torch.tensor(values, dtype=dtype))
        found = view.to(device, non_blocking=True)
        buffer.fill_(7)  # edited in place while the copy is in flight
        return found

    engine = demo_engine(spec="draft", draft_model=demo_draft_folder(), draft_max=4)
    with monkeypatch.context() as patch:
        replace_transfers(patch, careless)
        broken = text_of(engine, ids)
    assert broken != expected, "the injected edit went unseen"
    again = text_of(demo_engine(spec="draft", draft_model=demo_draft_folder(), draft_max=4), ids)
    assert again == expected


@pytest.mark.parametrize("slots", [1, 16])
def test_captured_and_eager_rounds_agree(slots: int) -> None:
    """Tokens, and drafts and acceptances of every request, whatever the lag and with graphs or without."""
    tokenizer = Tokenizer.open(demo_folder())
    questions = ("os.path.join", "json.dumps", "re.compile", "shutil.copy")
    prompts = [tokenizer.encode(QUESTION.replace("os.path.join", q), parse_special=True) for q in questions]
    seen = []
    for graphs, lag in ((True, 1), (True, 0), (True, 2), (False, 1)):
        engine = demo_engine(
            spec="draft", draft_model=demo_draft_folder(), draft_max=3, slots=slots, graphs=graphs, lag=lag
        )
        requests = [
            Request(str(i), tuple(ids), SamplingParams(temperature=0.7 * (i % 2), max_tokens=24, seed=i))
            for i, ids in enumerate(prompts)
        ]
        texts: dict[str, list[int]] = {}
        for event in engine.stream(requests):
            texts.setdefault(event.request_id, []).extend(event.token_ids)
        counts = [
            (m.draft_n, m.draft_n_accepted_raw, list(m.accepted_per_position))
            for m in (engine.metrics(str(i)) for i in range(len(prompts)))
        ]
        seen.append((texts, counts))
        engine.close()
    assert all(one == seen[0] for one in seen)
