"""Probes: whole rounds of models of published shapes, against what their bytes allow.

`run_plain` decodes without speculation: shares of the byte floor, contexts, sampling, host reads.
`run_draft` speculates with a draft model at every k, at imposed acceptance. Weights are random.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.latency import first_tokens, token_gaps
from benchmarks.gpu_suite.round_times import (
    GREEDY,
    Load,
    Recorder,
    count_syncs,
    measure_load,
    start,
    stop,
    with_engine,
)
from benchmarks.gpu_suite.shapes import (
    EAGLE3_8B,
    EAGLE_SIZE,
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_17B,
    QWEN3_32B,
    Eagle3Shape,
    Shape,
    round_bytes,
    round_parts,
    write_folder,
)
from benchmarks.gpu_suite.speculation import REFERENCE_K, gain, reference_length
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.engine.draft_length import DraftLength

PLAIN_SHAPES = (QWEN3_8B, QWEN3_06B, QWEN3_17B, QWEN3_4B, LLAMA_8B, QWEN3_32B)
PAIRS = (
    (QWEN3_8B, EAGLE_SIZE),
    (QWEN3_8B, QWEN3_06B),
    (QWEN3_4B, QWEN3_06B),
    (QWEN3_32B, QWEN3_17B),
)
LENGTHS_OF_K = (4, 7, 1, 2, 3, 5, 6)
"""Every k, those with a goal of their own first."""
CONTEXTS = (1024, 8192, 32256)
LOAD = Load()
READ_GIB = 2.0
FILTERED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, ignore_eos=True, seed=7
)
SAMPLED_PARAMS = SamplingParams(temperature=0.8, ignore_eos=True, seed=7)


def config_of(
    parent: Path,
    target: Shape,
    draft: Shape | None = None,
    k: int = 0,
    length: float | None = None,
    **overrides: Any,
) -> EngineConfig:
    """Return the config of an engine on random weights at fixed k, with `length` tokens a round
    imposed."""
    options: dict[str, Any] = {"spec": "off", "prefix_sharing": False, "load": "dummy"}
    if draft is not None:
        method = "eagle3" if isinstance(draft, Eagle3Shape) else "draft"
        options |= {"spec": method, "draft_model": write_folder(draft, parent), "draft_max": k}
        options["adaptive"] = False
        if length is not None and "synthetic_acceptance" in {
            field.name for field in fields(EngineConfig)
        }:
            options["synthetic_acceptance"] = length
    return EngineConfig(model=write_folder(target, parent), **{**options, **overrides})


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the work's answer and its seconds, or its error: one failure must not end the other
    cases."""
    began = time.perf_counter()
    try:
        result = work()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    free_memory()
    return {**result, "seconds": round(time.perf_counter() - began, 2)}


def floor_share(
    result: dict[str, Any], target: Shape, slots: int, read_rate: float
) -> dict[str, Any]:
    """Return plain decoding's measured rounds with their byte floor and its share of the wall
    time."""
    parts = round_parts(target, None, [result["context"]] * slots, 0)
    floor_us = 1e6 * sum(parts.values()) / read_rate
    return {
        **result,
        "bytes": parts,
        "floor_us": floor_us,
        "share_of_floor": floor_us / result["wall_us"],
    }


def plain_rounds(engine: Engine, target: Shape, load: Load, read_rate: float) -> dict[str, Any]:
    """Measure one load on a new engine."""
    result = measure_load(engine, Recorder.of(engine), load, target.vocab)
    return floor_share(result, target, load.slots, read_rate)


def sweep_contexts(
    engine: Engine, target: Shape, load: Load, contexts: Sequence[int], read_rate: float
) -> dict[str, Any]:
    """Measure several contexts in one engine, whose static tensors are as wide as the longest
    needs."""
    recorder = Recorder.of(engine)
    results = {}
    for context in contexts:
        measured = measure_load(engine, recorder, replace(load, prompt=context), target.vocab)
        results[str(context)] = floor_share(measured, target, 1, read_rate)
    return results


