"""Probes of what only a GPU can decide: the lines of tables in `spd.kernels`, each measured with
its alternatives.

An alternative replaces constants of modules while a case runs. Its rows must be equal to each other
in every bit; between alternatives bits may differ. The digest says which one is the fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.barrier_triton import barriers
from benchmarks.gpu_suite.digest_speed import EQUAL
from benchmarks.gpu_suite.graph_timer import GraphTimer
from benchmarks.gpu_suite.kernel_cases import (
    EPSILON,
    Bench,
    Case,
    Rows,
    attention_case,
    layer_case,
    linear_case,
)
from benchmarks.gpu_suite.kernel_table import READ_GIB, heads_of, run_case
from benchmarks.gpu_suite.recurrent_cases import SHAPES as DELTA_SHAPES
from benchmarks.gpu_suite.recurrent_cases import DeltaShape, delta_case
from benchmarks.gpu_suite.shapes import QWEN3_06B, QWEN3_8B, Shape
from benchmarks.gpu_suite.sparse_cases import eight_bit_case, few_bits, latent_case
from spd.kernels.attention import attention_chunks, paged_attention_triton
from spd.kernels.dispatch import load_kernels
from spd.kernels.latent import mla_attention_triton
from spd.kernels.launch import device_properties
from spd.kernels.linear import skinny_linear_triton
from spd.kernels.linear.skinny_config import LinearConfig, config_for
from spd.kernels.linear.skinny_linear import Norm
from spd.kernels.recurrent import delta_rule_triton
from spd.runtime.layers import skinny_linear as layers

Change = tuple[ModuleType, str, Any]
"""A module, the name of a constant there, and its value."""
BARRIERS = 1000
BYTE_KINDS = ("int4", "int8", "fp8")


@dataclass(frozen=True)
class Choice:
    """A case that is run as built and with each of the alternatives, by their names."""

    case: Case
    alternatives: Mapping[str, Sequence[Change]]


@contextmanager
def replaced(changes: Sequence[Change]) -> Iterator[None]:
    """Replace constants of modules."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def attention_choices(slots: int, context: int, rows: Sequence[int]) -> Choice:
    """Return decode attention of an 8B model, its chunks and who combines them."""
    kernels = paged_attention_triton
    one_size = [(module, "TWICE_FROM", 4096) for module in (attention_chunks, kernels)]
    return Choice(
        partial(attention_case, heads=heads_of(QWEN3_8B), slots=slots, context=context, rows=rows),
        {
            "combined by a launch": [(kernels, "LAST_COMBINES", False)],
            "chunks of 128 up to 4096": one_size,
            "chunks one by one": [(kernels, "MAX_RUN_PAGES", 1)],
            "tiles of 32 rows": [(kernels, "ROW_TILE", 32)],
        },
    )


def latent_choices(slots: int, context: int, rows: Sequence[int]) -> Choice:
    """Return latent attention of 16 heads, its tiles and programs."""
    case = partial(
        latent_case, heads=16, rank=512, rope_dim=64, slots=slots, context=context, rows=rows
    )
    kernels = mla_attention_triton
    return Choice(
        case,
        {
            "tiles of 64 rows": [(kernels, "FEW_HEADS", 0)],
            "four warps": [(kernels, "WARPS", 4)],
        },
    )


def product_choices(case: Case, varied: Mapping[str, Sequence[int]]) -> Choice:
    """Return a product with other values of its config's fields, one field at a time."""
    alternatives: dict[str, Sequence[Change]] = {}
    for field, values in varied.items():
        for value in values:
            config: Callable[..., LinearConfig] = partial(_changed_config, {field: value})
            modules = (skinny_linear_triton, layers)
            changes = [(module, "config_for", config) for module in modules]
            alternatives[f"{field} {value}"] = changes
    return Choice(case, alternatives)


def _changed_config(fields: Mapping[str, int], **arguments: Any) -> LinearConfig:
    return replace(config_for(**arguments), **fields)


WIDE_FIELDS = {"block_n": (32, 64, 128), "split_k": (1, 2, 4), "stages": (2, 3, 4, 6)}
BYTE_FIELDS = {"split_k": (1, 2, 4, 8), "stages": (2, 3, 4), "warps": (1, 2, 4)}


def product_case(bench: Bench, kind: str, n: int, k: int) -> Rows:
    """Measure a product at one row; "equal" is 1 where rows have the same bits alone and among
    16."""
    is_wide = kind in ("gate_up", "out", "down")
    measure = linear_case if is_wide else eight_bit_case
    rows = measure(bench, kind=kind, n=n, k=k, rows=(1,))
    plain = bench.normal(n, k, scale=k**-0.5)
    weight = plain if is_wide else few_bits(plain, kind)
    x = bench.normal(16, k)
    squares = torch.full((16, 1), float(k), dtype=torch.float32, device=x.device)

    def call(count: int) -> Tensor:
        norm = Norm(squares[:count], EPSILON)
        multiply = bench.kernels.norm_gate_up if kind == "gate_up" else bench.kernels.linear
        result = multiply(x[:count].contiguous(), weight, None, None, norm)
        return result if isinstance(result, Tensor) else result[0]

    together = call(16)
    equal = all(torch.equal(call(count), together[:count]) for count in (1, 5))
    return {**rows, EQUAL: [float(equal), None, None]}


