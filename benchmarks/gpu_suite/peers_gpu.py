# mypy: disable-error-code="no-untyped-call"
"""Probes: other ways to run a model of the 8B shape on this GPU, one request at a time, beside spd.

Eager `transformers` and its assisted generation; a loop of our own compiled by torch; `transformers`
compiled with its static cache. Each probe runs its peers and spd in turn in one process, on random
weights in bfloat16; speeds are differences of a longer and a shorter generation, so that prompts and
starting up do not count. Compiling has probes of its own, since it may take longer than it is given.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.compiled_loop import CompiledLoop
from benchmarks.gpu_suite.end_to_end import config_of
from benchmarks.gpu_suite.round_times import GREEDY, random_prompt, synchronize
from benchmarks.gpu_suite.shapes import EAGLE_SIZE, QWEN3_06B, QWEN3_8B, Shape
from benchmarks.gpu_suite.speculation import REFERENCE_LENGTH
from benchmarks.summaries import paired_ratio, summarize
from spd.runtime import Engine, Request

Generate = Callable[[int], None]
"""Generates so many tokens after the prompt."""
PROMPT, FEW, MANY = 128, 8, 72
POSITIONS = 256
K = 4
FORCED_TOKEN = 7
TURNS = 4
SECONDS = 8.0


def tokens_a_second(generate: Generate) -> float:
    """Speed between the FEW-th token and the MANY-th."""
    seconds = []
    for tokens in (FEW, MANY):
        synchronize()
        began = time.perf_counter()
        generate(tokens)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return (MANY - FEW) / (seconds[1] - seconds[0])


def interleave(
    contenders: dict[str, Generate], turns: int = TURNS, seconds: float = SECONDS
) -> dict[str, Any]:
    """Every contender once a turn, at least two turns; speeds, and ratios of the spd ones to the others.

    A contender that fails is named with its error and left out from then on.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    errors: dict[str, str] = {}
    left = dict(contenders)
    for name, generate in contenders.items():  # warm: compiles, captures
        try:
            generate(MANY)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:400]}"
            del left[name]
    began = time.perf_counter()
    for turn in range(turns):
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
        for name, generate in left.items():
            speeds[name].append(tokens_a_second(generate))
    ratios = {
        f"{ours} / {peer}": paired_ratio(speeds[ours], speeds[peer]).as_dict()
        for ours in left
        for peer in left
        if ours.startswith("spd") and not peer.startswith("spd")
    }
    return {
        "tokens_a_second": {name: summarize(speeds[name]).as_dict() for name in left},
        "ratios": ratios,
        "errors": errors,
    }


def spd_contender(engine: Engine, vocab: int) -> Generate:
    """The engine as a contender; every request is alike, and nothing is shared between them."""
    prompt = random_prompt(PROMPT, vocab, 0)

    def generate(tokens: int) -> None:
        for _ in engine.stream([Request("r", prompt, replace(GREEDY, max_tokens=tokens))]):
            pass

    return generate


def spd_contenders(
    parent: Path, target: Shape, drafts: dict[str, tuple[Shape, float]], **rest: Any
) -> dict[str, Generate]:
    """spd without speculation, and with each draft at the tokens a round that are imposed."""
    wishes = {"ctx": POSITIONS, **rest}
    found = {"spd plain": spd_contender(Engine(config_of(parent, target, **wishes)), target.vocab)}
    for name, (draft, length) in drafts.items():
        engine = Engine(config_of(parent, target, draft, K, length, **wishes))
        found[f"spd {name}"] = spd_contender(engine, target.vocab)
    return found


