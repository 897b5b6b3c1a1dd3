"""Helpers that several tests share: tiny checkpoints, engines of them, and whole generations."""

import functools
import hashlib
import json
import os
import random
import shutil
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
from spd.formats.tokenizer import Tokenizer
from spd.kernels.interface import Kernels
from spd.runtime import Engine, EngineConfig, Request, RequestMetrics, RoundRecord, SamplingParams
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.rows import PromptPart, SlotView
from tests.recipes.tiny import VARIANTS, write_tiny

Tiny = Callable[..., Path]
"""Returns the folder of a tiny checkpoint, and writes it where it does not exist."""
Patch = pytest.MonkeyPatch
Prompt = tuple[int, ...]
PROPOSER_OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"spec": "ngram", "ngram_min": 2, "draft_max": 4},
    **{spec: {"spec": spec, "draft_max": 3} for spec in ("draft", "mtp", "eagle3", "block")},
    "mtp+ngram": {"spec": "mtp+ngram", "draft_max": 3, "ngram_min": 2},
}
"""Engine options of every proposer that the matrices run; the test adds a draft model or a head."""
INTERPRETER_REASON = "the interpreter needs TRITON_INTERPRET, which is set without a GPU only"
INTERPRETER_MARKS = [
    pytest.mark.skipif(torch.cuda.is_available(), reason=INTERPRETER_REASON),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, for log(0)
]
"""Marks of tests that run Triton kernels in its interpreter."""


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """Return the demo's tokenizer, which takes a tenth of a second to read."""
    tokenizer = ModelFolder.resolve("demo").tokenizer
    assert tokenizer is not None
    return tokenizer


@dataclass(frozen=True)
class DampedLayers:
    """A residual gain that damps a tiny model's layers after the first `full_layers`.

    A draft model of those first layers often agrees with the model, and not always.
    """

    full_layers: int
    damped_gain: float = 0.12

    def __call__(self, layer: int) -> float:
        return 1.0 if layer < self.full_layers else self.damped_gain


def replace_operations(kernels: Kernels, **operations: Callable[..., Any]) -> Kernels:
    """Return a copy of a set of kernels with some operations replaced."""
    changed = copy(kernels)
    vars(changed).update(operations)
    return changed


def limit_programs(monkeypatch: pytest.MonkeyPatch, processors: int = 1) -> None:
    """Let kernels launch few programs, for the interpreter's sake.

    The device seems to have `processors`; one program rotates all heads of a row.
    """
    from spd.kernels.attention import paged_attention_triton, rotary_store_triton
    from spd.kernels.latent import mla_attention_triton
    from spd.kernels.launch import device_properties

    for module in (paged_attention_triton, mla_attention_triton):
        monkeypatch.setattr(
            module,
            "device_properties",
            lambda it: replace(device_properties(it), processors=processors),
        )
    monkeypatch.setattr(rotary_store_triton, "HEADS_A_PROGRAM", 16)


class TinyShelf:
    """A folder of tiny checkpoints, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, variant: str = "qwen3", **options: Any) -> Path:
        """Return the folder of a variant with these options; write it the first time."""
        arguments = {**VARIANTS[variant], **options}
        key = hashlib.sha256(repr(sorted(arguments.items())).encode()).hexdigest()[:16]
        folder = self.folder / f"{variant}-{key}"
        return folder if folder.exists() else write_tiny(folder, **arguments)


@dataclass
class Run:
    """Tokens, text, rounds and counters of one finished request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def output(self) -> tuple[list[int], str, str | None]:
        """Tokens, text and finish reason, which must not depend on speculation."""
        return self.tokens, self.text, self.finish_reason

    @property
    def drafts(self) -> list[tuple[list[int], int]]:
        """Draft tokens and accepted count of each round."""
        return [(record.draft, record.accepted) for record in self.rounds]


def read_model_config(folder: Path) -> ModelConfig:
    return ModelFolder(folder).config