def host_reads(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return `count_syncs` of the steady rounds of one short request."""
    start(engine, [tuple(range(64))], GREEDY, 8)
    counts = count_syncs(engine, rounds)
    stop(engine, 1)
    return counts


def sample_kinds(engine: Engine, target: Shape, load: Load) -> dict[str, Any]:
    """Measure rounds that sample and rounds that choose greedily, and their host reads."""
    recorder = Recorder.of(engine)
    results: dict[str, Any] = {}
    for name, params in (("greedy", GREEDY), ("noise", SAMPLED_PARAMS), ("filtered", FILTERED)):
        results[name] = measure_load(engine, recorder, replace(load, params=params), target.vocab)
    results["host_reads"] = host_reads(engine, load.rounds)
    return results


def run_plain(
    shapes: Sequence[Shape] = PLAIN_SHAPES,
    load: Load = LOAD,
    contexts: Sequence[int] = CONTEXTS,
    read_rate: float | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Measure every shape's share of the byte floor at batch 1; of the first also latency and
    contexts."""
    rate = read_rate or float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    models: dict[str, Any] = {}
    report: dict[str, Any] = {"read_bytes_per_second": rate, "models": models}
    with tempfile.TemporaryDirectory() as place:

        def on_engine(
            shape: Shape, ctx: int, work: Callable[[Engine], dict[str, Any]]
        ) -> dict[str, Any]:
            config = config_of(Path(place), shape, ctx=ctx, **options)
            return attempt(partial(with_engine, config, work))

        def first_of_all(engine: Engine, shape: Shape) -> dict[str, Any]:
            report["first_token"] = first_tokens(engine, load.prompt, shape.vocab)
            return plain_rounds(engine, shape, load, rate)

        for shape in shapes:
            work = partial(plain_rounds, target=shape, load=load, read_rate=rate)
            if shape is shapes[0]:
                work = partial(first_of_all, shape=shape)
            models[shape.name] = on_engine(shape, load.context(0), work)
            yield report
            if shape is shapes[0]:
                short_load = replace(load, rounds=load.rounds // 2)
                kinds = partial(sample_kinds, target=shape, load=short_load)
                report["sampling"] = on_engine(shape, load.context(0), kinds)
                yield report
                sweep = partial(
                    sweep_contexts, target=shape, load=short_load, contexts=contexts, read_rate=rate
                )
                widest = replace(load, prompt=max(contexts)).context(0)
                report["contexts"] = on_engine(shape, widest, sweep)
                yield report


def judge(
    result: dict[str, Any],
    plain: dict[str, Any],
    target: Shape,
    draft: Shape,
    k: int,
    read_rate: float,
) -> dict[str, Any]:
    """Return the measured rounds with their gain at the imposed acceptance length."""
    length = reference_length(k)
    plain_floor = round_bytes(target, None, [plain["context"]], 0) / read_rate
    parts = round_parts(target, draft, [result["context"]], k)
    floor = sum(parts.values()) / read_rate
    judged = gain(
        length=length,
        plain_seconds=1e-6 * plain["wall_us"],
        round_seconds=1e-6 * result["wall_us"],
        plain_floor=plain_floor,
        round_floor=floor,
    )
    verified = result["verify_us"][0] / plain["verify_us"][0]
    floors = {"bytes": parts, "floor_us": 1e6 * floor}
    return {**result, **floors, "length": length, **asdict(judged), "verify_over_plain": verified}


def fix_draft_length(engine: Engine, k: int) -> None:
    """Set an engine's draft length to k: loading the weights again for every k would take minutes.

    Imposed acceptance stays right, for its rate is one and the same at every k.
    """
    engine.draft_length = DraftLength(k, False)


def gaps_at_reference(engine: Engine, target: Shape, load: Load) -> dict[str, Any]:
    """Return `token_gaps` of a request that runs about as many rounds as a load."""
    fix_draft_length(engine, REFERENCE_K)
    return token_gaps(
        engine, load.prompt, round(load.rounds * reference_length(REFERENCE_K)), target.vocab
    )


def sweep_drafts(
    config: EngineConfig,
    target: Shape,
    draft: Shape,
    plain: dict[str, Any],
    read_rate: float,
    load: Load,
) -> Iterator[dict[str, Any]]:
    """Measure one pair at every k, on one engine for the largest.

    Yield the results after each k.
    """
    free_memory()
    engine = Engine(config)
    recorder = Recorder.of(engine)
    imposed = engine.plan.config.synthetic_acceptance
    by_k: dict[str, Any] = {}
    results = {"plain": plain, "acceptance": "natural" if imposed is None else "imposed", "k": by_k}

    def rounds_at(k: int) -> dict[str, Any]:
        fix_draft_length(engine, k)
        return judge(
            measure_load(engine, recorder, load, target.vocab), plain, target, draft, k, read_rate
        )

    try:
        for k in LENGTHS_OF_K:
            by_k[str(k)] = attempt(partial(rounds_at, k))
            if k == REFERENCE_K:
                results["host_reads"] = host_reads(engine, load.rounds // 2)
                results["gaps"] = {
                    "async": attempt(partial(gaps_at_reference, engine, target, load))
                }
            yield results
    finally:
        engine.close()


def run_draft(
    pairs: Sequence[tuple[Shape, Shape]] = PAIRS,
    load: Load = LOAD,
    read_rate: float | None = None,
    **overrides: Any,
) -> Iterator[dict[str, Any]]:
    """Measure every pair of target and draft: plain rounds, then every k at imposed acceptance.

    The first pair also reads every round at once, beside reading it while the next one runs.
    """
    rate = read_rate or float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    results: dict[str, Any] = {}
    report: dict[str, Any] = {"read_bytes_per_second": rate, "pairs": results}
    plains: dict[str, dict[str, Any]] = {}
    max_k = max(LENGTHS_OF_K)
    with tempfile.TemporaryDirectory() as place:
        parent = Path(place)
        for target, draft in pairs:
            name = f"{draft.name} > {target.name}"
            if target.name not in plains:
                work = partial(plain_rounds, target=target, load=load, read_rate=rate)
                config = config_of(parent, target, ctx=load.context(0), **overrides)
                plains[target.name] = attempt(partial(with_engine, config, work))
            plain = plains[target.name]
            options = {"ctx": load.context(max_k), **overrides}
            config = config_of(parent, target, draft, max_k, reference_length(max_k), **options)
            try:
                for pair in sweep_drafts(
                    config=config,
                    target=target,
                    draft=draft,
                    plain=plain,
                    read_rate=rate,
                    load=load,
                ):
                    results[name] = pair
                    yield report
                if (target, draft) == pairs[0]:
                    work = partial(gaps_at_reference, target=target, load=load)
                    free_memory()
                    sync = replace(config, lag=0)
                    results[name]["gaps"]["sync"] = attempt(partial(with_engine, sync, work))
                    yield report
            except Exception as error:
                results[name] = {
                    **results.get(name, {}),
                    "error": f"{type(error).__name__}: {str(error)[:400]}",
                }
                yield report


def run_eagle3(**options: Any) -> Iterator[dict[str, Any]]:
    """Measure an 8B model with an EAGLE-3 head of its width, which reads the streams between
    layers."""
    yield from run_draft(((QWEN3_8B, EAGLE3_8B),), **options)
