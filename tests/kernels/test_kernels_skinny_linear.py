"""Skinny products by weights of any kind, and the row kernels: right, and a row's bits in any
company."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.dispatch import load_kernels
from spd.kernels.launch import Device, device_properties
from spd.kernels.linear import rows as rows_reference
from spd.kernels.linear import rows_triton as rows_twin
from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear import skinny_linear_triton as twin
from spd.kernels.linear.activation import SILU
from spd.kernels.linear.few_bits import quantize_int8
from spd.kernels.linear.skinny_config import (
    LinearConfig,
    config_for,
    gate_up_config,
    with_tile,
    workspace_sizes,
)
from spd.kernels.linear.skinny_linear import AnyWeight, Draw, LinearWorkspace, Norm, step_of
from spd.kernels.linear.tiled_weight import tile_weight
from spd.kernels.linear.weight_operands_triton import row_pointers
from spd.kernels.sampling import sampling_triton
from spd.kernels.sampling.sampling import SamplingTensors
from spd.runtime.lab.tile_checks import widest_exact_tiles
from spd.runtime.load.token_tiles import TESTED_LIMITS, WEIGHT_DTYPES
from spd.runtime.models import gguf_forms
from tests.kernels.compile_ahead import DEVICES
from tests.kernels.forms import ACTS, COMPILED, Form, apply_activation, assert_rounded, near, normal
from tests.kernels.skinny_cases import SMALL, Operands, exact, sample_operands, squares_of

EPSILON = 1e-5
SPLIT = replace(SMALL, split_k=3)
FORMS = pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
SHAPES = [
    (1, 16, 1),
    (40, 72, 5),
    (33, 130, 17),
    (96, 96, 16),
    (71, 64, 3),
    (1, 1, 1),
    (2, 3, 2),
    (35, 67, 1),
]
"""(N, K, T): one row and column, odd sizes and others that no block divides, and sizes that all
do."""
EIGHT_BIT_SHAPES = [(16, 16, 1), (160, 140, 5), (1, 1, 1), (34, 131, 1)]
"""Less than a block of scales, partial last blocks both ways, one row and column, odd sizes."""
CODED = [
    ("int4 64", 70, 256, 17),
    ("int4 128", 34, 320, 17),
    ("int4 136", 40, 136, 5),
    ("int8 64", 32, 128, 17),
    ("e2m1 16", 48, 80, 3),
    ("e2m1 32", 33, 160, 17),
    ("e4m3 128", 40, 200, 17),
]
"""Every kind and group, with halves of a step beyond K, parts of K, and a last group that is
partial."""
BLOCKS = [
    ("Q8_0", 33, 160, 17),
    ("Q4_0", 40, 288, 1),
    ("Q4_1", 70, 96, 5),
    ("Q5_0", 16, 416, 17),
    ("Q5_1", 34, 160, 3),
    ("Q4_K", 35, 512, 1),
    ("Q5_K", 40, 256, 16),
    ("Q6_K", 33, 768, 2),
    ("IQ4_NL", 48, 224, 5),
    ("IQ4_XS", 34, 256, 5),
    ("MXFP4", 70, 352, 3),
]
"""Every type of GGUF's blocks that stays packed, with steps that K does not fill."""
EVERY_CASE: list[Any] = [
    (("plain", *shape), config) for shape in SHAPES for config in (SMALL, SPLIT, None)
]
EVERY_CASE += [(("int8", *shape), config) for shape in EIGHT_BIT_SHAPES for config in (SPLIT, None)]
GATED = [act for act in ACTS if act.gated]
FEW_CASES = [*EVERY_CASE[:24:7], *EVERY_CASE[24::5]]
"""Of plain weights every second shape and every config; of each kind of eight bits two shapes."""
CASES = [pytest.param(*case, slice(None), marks=pytest.mark.slow) for case in EVERY_CASE]
CASES += [pytest.param(*case, slice(i % 2, i % 2 + 1)) for i, case in enumerate(FEW_CASES)]
IN_LANE = ("Q8_0", "Q4_K", "Q6_K", "int4 128", "e2m1 32", "e4m3 128")
"""Codes of the default lane: of each kind of codes and of scales one."""
SLOW_TYPES = {*gguf_forms.FORMS, *(case[0] for case in CODED)} - {*IN_LANE}
CASES += [
    pytest.param(
        case,
        (SPLIT, None)[i % 2],
        slice(None),
        marks=pytest.mark.slow if case[0] in SLOW_TYPES else (),
    )
    for i, case in enumerate([*CODED, *BLOCKS])
]


