"""Skinny products: right, and the same bits for a row in any company."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from spd.kernels.dispatch import load_kernels
from spd.kernels.launch import Device, device_facts
from spd.kernels.linear import rows as rows_reference
from spd.kernels.linear import rows_triton as rows_twin
from spd.kernels.linear import skinny_kernels_triton
from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear import skinny_linear_triton as twin
from spd.kernels.linear.eight_bits import block_scales, int8_rows
from spd.kernels.linear.skinny_config import (
    LinearConfig,
    config_for,
    paired,
    with_tile,
    workspace_sizes,
)
from spd.kernels.linear.skinny_linear import AnyWeight, LinearWorkspace, ScaledWeight
from spd.kernels.linear.skinny_product_triton import row_begins
from spd.runtime.lab.tile_questions import ask
from spd.runtime.load.token_tiles import KINDS, SHOWN
from spd.runtime.plan.kernel_choice import FP8_CAPABILITY
from tests.kernels.compile_ahead import DEVICES
from tests.kernels.skinny_cases import SMALL, Operands, close, sample_operands, squares_of, wide

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
"""(N, K, T): one row and column, odd sizes and others that no block divides, and sizes that all do."""


@pytest.mark.parametrize(("n", "k", "rows"), SHAPES)
@pytest.mark.parametrize("config", [SMALL, SPLIT, None], ids=["whole", "split", "default"])
def test_products(
    n: int, k: int, rows: int, config: LinearConfig | None, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        o = Operands(n, k, rows, dtype, device)
        x, weight, pair, residual = wide(o.x, o.weight, o.pair, o.residual)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        biases = [(None, None), (o.bias, o.pair_bias)]
        if device == "cpu":  # the interpreter is slow
            del biases[dtype == torch.float32]
        for bias, pair_bias in biases:
            shift, pair_shift = (0.0 if b is None else b.double() for b in (bias, pair_bias))
            found = twin.linear(o.x, o.weight, bias, config=config)
            close(found, reference.linear(o.x, o.weight, bias), x @ weight.T + shift)
            arguments = (o.x, o.squares, EPSILON, o.weight, bias)
            found = twin.norm_linear(*arguments, config=config)
            close(found, reference.norm_linear(*arguments), normed @ weight.T + shift)
            arguments = (o.x, o.squares, EPSILON, o.pair, pair_bias)
            found = twin.norm_gate_up(*arguments, config=config)
            gate, up = (normed @ pair.T + pair_shift).chunk(2, dim=-1)
            close(found, reference.norm_gate_up(*arguments), torch.nn.functional.silu(gate) * up)
            if rows == SHAPES[0][2]:
                found = twin.norm_gate_up(*arguments, gelu=True, config=config)
                right = torch.nn.functional.gelu(gate, approximate="tanh") * up
                close(found, reference.norm_gate_up(*arguments, gelu=True), right)
            found, squares = twin.linear_residual(o.x, o.weight, bias, o.residual, config=config)
            plain, _ = reference.linear_residual(o.x, o.weight, bias, o.residual)
            close(found, plain, residual + x @ weight.T + shift)
            assert squares.dtype == torch.float32 and squares.shape[0] == rows
            torch.testing.assert_close(squares.sum(1), found.float().square().sum(1), rtol=1e-5, atol=1e-6)
        close(twin.head_logits(o.x, o.weight, config=config), (o.x @ o.weight.T).float(), x @ weight.T)


def test_squares_have_a_part_for_every_tile(device: str) -> None:
    o = Operands(40, 72, 5, torch.float32, device)
    y, squares = twin.linear_residual(o.x, o.weight, None, o.residual, config=SMALL)
    parts = [part.square().sum(1) for part in y.tensor_split((16, 32), dim=1)]
    torch.testing.assert_close(squares, torch.stack(parts, dim=1))


@pytest.mark.parametrize(
    ("h", "parts", "rows"), [(16, 1, 3), (80, 3, 3), (5000, 200, 3), (1, 1, 1), (33, 2, 1), (2049, 3, 1)]
)
def test_rows(h: int, parts: int, rows: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in (*dtypes, torch.bfloat16):
        o = Operands(11, h, rows, dtype, device, parts)
        ids = torch.tensor([10, 0, 10][:rows], device=device)
        x, squares = rows_twin.embed(ids, o.weight)
        assert torch.equal(x, o.weight[ids])
        torch.testing.assert_close(squares.sum(1), x.float().square().sum(1), rtol=1e-5, atol=0)
        scaled, squares = rows_twin.embed(ids, o.weight, 5.656854)
        if dtype in dtypes:  # the interpreter cuts bfloat16 off where a GPU rounds it
            assert torch.equal(scaled, o.weight[ids] * 5.656854)
        torch.testing.assert_close(squares.sum(1), scaled.float().square().sum(1), rtol=1e-5, atol=0)
        arguments = (o.x, o.squares, o.scale, EPSILON)
        (wide_x, scale), plain = wide(o.x, o.scale), rows_reference.rms_norm_rows(*arguments)
        exact = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + EPSILON) * scale
        close(rows_twin.rms_norm_rows(*arguments), plain, exact)


@pytest.mark.parametrize("h", [1, 33, 5000])
@pytest.mark.parametrize("scale", [None, 5.656854])
def test_a_row_is_embedded_alone_as_among_others(h: int, scale: float | None, device: str) -> None:
    """Its squares too, which the next norm divides by."""
    table = Operands(11, h, 1, torch.float16, device).weight
    table[4] = float("inf")
    ids = torch.tensor([10, 4, 10, 0, 7], device=device)
    among = rows_twin.embed(ids, table, scale)
    for row in range(5):
        for one, every in zip(rows_twin.embed(ids[row : row + 1], table, scale), among, strict=True):
            assert torch.equal(one[0], every[row])


def test_many_parts_of_squares(device: str) -> None:
    """More parts than a program holds at once."""
    o = Operands(20, 300, 3, torch.float32, device, parts=300)
    plain = reference.norm_linear(o.x, o.squares, EPSILON, o.weight, None)
    torch.testing.assert_close(twin.norm_linear(o.x, o.squares, EPSILON, o.weight, None, config=SMALL), plain)


def operations(
    o: Operands, config: LinearConfig, rows: int
) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]:
    """Every operation as a function of x [T, K] and the residual [T, N], all of whose results are by row."""
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
        return twin.head_sample(x, o.weight, o.weight.shape[0] - 1, seed[:t], first[:t], 2, heat[:t])

    def normed(form: Callable[..., Tensor], weight: Tensor, bias: Tensor) -> Callable[..., tuple[Tensor]]:
        return lambda x, _: (form(x, squares_of(x, 3), EPSILON, weight, bias, workspace, config=config),)

    return {
        "linear": lambda x, _: (twin.linear(x, o.weight, o.bias, workspace, config=config),),
        "norm_linear": normed(twin.norm_linear, o.weight, o.bias),
        "norm_gate_up": normed(twin.norm_gate_up, o.pair, o.pair_bias),
        "linear_residual": lambda x, r: twin.linear_residual(
            x, o.weight, o.bias, r, workspace, config=config
        ),
        "rms_norm_rows": lambda x, _: (rows_twin.rms_norm_rows(x, squares_of(x, 3), o.scale, EPSILON),),
        "head_logits": lambda x, _: (twin.head_logits(x, o.weight, config=config),),
        "head_sample": sample,
    }


@FORMS
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(
    config: LinearConfig, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    tried = range(1, 17) if device == "cuda" else (1, 2, 7, 16)
    for dtype in dtypes if device == "cuda" else dtypes[-1:]:
        o = Operands(24, 80, 17, dtype, device)
        for name, run in operations(o, config, 17).items():
            every = run(o.x, o.residual)
            for rows in tried:
                some = run(o.x[:rows], o.residual[:rows])
                for whole, part in zip(every, some, strict=True):
                    assert torch.equal(part, whole[:rows]), (name, dtype, rows)


@FORMS
def test_a_rows_bits_do_not_depend_on_its_place_and_neighbours(
    config: LinearConfig, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    places = range(17) if device == "cuda" else (0, 6, 12, 16)
    for dtype in dtypes if device == "cuda" else dtypes[-1:]:
        o = Operands(24, 80, 17, dtype, device)
        for name, run in operations(o, config, 17).items():
            alone = run(o.x[3:4], o.residual[3:4])
            for place in places:
                other = (300.0, float("nan"), float("inf"), 0.001, 1.0)[place % 5]
                x, residual = o.x * other, o.residual * other
                x[place], residual[place] = o.x[3], o.residual[3]
                for one, among in zip(alone, run(x, residual), strict=True):
                    assert torch.equal(one[0], among[place]), (name, dtype, place, other)


@pytest.mark.parametrize(("n", "k"), [(64, 1024), (16, 2048), (48, 1024), (300, 40)])
def test_workspace_suffices_and_is_left_as_it_was_found(n: int, k: int, device: str) -> None:
    weight, x = torch.randn(n, k, device=device), torch.randn(17, k, device=device)
    config = config_for(n, k, weight.element_size(), device_facts(weight.device))
    partials, counters = workspace_sizes(n, 17, config)
    assert (counters > 0) == (k > 40)
    workspace = LinearWorkspace(
        torch.empty(partials, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
    )
    squares = squares_of(x, 2)
    for _ in range(2):
        assert torch.equal(twin.linear(x, weight, None, workspace), twin.linear(x, weight, None))
        shared = twin.norm_gate_up(x, squares, EPSILON, weight, None, workspace)
        assert torch.equal(shared, twin.norm_gate_up(x, squares, EPSILON, weight, None))
        assert not workspace.counters.any()


def test_a_workspace_that_is_too_small_is_refused(device: str) -> None:
    o = Operands(40, 200, 17, torch.float32, device)
    small = LinearWorkspace(torch.empty(10, device=device), torch.zeros(64, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="too small for 17 rows"):
        twin.linear(o.x, o.weight, None, small, config=SPLIT)


def test_the_number_of_rows_does_not_choose_the_program() -> None:
    """Triton would compile one row apart from five, and sixteen apart from both, unless told not to."""
    kernels = [
        node
        for node in ast.parse(Path(skinny_kernels_triton.__file__).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    counted = [k for k in kernels if "rows" in [argument.arg for argument in k.args.args]]
    assert [k.name for k in counted] == ["linear_kernel", "gate_up_kernel", "head_kernel"]
    for kernel in counted:
        assert ast.unparse(kernel.decorator_list[0]).startswith("triton.jit(do_not_specialize=['rows'")


@pytest.mark.parametrize("facts", [*DEVICES.values(), Device()], ids=lambda facts: str(facts.capability))
def test_configs_fit_every_weight_and_device(facts: Device) -> None:
    for itemsize in (1, 2, 4):
        for n in (1, 16, 100, 1024, 4096, 24576, 151937, 262144):
            for k in (16, 64, 100, 1024, 4096, 12288):
                config = config_for(n, k, itemsize, facts)
                for size in (config.block_n, config.block_k, config.block_t):
                    assert size >= 16 and size & (size - 1) == 0
                assert paired(config, n).block_n >= 32 and 1 <= config.split_k <= 8 and config.stages >= 2
                for tile in (16, 32, 64):
                    each = with_tile(paired(config, n), tile, itemsize, facts)
                    step = each.block_n * itemsize + each.block_t * max(2, itemsize)
                    assert each.stages * step * each.block_k <= facts.shared


@triton.jit
def reach_kernel(x, out, row, k):
    far = row_begins(x, row + tl.arange(0, 1), k)
    tl.store(out + tl.arange(0, 1)[None, :], far.to(tl.int64) - x.to(tl.int64))


def test_a_row_may_begin_beyond_32_bits(device: str) -> None:
    out = torch.zeros(1, dtype=torch.int64, device=device)
    reach_kernel[(1,)](torch.zeros(1, device=device), out, 40_000, 262_144)
    assert out.item() == 4 * 40_000 * 262_144


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs gigabytes of a GPU")
def test_offsets_beyond_32_bits() -> None:
    n, k = (1 << 17) + 3, 1 << 14
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    weight[-1, -1] = 2.0
    x = torch.ones(2, k, dtype=torch.bfloat16, device="cuda")
    logits = twin.head_logits(x, weight)
    assert logits[:, -1].tolist() == [2.0, 2.0] and logits.sum().item() == 4.0
    del logits, weight
    rows, ids = 8200, 1 << 18
    if torch.cuda.mem_get_info()[0] > 16 << 30:
        x, table = (torch.ones(count, 16, dtype=torch.bfloat16, device="cuda") for count in (rows, ids))
        assert (twin.head_logits(x, table) == 16).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1024, 3072), (24576, 1024), (1000, 320)])
def test_tiles_as_wide_as_the_gpu_answers_give_the_same_bits(n: int, k: int, kind: str) -> None:
    """The tile follows the number of rows, so each row of 1 to 130 must equal the row alone."""
    held = torch.cuda.get_device_capability()
    if kind == "float8_e4m3fn" and held < FP8_CAPABILITY:
        pytest.skip("a GPU that keeps no weights in FP8")
    widest = ask(partial(load_kernels, "triton", None), torch.device("cuda"), [kind])
    print(torch.cuda.get_device_name(), widest)
    assert (held, kind) != ((9, 0), "bfloat16") or widest == SHOWN["9.0"]
    ops, dtype = load_kernels("triton", None, widest), torch.bfloat16
    torch.manual_seed(n)
    weight: AnyWeight = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    if kind == "int8":
        weight = int8_rows(weight)
    elif kind == "float8_e4m3fn":
        scales = block_scales(torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5, n)
        weight = ScaledWeight(weight.to(torch.float8_e4m3fn), scales, torch.rand(k, device="cuda").to(dtype))
    x = torch.randn(130, k, device="cuda").to(dtype)
    residual = torch.randn(130, n, device="cuda").to(dtype)
    squares = [squares_of(x, parts) for parts in (128, 64, 8, 3)]

    def products(rows: slice) -> list[torch.Tensor]:
        part, sums = x[rows].contiguous(), squares[-1][rows].contiguous()
        new, partial = ops.linear_residual(part, weight, None, residual[rows].contiguous())
        found = [
            *(ops.norm_linear(part, s[rows].contiguous(), EPSILON, weight, None) for s in squares),
            new,
            partial,
            ops.head_logits(part, weight),
        ]
        return found if n % 2 else [*found, ops.norm_gate_up(part, sums, EPSILON, weight, None)]

    alone = [torch.cat(parts) for parts in zip(*(products(slice(i, i + 1)) for i in range(130)), strict=True)]
    for rows in (2, 5, 16, 17, 31, 32, 33, 40, 64, 65, 100, 128, 130):
        for one, every in zip(alone, products(slice(0, rows)), strict=True):
            assert torch.equal(one[:rows], every)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_follows_its_inputs() -> None:
    """Split products among others, replayed: counters begin every replay at zero."""
    o, keys = sample_operands(5, 1, "cuda", torch.bfloat16)
    o.residual = o.x.clone()
    square = torch.randn(64, 64, device="cuda").to(torch.bfloat16)
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    workspace = LinearWorkspace(torch.empty(1 << 18, device="cuda"), counters)

    def step() -> tuple[Tensor, ...]:
        y, squares = twin.linear_residual(o.x, square, None, o.residual, workspace, config=SPLIT)
        hidden = twin.norm_linear(y, squares, EPSILON, square, None, workspace, config=SPLIT)
        return hidden, *twin.head_sample(hidden, o.weight, 77, *keys, config=SMALL)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        o.x.normal_()
        keys[1].add_(1)
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            assert torch.equal(found, expected)