def random_transformer(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """A `transformers` model of this shape, its weights drawn on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    keys = {
        key: value for key, value in shape.config().items() if key not in ("architectures", "torch_dtype")
    }
    config = Qwen3Config(**keys, dtype=dtype, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def transformers_contender(model: Any, **options: Any) -> Generate:
    """`generate` of a model as a contender."""
    ids = torch.tensor([random_prompt(PROMPT, model.config.vocab_size, 0)], device=model.device)

    @torch.inference_mode()
    def generate(tokens: int) -> None:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, **options
        )
        if out.shape[1] != PROMPT + tokens:
            raise RuntimeError(f"{out.shape[1] - PROMPT} tokens came instead of {tokens}")

    return generate


def assisted_contender(model: Any, assistant: Any) -> Generate:
    """Assisted generation in which every draft is accepted, since both models are made to say one token.

    Its acceptance cannot be imposed otherwise; compare it with spd at K + 1 tokens a round.
    """
    from transformers import LogitsProcessor, LogitsProcessorList

    class Force(LogitsProcessor):
        """Raises one token's score above all others."""

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, FORCED_TOKEN] += 1e4
            return scores

    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return transformers_contender(
        model, assistant_model=assistant, logits_processor=LogitsProcessorList([Force()])
    )


def run_eager(
    target: Shape = QWEN3_8B, draft: Shape = QWEN3_06B, device: str = "cuda", **rest: Any
) -> Iterator[dict[str, Any]]:
    """Eager transformers against plain spd; assisted generation against spd, every draft accepted in both."""
    with tempfile.TemporaryDirectory() as place:
        model = random_transformer(target, device, torch.bfloat16)
        contenders = {"transformers eager": transformers_contender(model)}
        ours = spd_contenders(Path(place), target, {"all accepted": (draft, K + 1.0)}, **rest)
        report: dict[str, Any] = {"eager": interleave({**contenders, "spd plain": ours["spd plain"]})}
        yield report
        assistant = random_transformer(draft, device, torch.bfloat16)
        contenders = {"transformers assisted": assisted_contender(model, assistant)}
        all_accepted = {"spd all accepted": ours["spd all accepted"]}
        report["assisted"] = interleave({**contenders, **all_accepted})
        yield report


def loop_contender(shape: Shape, device: str = "cuda", compiled: bool = True) -> Generate:
    """The compiled loop as a contender."""
    loop = CompiledLoop(shape, POSITIONS, device, torch.bfloat16, compiled)
    prompt = list(random_prompt(PROMPT, shape.vocab, 0))

    def generate(tokens: int) -> None:
        loop.generate(prompt, tokens)

    return generate


def static_contender(shape: Shape, device: str = "cuda") -> Generate:
    """`transformers` with its static cache, whose decode step `generate` compiles by itself."""
    torch.set_float32_matmul_precision("high")
    model = random_transformer(shape, device, torch.bfloat16)
    return transformers_contender(model, cache_implementation="static")


def _run_compiled(name: str, build: Callable[[], Generate]) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    contender = build()
    contender(MANY)  # the longer one first: transformers keeps the larger cache, and what was compiled for it
    report: dict[str, Any] = {"until_first_generation_ended_seconds": time.perf_counter() - began}
    with tempfile.TemporaryDirectory() as place:
        ours = spd_contenders(
            Path(place), QWEN3_8B, {f"length {REFERENCE_LENGTH}": (EAGLE_SIZE, REFERENCE_LENGTH)}
        )
        yield {**report, **interleave({name: contender, **ours})}


def run_loop() -> Iterator[dict[str, Any]]:
    """The compiled loop against spd, plain and with the EAGLE-size drafter at its acceptance length."""
    yield from _run_compiled("compiled loop", lambda: loop_contender(QWEN3_8B))


def run_static() -> Iterator[dict[str, Any]]:
    """`transformers` compiled against spd, plain and with the EAGLE-size drafter at its acceptance length."""
    yield from _run_compiled("transformers static compiled", lambda: static_contender(QWEN3_8B))


def warm_loop() -> dict[str, Any]:
    """Compile the loop's step, for torch's caches on disk."""
    loop_contender(QWEN3_8B)(FEW)
    return {}


def warm_static() -> dict[str, Any]:
    """Compile transformers' step, for torch's caches on disk."""
    static_contender(QWEN3_8B)(MANY)
    return {}
