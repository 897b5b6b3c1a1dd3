"""Probe: every kernel of a round by itself, against the memory's read rate and torch's counterpart.

Times are of launches inside one CUDA graph, over operands in rotation that exceed the cache. A case
that fails says so in its own line. `warm_parts` says how the compiling can be shared between
processes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.graph_timer import GraphTimer, Once
from benchmarks.gpu_suite.kernel_cases import (
    Bench,
    Case,
    Rows,
    attention_case,
    draw_case,
    layer_case,
    linear_case,
    prefill_case,
    rotary_attention_case,
    rotary_case,
    row_case,
)
from benchmarks.gpu_suite.recurrent_cases import recurrent_cases
from benchmarks.gpu_suite.round_cases import (
    draft_verify_case,
    lookup_case,
    noise_case,
    round_case,
    sampling_case,
)
from benchmarks.gpu_suite.shapes import EAGLE_SIZE, QWEN3_06B, QWEN3_8B, SHAPES, Shape
from benchmarks.gpu_suite.sparse_cases import sparse_cases
from spd.formats.hub import spd_cache_folder
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.runtime.lab.tile_checks import find_widest_tiles
from spd.runtime.load.token_tiles import find_tile_limits

ROWS = (1, 2, 4, 8, 16)
READ_GIB = 2.0
WIDE_ROW = 4096


def heads_of(shape: Shape) -> AttentionHeads:
    """Return the heads of the shape's attention."""
    return AttentionHeads(shape.heads, shape.kv_heads, shape.head_dim)


def attention_cases(heads: AttentionHeads) -> dict[str, Case]:
    """Return decode attention by slots and context: of 16 bits, from the projection on, of
    codes."""
    cases: dict[str, Case] = {}
    for slots in (1, 16):
        for context in (1024, 4096, 32768):
            name = f"paged_attention {slots} slots {context}"
            cases[name] = partial(
                attention_case, heads=heads, slots=slots, context=context, rows=(1, 5)
            )
            cases[f"rotary_attention {slots} slots {context}"] = partial(
                rotary_attention_case, heads=heads, slots=slots, context=context, rows=(1, 5)
            )
            cases[f"paged_attention in int8 {slots} slots {context}"] = partial(
                attention_case,
                heads=replace(heads, rounded=True),
                slots=slots,
                context=context,
                rows=(1, 5),
            )
    return cases


def cases() -> dict[str, Case]:
    """Return every case by its name, the most important first; equal matrices of two models
    once."""
    all_cases: dict[str, Case] = {}
    seen: set[tuple[str, int, int]] = set()
    for shape in (QWEN3_8B, *(other for other in SHAPES if other != QWEN3_8B), EAGLE_SIZE):
        for kind, (n, k) in shape.weights().items():
            if (kind, n, k) not in seen:
                seen.add((kind, n, k))
                all_cases[f"{shape.name} {kind} {n}x{k}"] = partial(
                    linear_case, kind=kind, n=n, k=k, rows=ROWS
                )
    for shape in (QWEN3_8B, QWEN3_06B):
        all_cases[f"{shape.name} layer's products"] = partial(layer_case, shape=shape, rows=(1, 5))
    n, k = QWEN3_8B.weights()["gate_up"]
    all_cases[f"{QWEN3_8B.name} fp16 gate_up {n}x{k}"] = partial(
        linear_case, kind="gate_up", n=n, k=k, rows=ROWS, dtype=torch.float16
    )
    heads = heads_of(QWEN3_8B)
    all_cases |= attention_cases(heads)
    all_cases["prefill_attention 256 after"] = partial(
        prefill_case, heads=heads, chunk=256, starts=(0, 4096, 32512)
    )
    for shape in (QWEN3_8B, QWEN3_06B):
        name = f"head_sample {shape.vocab}x{shape.hidden}"
        all_cases[name] = partial(
            draw_case, vocab=shape.vocab, hidden=shape.hidden, rows=(1, 5, 16)
        )
    vocab = QWEN3_8B.vocab
    all_cases["sample_rows and row_laws"] = partial(sampling_case, vocab=vocab, rows=(1, 5, 16))
    all_cases["rotary_store"] = partial(rotary_case, heads=heads, rows=(1, 5, 16, 80))
    all_cases["embed and norm"] = partial(
        row_case, hidden=QWEN3_8B.hidden, vocab=vocab, rows=(1, 5, 16)
    )
    for slots in (1, 16):
        name = f"round {slots} slots"
        all_cases[name] = partial(round_case, slots=slots, k=4, width=WIDE_ROW, vocab=vocab)
        all_cases[f"verify drafts {slots} slots"] = partial(
            draft_verify_case, slots=slots, k=4, vocab=vocab
        )
    all_cases["noise"] = partial(noise_case, vocab=vocab, rows=(1, 16))
    all_cases |= sparse_cases()
    all_cases["ngram_lookup"] = partial(
        lookup_case, slots=1, k=8, widths=(1024, WIDE_ROW, 32768), vocab=vocab
    )
    return all_cases


