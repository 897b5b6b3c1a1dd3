# mypy: disable-error-code="no-untyped-call"
"""Probes: other ways to run a model of the 8B shape on this GPU, one request at a time, beside spd.

Eager `transformers` and its assisted generation; a loop of our own compiled by torch;
`transformers` compiled with its static cache. Each probe runs its peers and spd in turn in one
process, on random weights in bfloat16; speeds are differences of a longer and a shorter generation,
so that prompts and starting up do not count. Compiling has probes of its own, since it may take
longer than it is given. What has a gate comes first, and every turn is kept as it ends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.compiled_loop import CompiledLoop
from benchmarks.gpu_suite.end_to_end import config_of
from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.round_times import GREEDY, random_prompt, synchronize
from benchmarks.gpu_suite.shapes import EAGLE_SIZE, QWEN3_06B, QWEN3_8B, Shape
from benchmarks.gpu_suite.speculation import REFERENCE_LENGTH
from benchmarks.summaries import paired_ratio, summarize
from spd.runtime import Engine, Request

Generate = Callable[[int], None]
"""Generates so many tokens after the prompt."""
PROMPT = 128
FIRST_TOKEN = 8
LAST_TOKEN = 72
POSITIONS = 256
K = 4
FORCED_TOKEN = 7
TURNS = 4
EAGER_TURNS = 2
SECONDS = 8.0


def tokens_a_second(generate: Generate) -> float:
    """Return the speed between token FIRST_TOKEN and token LAST_TOKEN."""
    seconds = []
    for tokens in (FIRST_TOKEN, LAST_TOKEN):
        synchronize()
        began = time.perf_counter()
        generate(tokens)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return (LAST_TOKEN - FIRST_TOKEN) / (seconds[1] - seconds[0])


def interleave(
    contenders: dict[str, Generate], turns: int = TURNS, seconds: float = SECONDS
) -> Iterator[dict[str, Any]]:
    """Run every contender once a turn, at least two turns; yield speeds and ratios of spd's to the
    others'.

    A contender that fails is named with its error and left out from then on.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    errors: dict[str, str] = {}
    left = dict(contenders)
    for name, generate in contenders.items():  # warm: compiles, captures
        try:
            generate(LAST_TOKEN)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:400]}"
            del left[name]
    began = time.perf_counter()
    for turn in range(turns):
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
        for name, generate in left.items():
            speeds[name].append(tokens_a_second(generate))
        yield _standing({name: speeds[name] for name in left}, errors)


def _standing(speeds: Mapping[str, Sequence[float]], errors: Mapping[str, str]) -> dict[str, Any]:
    """Return speeds and ratios of the turns so far."""
    ratios = {
        f"{ours} / {peer}": paired_ratio(speeds[ours], speeds[peer]).as_dict()
        for ours in speeds
        for peer in speeds
        if ours.startswith("spd") and not peer.startswith("spd")
    }
    return {
        "tokens_a_second": {name: summarize(values).as_dict() for name, values in speeds.items()},
        "ratios": ratios,
        "errors": dict(errors),
    }


def spd_contender(engine: Engine, vocab: int) -> Generate:
    """Return the engine as a contender; all requests are equal and share no prefix."""
    prompt = random_prompt(PROMPT, vocab, 0)

    def generate(tokens: int) -> None:
        for _ in engine.stream([Request("r", prompt, replace(GREEDY, max_tokens=tokens))]):
            pass

    return generate


@contextmanager
def spd_running(
    target: Shape, draft: Shape | None = None, length: float = 1.0, **options: Any
) -> Iterator[Generate]:
    """Yield spd as a contender, plain or with a draft at `length` tokens a round; close it
    afterwards."""
    with tempfile.TemporaryDirectory() as place:
        config = config_of(Path(place), target, draft, K, length, **{"ctx": POSITIONS, **options})
        engine = Engine(config)
        try:
            yield spd_contender(engine, target.vocab)
        finally:
            engine.close()
            del engine
            free_memory()


