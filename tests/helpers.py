"""What several tests share: tiny checkpoints on a shelf, and runs of whole generations."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig
from spd.kernels.interface import Kernels
from spd.runtime import Engine, EngineConfig, Request, RequestMetrics, RoundRecord, SamplingParams
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.rows import PromptPart, SlotView
from tests.recipes.tiny import VARIANTS, write_tiny

Tiny = Callable[..., Path]  # writes a tiny checkpoint, or finds it
Patch = pytest.MonkeyPatch
Prompt = tuple[int, ...]
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"spec": "ngram", "ngram_min": 2, "draft_max": 4},
    **{spec: {"spec": spec, "draft_max": 3} for spec in ("draft", "mtp", "eagle3")},
    "mtp+ngram": {"spec": "mtp+ngram", "draft_max": 3, "ngram_min": 2},
}  # Engine options of every proposer that the matrices run; a draft model or a head is added by the test.
WHY = "the interpreter needs TRITON_INTERPRET, which is set without a GPU only"
INTERPRETED = [
    pytest.mark.skipif(torch.cuda.is_available(), reason=WHY),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of log(0)
]  # Marks of tests that run Triton kernels in its interpreter.


@dataclass(frozen=True)
class Damped:
    """How loudly a tiny model's layers speak: a draft of the `loud` ones often agrees, and not always."""

    loud: int
    soft: float = 0.12

    def __call__(self, layer: int) -> float:
        return 1.0 if layer < self.loud else self.soft


def with_operations(kernels: Kernels, **operations: Callable[..., Any]) -> Kernels:
    """A copy of a set of kernels with other operations in place of some."""
    changed = copy(kernels)
    vars(changed).update(operations)
    return changed


def few_programs(monkeypatch: pytest.MonkeyPatch, processors: int = 1) -> None:
    """Few programs for the interpreter: of a small device none is idle, and one turns all heads of a row."""
    from spd.kernels.attention import paged_attention_triton, rotary_store_triton
    from spd.kernels.launch import device_properties

    monkeypatch.setattr(
        paged_attention_triton,
        "device_properties",
        lambda it: replace(device_properties(it), processors=processors),
    )
    monkeypatch.setattr(rotary_store_triton, "HEADS_A_PROGRAM", 16)


class TinyShelf:
    """Writes each tiny checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, variant: str = "qwen3", **options: Any) -> Path:
        arguments = {**VARIANTS[variant], **options}
        key = hashlib.sha256(repr(sorted(arguments.items())).encode()).hexdigest()[:16]
        folder = self.folder / f"{variant}-{key}"
        return folder if folder.exists() else write_tiny(folder, **arguments)


@dataclass
class Run:
    """Everything one request gave."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def output(self) -> tuple[list[int], str, str | None]:
        """What must not depend on speculation."""
        return self.tokens, self.text, self.finish_reason

    @property
    def drafts(self) -> list[tuple[list[int], int]]:
        """(drafts, accepted) of each round."""
        return [(record.draft, record.accepted) for record in self.rounds]


def read_model_config(folder: Path) -> ModelConfig:
    return ModelFolder(folder).config


def make_engine(model: Path, **options: Any) -> Engine:
    """A small engine: one thread, torch in float32, a short context, fixed k unless said otherwise."""
    options = {
        "threads": 1,
        "dtype": "float32",
        "ctx": 256,
        "adaptive": False,
        "spec": "off",
        **options,
    }
    reference = options["dtype"] == "float32" and options.get("device", "cpu") == "cpu"
    return Engine(
        EngineConfig(model=model, **{"kernels": "torch" if reference else "auto", **options})
    )


def local_queue(engine: Engine) -> LocalRoundQueue:
    """Return the queue of an engine of one rank, with the round and the state behind it."""
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    return queue


def quick_engine(model: Path, **options: Any) -> Engine:
    """`make_engine` by C kernels where there are any: for what is decided, not for how it is computed."""
    return make_engine(model, **{"kernels": "auto", **options})


def run_all(engine: Engine, prompts: list[Prompt], params: list[SamplingParams]) -> list[Run]:
    asked = enumerate(zip(prompts, params, strict=True))
    return run_requests(engine, [Request(f"r{i}", *each) for i, each in asked])


def run_requests(engine: Engine, requests: list[Request]) -> list[Run]:
    """Run every request to its end, together as far as the engine has slots."""
    runs = {request.id: Run() for request in requests}
    engine.trace = lambda record: runs[record.request].rounds.append(record)
    for event in engine.stream(requests):
        run = runs[event.request_id]
        assert run.finish_reason is None, "an event after the end"
        run.tokens += event.token_ids
        run.text += event.text
        run.finish_reason = event.finish_reason
        run.logprobs += [entry.logprob for entry in event.logprobs]
        run.drafted += event.drafted
    for name, run in runs.items():
        run.metrics = engine.metrics(name)
    engine.trace = None
    return list(runs.values())