def sweep_choices() -> dict[str, Choice]:
    """Return the products whose configs a sweep decides."""
    shapes = [
        ("gate_up", 19456, 2560),
        ("gate_up", 24576, 4096),
        ("gate_up", 51200, 5120),
        ("out", 4096, 4096),
        ("down", 4096, 12288),
        *((kind, *size) for kind in BYTE_KINDS for size in ((4096, 12288), (24576, 4096))),
    ]
    return {
        f"{kind} {n}x{k}": product_choices(
            partial(product_case, kind=kind, n=n, k=k),
            BYTE_FIELDS if kind in BYTE_KINDS else WIDE_FIELDS,
        )
        for kind, n, k in shapes
    }


def attention_ab_choices() -> dict[str, Choice]:
    """Return the cases of attention whose constants a comparison decides."""
    sizes = ((1, 1024), (1, 4096), (1, 32768), (16, 1024), (16, 4096), (16, 32768))
    choices = {
        f"paged_attention {slots} slots {context}": attention_choices(slots, context, (1, 5))
        for slots, context in sizes
    }
    return choices | {"mla V2-Lite 16 slots 4096": latent_choices(16, 4096, (1, 5))}


def recurrent_choices(shape: DeltaShape, slots: int, lengths: Sequence[int]) -> Choice:
    """Return rounds of a recurrent layer, the columns of its programs and of a product's parts."""
    alternatives: dict[str, Sequence[Change]] = {
        f"{name.lower()} {value}": [(delta_rule_triton, name, value)]
        for name, values in (("STATE_COLUMNS", (16, 64)), ("KEY_PART", (16, 64)))
        for value in values
    }
    case = partial(delta_case, shape=shape, slots=slots, lengths=lengths)
    return Choice(case, alternatives)


def recurrent_ab_choices() -> dict[str, Choice]:
    """Return the rounds of recurrent layers whose constants a comparison decides."""
    return {
        f"delta_rule {shape.name} {slots} slots": recurrent_choices(shape, slots, (0, 4))
        for shape in DELTA_SHAPES
        for slots in (1, 16)
    }


def without_overlap(device: torch.device) -> dict[str, int]:
    """Return the launch options of a kernel that begins when the previous one has ended."""
    return {"PDL": 0}


def overlap_choices(shape: Shape, rows: Sequence[int]) -> Choice:
    """Return a layer's products, each launched before or after the one in front of it has ended."""
    changes = [
        (module, "pdl_options", without_overlap)
        for name, module in sorted(sys.modules.items())
        if name.startswith("spd.kernels.") and hasattr(module, "pdl_options")
    ]
    return Choice(partial(layer_case, shape=shape, rows=rows), {"without overlap": changes})


def overlap_ab_choices() -> dict[str, Choice]:
    """Return the layers whose overlap a comparison measures."""
    return {
        f"layer {shape.name}": overlap_choices(shape, (1, 5)) for shape in (QWEN3_8B, QWEN3_06B)
    }


def measure_choices(choices: Mapping[str, Choice], bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the times of each case as built and with its alternatives, after each of them."""
    cases: dict[str, dict[str, Any]] = {}
    for name, choice in choices.items():
        cases[name] = {}
        for alternative, changes in {"as built": (), **choice.alternatives}.items():
            with replaced(changes):
                cases[name][alternative] = run_case(choice.case, bench)
            yield {"cases": cases}


def _bench() -> Bench:
    read_rate = float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    return Bench(load_kernels("triton"), GraphTimer(), torch.bfloat16, read_rate)


@torch.inference_mode()
def run_sweep() -> Iterator[dict[str, Any]]:
    """Measure products with other configs."""
    yield from measure_choices(sweep_choices(), _bench())


@torch.inference_mode()
def run_attention() -> Iterator[dict[str, Any]]:
    """Measure attention with other constants."""
    yield from measure_choices(attention_ab_choices(), _bench())


@torch.inference_mode()
def run_recurrent() -> Iterator[dict[str, Any]]:
    """Measure recurrent layers with other constants."""
    yield from measure_choices(recurrent_ab_choices(), _bench())


@torch.inference_mode()
def run_overlap() -> Iterator[dict[str, Any]]:
    """Measure layers whose kernels do not begin early."""
    bench = _bench()
    yield from measure_choices(overlap_ab_choices(), bench)


def barrier_case(bench: Bench, programs: int, count: int) -> Rows:
    """Measure barriers of all programs of a launch; the time is that of `count` of them."""
    arrived = torch.zeros(1, dtype=torch.int32, device=bench.timer.device)
    row = bench.row([partial(barriers, arrived, programs, count)], None)
    assert int(arrived) == programs * count
    return {str(count): row}


@torch.inference_mode()
def run_barrier() -> dict[str, Any]:
    """Measure a barrier of one program a processor."""
    processors = device_properties(torch.device("cuda")).processors
    case = partial(barrier_case, programs=processors, count=BARRIERS)
    return {"cases": {f"{processors} programs": {"as built": run_case(case, _bench())}}}