def run_case(case: Case, bench: Bench) -> dict[str, Any]:
    """Run a case; return its rows and the times of 8 rows over 1 if it has both, or its error."""
    try:
        rows: Rows = case(bench)
    except Exception as error:  # one kernel's fault must not take the others' figures with it
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    notes = {"notes": sorted(set(bench.notes))} if bench.notes else {}
    bench.notes.clear()
    return {"rows": rows, **eight_over_one(rows), **notes}


def eight_over_one(rows: Rows) -> dict[str, list[float]]:
    """Return times of 8 rows over those of 1, of spd and of torch, where both were measured."""
    if "1" not in rows or "8" not in rows:
        return {}
    pairs = [(rows["8"][column], rows["1"][column]) for column in (0, 2)]
    return {"8_over_1": [eight / single for eight, single in pairs if eight and single]}


def _kernels() -> Kernels:
    """Return the kernels as an engine on this machine has them."""
    return load_kernels("triton", None, find_tile_limits("cuda", spd_cache_folder)[0])


def run_token_tiles() -> dict[str, Any]:
    """Measure the token tiles that `spd doctor` measures, without storing them."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answers = find_widest_tiles(lambda: Path(folder))
    return {"seconds": time.perf_counter() - began, **answers[0]}


def run() -> Iterator[dict[str, Any]]:
    """Time every case of dense and sparse models."""
    yield from _measured(cases())


def run_recurrent() -> Iterator[dict[str, Any]]:
    """Time every case of recurrent layers."""
    yield from _measured(recurrent_cases())


@torch.inference_mode()
def _measured(cases: Mapping[str, Case]) -> Iterator[dict[str, Any]]:
    """Yield the report after each case, so that a kill loses only one."""
    read_rate = float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    bench = Bench(_kernels(), GraphTimer(), torch.bfloat16, read_rate)
    measured: dict[str, Any] = {}
    report = {
        "read_bytes_per_second": read_rate,
        "columns": "us, share of the read rate (prefill: TFLOP/s; delta_chunks: tokens/s), us of torch "
        "(head_sample: bare head; delta_chunks: a step a token)",
        "cases": measured,
    }
    for name, case in cases.items():
        began = time.perf_counter()
        measured[name] = run_case(case, bench)
        measured[name]["seconds"] = round(time.perf_counter() - began, 2)
        yield report


@torch.inference_mode()
def warm_part(part: str, parts: str) -> dict[str, Any]:
    """Compile what every parts-th case launches, by running each call once; the errors by case."""
    bench = Bench(_kernels(), Once("cuda"), torch.bfloat16, 1.0)
    all_cases = list((cases() | recurrent_cases()).items())
    results = {name: run_case(case, bench) for name, case in all_cases[int(part) :: int(parts)]}
    return {name: result["error"] for name, result in results.items() if "error" in result}