def outputs(runs: Sequence[Run]) -> list[tuple[list[int], str, str | None]]:
    """What must not depend on speculation, of each."""
    return [run.output for run in runs]


def drafts(runs: Sequence[Run]) -> list[list[tuple[list[int], int]]]:
    """(drafts, accepted) of each round of each."""
    return [run.drafts for run in runs]


def accepted(runs: list[Run]) -> int:
    return sum(run.metrics.draft_n_accepted for run in runs)


def drafted(runs: list[Run]) -> int:
    return sum(run.metrics.draft_n for run in runs)


def assert_same(runs: list[Run], expected: list[Run], why: object = "") -> None:
    """Tokens, text, end and log-probabilities are equal."""
    assert outputs(runs) == outputs(expected), why
    assert [run.logprobs for run in runs] == [run.logprobs for run in expected], why


def next_turn(
    prompt: Prompt, reply: list[int], params: SamplingParams, said: Prompt = (7, 8, 9)
) -> Request:
    """A request that goes on behind a reply, and says that it was generated."""
    spans = (("prompt", len(prompt)), ("generated", len(reply)), ("prompt", len(said)))
    return Request("x", (*prompt, *reply, *said), params, spans if said else spans[:2])


def run_one(model: Path, prompt: Prompt, params: SamplingParams, **options: Any) -> Run:
    return run_all(make_engine(model, **options), [prompt], [params])[0]


def logits_of(engine: Engine, prompt: Sequence[int], chunk: int = 64) -> torch.Tensor:
    """Float32 logits [T, V] of a text: whole chunks by the prefill program, the rest by tiles; 0 is tiles."""
    runner = engine.round_queue.runner
    ids = torch.tensor([prompt])
    view = SlotView(len(prompt), range(2, 10 if len(prompt) <= 512 else 18))  # whole blocks of 512
    start = 0
    found = list[torch.Tensor]()
    with torch.inference_mode():
        while start < len(prompt):
            chunked = 0 < chunk <= len(prompt) - start
            stop = start + (chunk if chunked else min(32, len(prompt) - start))
            part = PromptPart(0, ids, start, stop, view._replace(bound=stop), chunked)
            made = runner.forward_prompt(part)
            found.append(runner.logits(made.hidden)[0])
            start = stop
    return torch.cat(found)


def speaks_as(
    reference: Any,
    engine: Engine,
    prompt: Prompt,
    count: int = 64,
    ends: bool = False,
    close: float = 1e-4,
) -> Run:
    """Assert that logits and greedy text are a `transformers` model's. ends: before `count` where it may."""
    params = SamplingParams(max_tokens=count, ignore_eos=not ends)
    own = logits_of(engine, prompt)
    run = run_all(engine, [prompt], [params])[0]
    with torch.inference_mode():
        whole = reference(input_ids=torch.tensor([[*prompt, *run.tokens]])).logits[0]
    first = len(prompt)
    assert (own - whole[:first]).abs().max() < close
    assert run.tokens == whole[first - 1 : -1].argmax(-1).tolist()
    assert len(run.tokens) == count or ends
    return run


def replace_transfers(patch: pytest.MonkeyPatch, instead: Callable[..., torch.Tensor]) -> set[str]:
    """Let `instead` bring small values to the device, wherever `to_device` does; returns the modules."""
    own = {
        name
        for name in sys.modules
        if name.startswith("spd.") and name != "spd.runtime.round.transfer"
    }
    found = {name for name in own if hasattr(sys.modules[name], "to_device")}
    for name in found:
        patch.setattr(sys.modules[name], "to_device", instead)
    return found


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[Prompt]:
    """Prompts of repeated fragments, so that n-gram lookup finds something."""
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        fragment = [source.randrange(vocab) for _ in range(max(3, length // 4))]
        prompts.append(
            (*(fragment * 5)[: length - 2], *(source.randrange(vocab) for _ in range(2)))
        )
    return prompts


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a folder's config.json; the folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object] | None = None
) -> str:
    """What an engine says of a folder whose tensors were changed: the message, and its reasons."""
    edit_weights(folder, change or (lambda tensors: None))
    with pytest.raises(CheckpointError) as caught:
        make_engine(folder)
    assert caught.value.exit_code == 4
    return "\n".join((caught.value.message, *caught.value.reason))


def cut_when_read(patch: pytest.MonkeyPatch, victim: Path) -> None:
    """Cut a checkpoint's file short at the worst moment: it was opened, and seen to be the one expected."""
    opened = Checkpoint.open_shard

    def cut(self: Checkpoint, shard: Path) -> int:
        descriptor = opened(self, shard)
        if shard == victim:
            os.truncate(shard, os.stat(shard).st_size // 2)
        return descriptor

    patch.setattr(Checkpoint, "open_shard", cut)