def choice(config: LinearConfig) -> Callable[..., LinearConfig]:
    """Return a function that gives every weight the same config."""
    return lambda weight, *_, pair=False, **__: (
        gate_up_config(config, weight.shape[0]) if pair else config
    )


@pytest.mark.parametrize(("shape", "config", "types"), CASES, ids=str)
def test_products_equal_their_definition(
    shape: Any,
    config: LinearConfig | None,
    types: slice,
    device: str,
    dtypes: tuple[torch.dtype, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against float64; torch's form itself is right in float32."""
    kind, n, k, rows = shape
    for dtype in dtypes[types]:
        parts = 300 if n == 33 else 3  # more than a program holds at once
        o = Operands(n, k, rows, dtype, device, parts, kind)
        if config is not None:
            product_config = replace(config, block_k=step_of(o.weight) or config.block_k)
            monkeypatch.setattr(twin, "_config", choice(product_config))
        x = o.x.double()
        residual = o.residual.double()
        weight, fed, pair = map(exact, o.weights)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        biases = [(None, None), (o.bias, o.pair_bias)]
        if device == "cpu":  # the interpreter is slow
            del biases[dtype == torch.float32]
        for bias, pair_bias in biases:
            shift, pair_shift = (0.0 if b is None else b.double() for b in (bias, pair_bias))
            opened = normed @ pair.T + pair_shift
            norm = Norm(o.squares, EPSILON)
            after = {"act": GATED[(n + k + rows) % len(GATED)]}
            onto = {"residual": o.residual}
            table: list[tuple[str, tuple[Any, ...], dict[str, Any], Tensor]] = [
                ("linear", (o.x, o.fed, bias), {"norm": norm}, normed @ fed.T + shift),
                (
                    "norm_gate_up",
                    (o.x, o.pair, pair_bias, None, norm),
                    {},
                    apply_activation(opened, SILU),
                ),
                (
                    "norm_gate_up",
                    (o.x, o.pair, pair_bias, None, norm),
                    after,
                    apply_activation(opened, after["act"]),
                ),
                ("linear", (o.x, o.weight, bias), onto, residual + x @ weight.T + shift),
                ("head_logits", (o.x, o.weight), {}, x @ weight.T),
            ]
            if kind == "plain":
                table.append(("linear", (o.x, o.weight, bias), {}, x @ weight.T + shift))
            size = 1 + (x.abs() @ weight.abs().T).max().item() / k**0.5
            for name, arguments, options, right in table:
                result = getattr(twin, name)(*arguments, **options)
                if name == "head_logits" and kind != "plain":
                    arguments = (o.x.float(), o.weight)
                plain = getattr(reference, name)(*arguments, **options)
                if name == "linear":
                    result, squares = result
                    plain, _ = plain
                if options is onto:
                    assert squares.dtype == torch.float32 and squares.shape[0] == rows
                    sums = result.float().square().sum(1)
                    torch.testing.assert_close(squares.sum(1), sums, rtol=1e-5, atol=1e-6)
                is_plain = kind == "plain" or name == "norm_gate_up"
                slack = (
                    2 if kind == "plain" and device == "cpu" else 4
                )  # a GPU approximates exp, too
                near(
                    result=result,
                    expected=right,
                    plain=plain.to(result.dtype),
                    slack=slack,
                    size=None if is_plain else size,
                )
                if dtype == torch.float32:
                    torch.testing.assert_close(plain.double(), right, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize(
    ("h", "parts", "rows"), [(16, 1, 5), (5000, 200, 3), (1, 1, 1), (33, 2, 1), (300, 3, 5)]
)
def test_row_operations_equal_their_definition(
    h: int, parts: int, rows: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Embeddings, and norms before and behind a block."""
    for dtype in (*dtypes, torch.bfloat16):
        o = Operands(h if h < 1000 else 11, h, rows, dtype, device, parts)
        ids = torch.tensor([10, 0, 10, 3, 3][:rows], device=device) % len(o.weight)
        x, squares = rows_twin.embed(ids, o.weight)
        assert torch.equal(x, o.weight[ids])
        torch.testing.assert_close(squares.sum(1), x.float().square().sum(1), rtol=1e-5, atol=0)
        scaled, squares = rows_twin.embed(ids, o.weight, 5.656854)
        if dtype in dtypes:  # the interpreter cuts bfloat16 off where a GPU rounds it
            assert torch.equal(scaled, o.weight[ids] * 5.656854)
        torch.testing.assert_close(
            squares.sum(1), scaled.float().square().sum(1), rtol=1e-5, atol=0
        )
        normed = o.x.double() * torch.rsqrt(o.x.double().square().mean(-1, keepdim=True) + EPSILON)
        right = normed * o.scale.double()
        result = rows_twin.rms_norm_rows(o.x, o.squares, o.scale, EPSILON)
        plain = rows_reference.rms_norm_rows(o.x, o.squares, o.scale, EPSILON)
        near(result, right, plain, slack=2)
        if dtype == torch.float32:
            torch.testing.assert_close(plain.double(), right, rtol=1e-5, atol=1e-5)
        if dtype in dtypes and h < 1000:
            right = o.residual.double() + normed * o.scale.float().double()
            for form in (rows_reference, rows_twin):
                y, squares = form.norm_residual(o.x, o.scale.float(), EPSILON, o.residual)
                near(y, right, right.to(dtype), size=2.5e-6 / torch.finfo(dtype).eps)
                torch.testing.assert_close(
                    squares.sum(1), y.float().square().sum(1), rtol=1e-5, atol=0
                )


@pytest.mark.parametrize("form", COMPILED, indirect=True)
@pytest.mark.parametrize("size", [8, 1000])
def test_norms_of_the_c_kernels_equal_their_definition(form: Form, size: int) -> None:
    """Rows of any size, one or many, alone and onto a stream."""
    x, scales, residual = (normal(rows, size, seed=rows).to(form.dtypes[0]) for rows in (9, 1, 10))
    weight = scales[0].float()
    wide = x.double()
    exact_norm = wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
    got = form.ops.norm(x, weight, EPSILON)
    assert_rounded(got, exact_norm)
    assert_rounded(
        form.ops.norm(x, weight, EPSILON, residual[:9]), exact_norm + residual[:9].double()
    )
    assert torch.equal(form.ops.norm(x[3:4], weight, EPSILON), got[3:4])
    assert torch.equal(form.ops.rms_norm_rows(x, None, scales[0], EPSILON), got)


@pytest.mark.parametrize(
    ("heads", "a", "b", "rows"),
    [(5, 72, 100, 19), (5, 1, 1, 1), (5, 67, 33, 2), (3, 24, 40, 9), (16, 128, 512, 9)],
)
def test_each_head_has_its_own_product(form: Form, heads: int, a: int, b: int, rows: int) -> None:
    if form.name == "triton" and a * b > 8000:
        pytest.skip("the interpreter is slow")
    for dtype in form.types(heads):
        x = normal(rows, heads, a + 3, seed=1).to(form.device, dtype)[..., 3:]
        weight = normal(heads, a, b, seed=2).to(form.device, dtype)
        matrices = form.ops.pack(weight.mT) if form.native else weight
        result = form.ops.head_linear(x, matrices)
        right = torch.einsum("tha,hab->thb", x.double(), weight.double())
        if form.native:
            assert_rounded(result, right)
        else:
            plain = torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
            near(result, right, plain)
            assert dtype != torch.float32 or (result - right).abs().max() < 1e-3
        for row in {0, rows // 2, rows - 1} if form.name != "torch" else ():
            assert torch.equal(form.ops.head_linear(x[row : row + 1], matrices)[0], result[row])


def operations(o: Operands, rows: int) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]:
    """Return every operation as a function of x [T, K] and the residual [T, N], with results by
    row."""
    device = o.x.device
    workspace = LinearWorkspace(
        torch.full((1 << 18,), float("nan"), device=device),
        torch.zeros(64, dtype=torch.int32, device=device),
    )
    seed = torch.full((rows,), 2**40 + 3, device=device)
    first = torch.full((rows,), 7, device=device)
    heat = torch.full((rows,), 0.8, device=device)

    def sample(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        t = len(x)
        return twin.head_sample(
            x,
            o.weight,
            Draw(
                seed=seed[:t],
                first=first[:t],
                step=2,
                temperature=heat[:t],
                usable_vocab=o.weight.shape[0] - 1,
            ),
        )

    def normed(
        form: Callable[..., Any], weight: AnyWeight, bias: Tensor | None
    ) -> Callable[..., Any]:
        return lambda x, _: form(x, weight, bias, workspace, Norm(squares_of(x, 3), EPSILON))

    bias = o.bias
    pair_bias = o.pair_bias
    functions: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
        "normed linear": lambda x, _: normed(twin.linear, o.fed, bias)(x, _)[:1],
        "norm_gate_up": lambda x, _: (normed(twin.norm_gate_up, o.pair, pair_bias)(x, _),),
        "linear": lambda x, r: twin.linear(x, o.weight, bias, workspace, residual=r),
        "head_logits": lambda x, _: (twin.head_logits(x, o.weight),),
    }
    if isinstance(o.weight, Tensor):
        functions |= {
            "plain linear": lambda x, _: twin.linear(x, o.weight, bias, workspace)[:1],
            "rms_norm_rows": lambda x, _: (
                rows_twin.rms_norm_rows(x, squares_of(x, 3), o.scale, EPSILON),
            ),
            "norm_residual": lambda x, r: rows_twin.norm_residual(
                r, o.tail.float(), EPSILON, r * 0.5
            ),
            "head_sample": sample,
        }
    return functions


@pytest.mark.covers(1)
@FORMS
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in SLOW_TYPES else ())
        for kind in ["plain", "int8", "e2m1 32", "int4 64", *gguf_forms.FORMS]
    ],
)
def test_a_rows_bits_do_not_depend_on_its_place_and_neighbours(
    kind: str,
    config: LinearConfig,
    device: str,
    dtypes: tuple[torch.dtype, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on how many rows there are."""
    tried, places = (range(1, 17), range(17)) if device == "cuda" else ((1, 16), (6,))
    for dtype in dtypes if device == "cuda" else dtypes[-1:]:
        is_block_type = kind in gguf_forms.FORMS
        n, k = {"plain": (24, 80), "int8": (48, 140)}.get(
            kind, (24, 512) if is_block_type else (48, 320)
        )
        o = Operands(n, k, 17, dtype, device, kind=kind)
        config = replace(config, block_k=step_of(o.weight) or config.block_k)
        monkeypatch.setattr(twin, "_config", choice(config))
        functions = operations(o, 17)
        if is_block_type and device == "cpu":  # the interpreter is slow
            functions = {name: functions[name] for name in ("linear", "norm_gate_up")}
        for name, run in functions.items():
            results = run(o.x, o.residual)
            for rows in tried:
                some = run(o.x[:rows], o.residual[:rows])
                for result, part in zip(results, some, strict=True):
                    assert torch.equal(part, result[:rows]), (name, dtype, rows)
            for place in places:
                other = (300.0, float("nan"), float("inf"), 0.001, 1.0)[place % 5]
                x = o.x * other
                residual = o.residual * other
                x[place] = o.x[3]
                residual[place] = o.residual[3]
                for alone, among in zip(results, run(x, residual), strict=True):
                    assert torch.equal(alone[3], among[place]), (name, dtype, place, other)


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(("n", "k"), [(64, 1024), (16, 2048), (48, 1024), (300, 40)])
def test_workspace_suffices_and_is_left_as_it_was_found(n: int, k: int, device: str) -> None:
    weight = torch.randn(n, k, device=device)
    x = torch.randn(17, k, device=device)
    config = config_for(n, k, weight.element_size(), device_properties(weight.device))
    partials, counters = workspace_sizes(n, 17, config)
    assert (counters > 0) == (k > 40)
    workspace = LinearWorkspace(
        torch.empty(partials, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    norm = Norm(squares_of(x, 2), EPSILON)
    for _ in range(2):
        assert torch.equal(
            twin.linear(x, weight, None, workspace)[0], twin.linear(x, weight, None)[0]
        )
        shared = twin.norm_gate_up(x=x, weight=weight, bias=None, workspace=workspace, norm=norm)
        assert torch.equal(
            shared, twin.norm_gate_up(x=x, weight=weight, bias=None, workspace=None, norm=norm)
        )
        assert not workspace.counters.any()


def test_a_workspace_that_is_too_small_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "_config", choice(SPLIT))
    o = Operands(40, 200, 17, torch.float32, device)
    small = LinearWorkspace(
        torch.empty(10, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    )
    with pytest.raises(AssertionError, match="too small"):
        twin.linear(o.x, o.weight, None, small)


@pytest.mark.parametrize(
    "facts", [*DEVICES.values(), Device()], ids=lambda facts: str(facts.capability)
)
def test_configs_fit_every_weight_and_device(facts: Device) -> None:
    for itemsize in (1, 2, 4):
        for n in (1, 16, 100, 1024, 4096, 24576, 151937, 262144):
            for k in (16, 64, 100, 1024, 4096, 12288):
                config = config_for(n, k, itemsize, facts)
                for size in (config.block_n, config.block_k, config.block_t):
                    assert size >= 16 and size & (size - 1) == 0
                assert (
                    gate_up_config(config, n).block_n >= 32
                    and 1 <= config.split_k <= 8
                    and config.stages >= 2
                )
                for tile in (16, 32, 64):
                    tile_config = with_tile(gate_up_config(config, n), tile, itemsize, facts)
                    step = tile_config.block_n * itemsize + tile_config.block_t * max(2, itemsize)
                    assert tile_config.stages * step * tile_config.block_k <= facts.shared


@triton.jit
def reach_kernel(x, out, row, k):
    far = row_pointers(x, row + tl.arange(0, 1), k)
    tl.store(out + tl.arange(0, 1)[None, :], far.to(tl.int64) - x.to(tl.int64))


def test_a_row_may_begin_beyond_32_bits(device: str) -> None:
    out = torch.zeros(1, dtype=torch.int64, device=device)
    reach_kernel[(1,)](torch.zeros(1, device=device), out, 40_000, 262_144)
    assert out.item() == 4 * 40_000 * 262_144


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs gigabytes of a GPU")
def test_products_are_right_beyond_32_bit_offsets() -> None:
    n = (1 << 17) + 3
    k = 1 << 14
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    weight[-1, -1] = 2.0
    x = torch.ones(2, k, dtype=torch.bfloat16, device="cuda")
    logits = twin.head_logits(x, weight)
    assert logits[:, -1].tolist() == [2.0, 2.0] and logits.sum().item() == 4.0
    del logits, weight
    rows = 8200
    ids = 1 << 18
    if torch.cuda.mem_get_info()[0] > 16 << 30:
        x, table = (
            torch.ones(count, 16, dtype=torch.bfloat16, device="cuda") for count in (rows, ids)
        )
        assert (twin.head_logits(x, table) == 16).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", WEIGHT_DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 12288), (1024, 3072), (24576, 1024), (1000, 320)]
)
def test_tiles_as_wide_as_the_gpu_answers_give_the_same_bits(n: int, k: int, kind: str) -> None:
    """The tile follows the number of rows, so each row of 1 to 130 must equal the row alone."""
    capability = torch.cuda.get_device_capability()
    widest = widest_exact_tiles(partial(load_kernels, "triton", None), torch.device("cuda"), [kind])
    print(torch.cuda.get_device_name(), widest)
    environment = (f"{capability[0]}.{capability[1]}", triton.__version__.rsplit(".", 1)[0])
    assert kind != "bfloat16" or widest == TESTED_LIMITS.get(environment, widest)
    ops = load_kernels("triton", None, widest)
    dtype = torch.bfloat16
    torch.manual_seed(n)
    plain = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    weight: AnyWeight = tile_weight(quantize_int8(plain)) if kind == "int8" else plain
    x = torch.randn(130, k, device="cuda").to(dtype)
    residual = torch.randn(130, n, device="cuda").to(dtype)
    squares = [squares_of(x, parts) for parts in (128, 64, 8, 3)]

    def products(rows: slice) -> list[torch.Tensor]:
        part = x[rows].contiguous()
        norms = [Norm(s[rows].contiguous(), EPSILON) for s in squares]
        results = [
            *(ops.linear(part, weight, None, None, norm)[0] for norm in norms),
            *ops.linear(part, weight, None, residual=residual[rows].contiguous()),
            ops.head_logits(part, weight),
        ]
        return (
            results
            if n % 2
            else [
                *results,
                ops.norm_gate_up(x=part, weight=weight, bias=None, workspace=None, norm=norms[-1]),
            ]
        )

    rows_alone = [products(slice(i, i + 1)) for i in range(130)]
    alone = [
        torch.cat([results[index] for results in rows_alone]) for index in range(len(rows_alone[0]))
    ]
    for rows in (2, 5, 16, 17, 31, 32, 33, 40, 64, 65, 100, 128, 130):
        for single, together in zip(alone, products(slice(0, rows)), strict=True):
            assert torch.equal(single[:rows], together)


@pytest.mark.covers(count=3)
@pytest.mark.parametrize(
    ("vocab", "k", "usable", "id_step"),
    [
        (77, 64, 77, 0),
        (77, 64, 61, 0),
        (77, 64, 1, 0),
        (1, 1, 1, 0),
        (2, 33, 2, 0),
        (3, 5, 3, 0),
        (17, 3, 17, 0),
        (77, 64, 500, 500),
        (77, 64, 300, 500),
        (17, 64, 40, 500),
        (1, 64, 500, 500),
        (3, 64, 9, 500),
    ],
)
def test_sample_is_the_full_samplers_draw(
    vocab: int, k: int, usable: int, id_step: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Rows of temperature 0 among others, in one tile of tokens and in two.

    A head that knows some of `every` ids draws as if the logits of the others were minus infinity.
    """
    for dtype, (slots, window) in itertools.product(dtypes, ((1, 1), (5, 1), (5, 4))):
        o, (seed, first, step, temperature) = sample_operands(
            slots=slots, window=window, device=device, dtype=dtype, vocab=vocab, k=k
        )
        draw = Draw(seed=seed, first=first, step=step, temperature=temperature, usable_vocab=usable)
        head_ids = None
        if id_step:
            head_ids = (
                torch.randperm(id_step, generator=torch.Generator().manual_seed(vocab))[:vocab]
                .sort()
                .values
            )
            head_ids[0] = min(int(head_ids[0]), usable - 1)
        assert drawn(o.x, o.weight, draw, head_ids, id_step)[1].all()


def drawn(
    x: Tensor, weight: Tensor, draw: Draw, head_ids: Tensor | None = None, id_step: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the head's tokens and flags, checked against the full sampler's by the head's
    logits."""
    with mock.patch.object(twin, "_config", choice(SMALL)):
        logits = twin.head_logits(x, weight)
    if head_ids is not None:
        head_ids = head_ids.to(x.device)
        logits = logits.new_full((len(x), id_step), -math.inf).index_copy_(1, head_ids, logits)
    with mock.patch.object(twin, "_config", choice(SMALL)):
        token, finite = twin.head_sample(x, weight, draw, head_ids)
    slots = len(draw.seed)
    zeros = torch.zeros_like(draw.temperature)
    none = torch.zeros_like(draw.seed)
    logits = logits.view(slots, -1, logits.shape[-1])
    tensors = SamplingTensors(
        temperature=draw.temperature,
        top_p=zeros + 1,
        min_p=zeros,
        repetition_penalty=zeros + 1,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        top_k=none,
        seed=draw.seed,
        bias=None,
        in_prompt=None,
        generated=None,
        stop_ids=none[:, None],
        length=none,
        min_length=None,
        noise=True,
        truncation=False,
        usable_vocab=draw.usable_vocab,
    )
    rows = torch.arange(logits.shape[1], device=x.device)
    full_token, full_finite = sampling_triton.sample_rows(
        logits,
        draft=none[:, None].expand(slots, len(rows) - 1),
        positions=draw.first[:, None] + draw.step + rows,
        tensors=tensors,
    )
    assert torch.equal(full_token.flatten(), token)
    assert torch.equal(full_finite.flatten(), finite)
    plain, plain_finite = reference.head_sample(x, weight, draw, head_ids)
    assert torch.equal(plain_finite, finite)
    assert x.dtype != torch.float32 or torch.equal(plain[finite], token[finite])
    return token, finite


def test_ties_go_to_the_lowest_id_across_tiles(device: str) -> None:
    o, (seed, first, step, heat) = sample_operands(4, 1, device, torch.float32)
    o.weight[:] = o.weight[5]
    x = o.x * (o.x @ o.weight[5]).sign().unsqueeze(1)
    o.weight[:3] = -o.weight[:3]
    token, finite = drawn(
        x, o.weight, Draw(seed=seed, first=first, step=step, temperature=0 * heat, usable_vocab=77)
    )
    assert token.tolist() == [3] * 4 and finite.all()


def test_rows_without_finite_logits_are_told(device: str) -> None:
    """NaN anywhere below `usable_vocab`, infinities that win or that are everywhere; never beyond
    it."""
    o, (seed, first, step, heat) = sample_operands(6, 1, device, torch.float32)
    weight = torch.zeros_like(o.weight)
    x = torch.zeros_like(o.x)
    weight[:, 0] = 1.0
    weight[40, :2] = torch.tensor([0.0, 1.0], device=device)
    weight[70, 2] = math.nan
    x[[0, 3, 4, 5], 0] = torch.tensor([1.0, -math.inf, 1.0, 1.0], device=device)
    x[[1, 2, 4], 1] = torch.tensor([math.nan, math.inf, -1e30], device=device)
    for temperature in (0.0, 0.7):
        draw = Draw(seed, first, step, torch.full_like(heat, temperature), usable_vocab=61)
        token, finite = drawn(x, weight, draw)
        assert finite.tolist() == [True, False, False, False, True, True]
        assert token.min() >= 0 and token.max() < 61
        assert not drawn(x, weight, draw._replace(usable_vocab=77))[1].any()