def write_altered_drafter(
    folder: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """Write a copy of a drafter's folder with changed tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    place.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, place / "model.safetensors")
    shutil.copy(folder / "config.json", place)
    return place


def make_engine(model: Path, **options: Any) -> Engine:
    """Make a small engine: one thread, torch in float32, a short context, fixed k, or as `options`
    say.
    """
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


def get_local_queue(engine: Engine) -> LocalRoundQueue:
    """Return the queue of an engine of one rank, with the round and the state behind it."""
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    return queue


def make_fast_engine(model: Path, **options: Any) -> Engine:
    """Call `make_engine` with C kernels where there are any: for tests of decisions, not of
    arithmetic.
    """
    return make_engine(model, **{"kernels": "auto", **options})


def run_all(engine: Engine, prompts: list[Prompt], params: list[SamplingParams]) -> list[Run]:
    """Run a request for each prompt, with the parameters of the same place."""
    requests = [
        Request(f"r{i}", prompt, sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    ]
    return run_requests(engine, requests)


def run_requests(engine: Engine, requests: list[Request]) -> list[Run]:
    """Run every request to its end, as many at a time as the engine has slots."""
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


def collect_outputs(runs: Sequence[Run]) -> list[tuple[list[int], str, str | None]]:
    """Return the output of each run, which must not depend on speculation."""
    return [run.output for run in runs]


def collect_drafts(runs: Sequence[Run]) -> list[list[tuple[list[int], int]]]:
    """Return (draft tokens, accepted count) of each round, for each run."""
    return [run.drafts for run in runs]


def count_accepted(runs: list[Run]) -> int:
    return sum(run.metrics.draft_n_accepted for run in runs)


def count_drafted(runs: list[Run]) -> int:
    return sum(run.metrics.draft_n for run in runs)


def assert_same_runs(runs: list[Run], expected: list[Run], reason: object = "") -> None:
    """Assert that tokens, text, finish reason and log-probabilities are equal."""
    assert collect_outputs(runs) == collect_outputs(expected), reason
    assert [run.logprobs for run in runs] == [run.logprobs for run in expected], reason


def make_next_turn(
    prompt: Prompt, reply: list[int], params: SamplingParams, message: Prompt = (7, 8, 9)
) -> Request:
    """Make a request that continues a prompt and its reply, with spans that mark the reply as
    generated.
    """
    spans = (("prompt", len(prompt)), ("generated", len(reply)), ("prompt", len(message)))
    return Request("x", (*prompt, *reply, *message), params, spans if message else spans[:2])


def run_one(model: Path, prompt: Prompt, params: SamplingParams, **options: Any) -> Run:
    return run_all(make_engine(model, **options), [prompt], [params])[0]


def compute_logits(engine: Engine, prompt: Sequence[int], chunk: int = 64) -> torch.Tensor:
    """Return float32 logits [T, V] of a prompt.

    Full chunks go through the prefill program, the remaining rows through tiles; chunk 0: tiles
    only.
    """
    runner = engine.round_queue.runner
    ids = torch.tensor([prompt])
    view = SlotView(len(prompt), range(2, 10 if len(prompt) <= 512 else 18))  # whole blocks of 512
    start = 0
    chunk_logits = list[torch.Tensor]()
    with torch.inference_mode():
        while start < len(prompt):
            chunked = 0 < chunk <= len(prompt) - start
            stop = start + (chunk if chunked else min(32, len(prompt) - start))
            part = PromptPart(
                slot=0,
                token_ids=ids,
                begin=start,
                end=stop,
                view=view._replace(bound=stop),
                chunked=chunked,
            )
            output = runner.forward_prompt(part)
            chunk_logits.append(runner.logits(output.hidden)[0])
            start = stop
    return torch.cat(chunk_logits)


def assert_matches_transformers(
    reference: Any,
    engine: Engine,
    prompt: Prompt,
    count: int = 64,
    may_end_early: bool = False,
    tolerance: float = 1e-4,
) -> Run:
    """Assert that logits and greedy text are those of a `transformers` model.

    may_end_early: an end-of-text token may end the text before `count` tokens.
    """
    params = SamplingParams(max_tokens=count, ignore_eos=not may_end_early)
    prompt_logits = compute_logits(engine, prompt)
    run = run_all(engine, [prompt], [params])[0]
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([[*prompt, *run.tokens]])).logits[0]
    first = len(prompt)
    assert (prompt_logits - expected[:first]).abs().max() < tolerance
    assert run.tokens == expected[first - 1 : -1].argmax(-1).tolist()
    assert len(run.tokens) == count or may_end_early
    return run


def replace_transfers(patch: pytest.MonkeyPatch, transfer: Callable[..., torch.Tensor]) -> set[str]:
    """Replace `to_device` by `transfer` in every module that imports it; return the modules."""
    spd_modules = {
        name
        for name in sys.modules
        if name.startswith("spd.") and name != "spd.runtime.round.transfer"
    }
    patched_modules = {name for name in spd_modules if hasattr(sys.modules[name], "to_device")}
    for name in patched_modules:
        patch.setattr(sys.modules[name], "to_device", transfer)
    return patched_modules


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[Prompt]:
    """Return random prompts of repeated fragments, so that n-gram lookup finds matches."""
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        fragment = [source.randrange(vocab) for _ in range(max(3, length // 4))]
        prompts.append(
            (*(fragment * 5)[: length - 2], *(source.randrange(vocab) for _ in range(2)))
        )
    return prompts


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a folder's model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a folder's config.json; return the folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_weights_error(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object] | None = None
) -> str:
    """Return the message and reasons of an engine's error for a folder whose tensors were changed."""
    edit_weights(folder, change or (lambda tensors: None))
    with pytest.raises(CheckpointError) as error_info:
        make_engine(folder)
    assert error_info.value.exit_code == 4
    return "\n".join((error_info.value.message, *error_info.value.reason))


def truncate_on_open(patch: pytest.MonkeyPatch, shard_path: Path) -> None:
    """Truncate a checkpoint's file at the worst moment: it was opened, and checked to be the
    expected one.
    """
    open_shard = Checkpoint.open_shard

    def open_truncated(self: Checkpoint, shard: Path) -> int:
        """Open a shard; truncate it if it is the one of the test."""
        descriptor = open_shard(self, shard)
        if shard == shard_path:
            os.truncate(shard, os.stat(shard).st_size // 2)
        return descriptor

    patch.setattr(Checkpoint, "open_shard", open_truncated)