def random_transformer(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Return a `transformers` model of this shape with random weights, drawn on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    keys = {
        key: value
        for key, value in shape.config().items()
        if key not in ("architectures", "torch_dtype")
    }
    config = Qwen3Config(**keys, dtype=dtype, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def transformers_contender(model: Any, **options: Any) -> Generate:
    """Return a model's `generate` as a contender."""
    ids = torch.tensor([random_prompt(PROMPT, model.config.vocab_size, 0)], device=model.device)

    @torch.inference_mode()
    def generate(tokens: int) -> None:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            **options,
        )
        if out.shape[1] != PROMPT + tokens:
            raise RuntimeError(f"{out.shape[1] - PROMPT} tokens came instead of {tokens}")

    return generate


def assisted_contender(model: Any, assistant: Any) -> Generate:
    """Return assisted generation in which every draft is accepted: both models always give one
    token.

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
    target: Shape = QWEN3_8B, draft: Shape = QWEN3_06B, device: str = "cuda", **options: Any
) -> Iterator[dict[str, Any]]:
    """Compare eager transformers with plain spd, and assisted generation with spd, accepting every
    draft."""
    report: dict[str, Any] = {}
    options = {"device": device, **options}
    model = random_transformer(target, device, torch.bfloat16)
    with spd_running(target, **options) as plain:
        contenders = {"transformers eager": transformers_contender(model), "spd plain": plain}
        for report["eager"] in interleave(contenders, EAGER_TURNS):
            yield report
    assistant = random_transformer(draft, device, torch.bfloat16)
    with spd_running(target, draft, K + 1.0, **options) as accepting:
        contenders = {"transformers assisted": assisted_contender(model, assistant)}
        for report["assisted"] in interleave(
            {**contenders, "spd all accepted": accepting}, EAGER_TURNS
        ):
            yield report


def loop_contender(
    shape: Shape, device: str = "cuda", compiled: bool = True, tuned: bool = False
) -> Generate:
    """Return the compiled loop as a contender."""
    loop = CompiledLoop(
        shape=shape,
        positions=POSITIONS,
        device=device,
        dtype=torch.bfloat16,
        compiled=compiled,
        tuned=tuned,
    )
    prompt = list(random_prompt(PROMPT, shape.vocab, 0))

    def generate(tokens: int) -> None:
        loop.generate(prompt, tokens)

    return generate


def static_contender(shape: Shape, device: str = "cuda") -> Generate:
    """Return `transformers` with its static cache, whose decode step `generate` compiles."""
    torch.set_float32_matmul_precision("high")
    model = random_transformer(shape, device, torch.bfloat16)
    return transformers_contender(model, cache_implementation="static")


def run_compiled(
    builders: Mapping[str, Callable[[], Generate]],
    target: Shape = QWEN3_8B,
    draft: Shape = EAGLE_SIZE,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Compare each compiled peer in turn with plain spd, and the last one with drafts, too.

    A peer that cannot be built or run is named with its error.
    """
    report: dict[str, Any] = {}

    def contest(
        name: str, contenders: dict[str, Generate], **extra: Any
    ) -> Iterator[dict[str, Any]]:
        for result in interleave(contenders, TURNS):
            report[name] = {**result, **extra}
            yield report

    peer = None
    with spd_running(target, **options) as plain:
        for name, build in builders.items():
            peer = None
            free_memory()
            began = time.perf_counter()
            try:
                peer = build()
                peer(
                    LAST_TOKEN
                )  # transformers keeps the larger cache, and what was compiled for it
            except Exception as error:
                report[name] = {"errors": {name: f"{type(error).__name__}: {str(error)[:400]}"}}
                yield report
                continue
            seconds = time.perf_counter() - began
            yield from contest(
                name, {name: peer, "spd plain": plain}, until_first_generation_ended_seconds=seconds
            )
    if peer is not None:
        with spd_running(target, draft, REFERENCE_LENGTH, **options) as drafting:
            ours = {f"spd length {REFERENCE_LENGTH}": drafting}
            yield from contest(f"{name}, drafts", {name: peer, **ours})


LOOP = "compiled loop"
TUNED_LOOP = "tuned compiled loop"
STATIC = "transformers static compiled"


def run_loop() -> Iterator[dict[str, Any]]:
    """Compare the loop as torch compiles it, then with the long tuning, with spd."""
    loops = {LOOP: False, TUNED_LOOP: True}
    yield from run_compiled(
        {name: partial(loop_contender, QWEN3_8B, tuned=tuned) for name, tuned in loops.items()}
    )


def run_static() -> Iterator[dict[str, Any]]:
    """Compare compiled `transformers` with spd."""
    yield from run_compiled({STATIC: partial(static_contender, QWEN3_8B)})


def warm_loop() -> dict[str, Any]:
    """Compile the loop's step, for torch's caches on disk; the quick way first."""
    for tuned in (False, True):
        loop_contender(QWEN3_8B, tuned=tuned)(FIRST_TOKEN)
        free_memory()
    return {}


def warm_static() -> dict[str, Any]:
    """Compile transformers' step, for torch's caches on disk."""
    static_contender(QWEN3_8B)(LAST_TOKEN)
    return {}
