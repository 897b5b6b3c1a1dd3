"""The measured kernels of `spd.kernels` that make up a layer, in whichever form is handed in.

A case builds operands as a round has them, times the operation at several sizes and returns
{size: [microseconds, share of the read rate or None, microseconds of torch's counterpart or None]}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_suite.block_weights import draw_blocks
from benchmarks.gpu_suite.graph_timer import Call, Timer
from benchmarks.gpu_suite.shapes import Shape
from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.interface import Kernels
from spd.kernels.linear.skinny_linear import Draw, Norm
from spd.runtime.layers.skinny_linear import SkinnyLinear, share_workspace

PAGE = 64
EPSILON = 1e-6
Row = list[float | None]
Rows = dict[str, Row]


@dataclass(frozen=True)
class Bench:
    """What a case needs: the kernels, the timer, the type of weights, bytes a second that can be
    read."""

    kernels: Kernels
    timer: Timer
    dtype: torch.dtype
    read_rate: float
    notes: list[str] = field(default_factory=list)
    """Why a counterpart has no time."""

    def row(
        self, calls: Sequence[Call], nbytes: int | None, rival: Sequence[Call] | None = None
    ) -> Row:
        """Return a row: time, share of the read rate for `nbytes` read by a call, time of the
        rival."""
        us = self.timer.microseconds(calls)
        share = 1e6 * nbytes / self.read_rate / us if nbytes and us else None
        return [us, share, self._rival(rival)]

    def _rival(self, calls: Sequence[Call] | None) -> float | None:
        try:
            return None if calls is None else self.timer.microseconds(calls)
        except Exception as error:  # a counterpart's fault must not hide the kernel's own time
            self.notes.append(f"{type(error).__name__}: {str(error)[:200]}")
            return None

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return random values: zeros are faster to read."""
        return torch.randn(shape, dtype=self.dtype, device=self.timer.device).mul_(scale)

    def integers(self, *shape: int, fill: int = 0) -> Tensor:
        """Return an int64 tensor filled with a value."""
        return torch.full(shape, fill, dtype=torch.long, device=self.timer.device)


def linear_case(
    bench: Bench, kind: str, n: int, k: int, rows: Sequence[int], dtype: torch.dtype | None = None
) -> Rows:
    """Measure a layer's product for each number of rows, against `torch.mm`; kind as in
    `Shape.weights`.

    In the bench's type where none is given.
    """
    kernels = bench.kernels
    table_rows = Rows()
    bench = replace(bench, dtype=dtype or bench.dtype)
    weights = bench.normal(bench.timer.copies(2 * n * k), n, k, scale=k**-0.5).unbind()
    product = SkinnyLinear(weights[0], None, kernels)
    share_workspace([product], max(rows))
    workspace = product.workspace
    for count in rows:
        x = bench.normal(count, k)
        residual = bench.normal(count, n)
        squares = torch.full((count, 1), float(k), dtype=torch.float32, device=x.device)
        y = torch.empty(count, n, dtype=x.dtype, device=x.device)

        def call(
            w: Tensor, x: Tensor = x, squares: Tensor = squares, residual: Tensor = residual
        ) -> Call:
            if kind == "head":
                return partial(kernels.head_logits, x, w)
            if kind in ("out", "down"):
                return partial(kernels.linear, x, w, None, workspace, None, residual)
            normed = kernels.linear if kind == "qkv" else kernels.norm_gate_up
            return partial(normed, x, w, None, workspace, Norm(squares, EPSILON))

        rival = [partial(torch.mm, x, w.t(), out=y) for w in weights]
        table_rows[str(count)] = bench.row([call(w) for w in weights], weights[0].nbytes, rival)
    return table_rows


def layer_case(bench: Bench, shape: Shape, rows: Sequence[int]) -> Rows:
    """Measure a layer's products one after another."""
    kernels = bench.kernels
    table_rows = Rows()
    sizes = {kind: size for kind, size in shape.weights().items() if kind != "head"}
    nbytes = sum(2 * n * k for n, k in sizes.values())
    layers = [
        {kind: bench.normal(n, k, scale=k**-0.5) for kind, (n, k) in sizes.items()}
        for _ in range(bench.timer.copies(nbytes))
    ]
    products = [SkinnyLinear(weight, None, kernels) for weight in layers[0].values()]
    share_workspace(products, max(rows))
    workspaces = dict(zip(sizes, (product.workspace for product in products), strict=True))
    for count in rows:
        x = bench.normal(count, shape.hidden)
        residual = bench.normal(count, shape.hidden)
        mixed = bench.normal(count, sizes["out"][1])
        squares = torch.full((count, 1), float(shape.hidden), dtype=torch.float32, device=x.device)

        def layer(
            w: dict[str, Tensor], x: Tensor = x, mixed: Tensor = mixed, squares: Tensor = squares,
            residual: Tensor = residual,
        ) -> None:  # fmt: skip
            norm = Norm(squares, EPSILON)
            kernels.linear(x, w["qkv"], None, workspaces["qkv"], norm)
            kernels.linear(mixed, w["out"], None, workspaces["out"], None, residual)
            inner = kernels.norm_gate_up(
                x=x, weight=w["gate_up"], bias=None, workspace=workspaces["gate_up"], norm=norm
            )
            kernels.linear(inner, w["down"], None, workspaces["down"], None, residual)

        table_rows[str(count)] = bench.row([partial(layer, weights) for weights in layers], nbytes)
    return table_rows


def draw_case(bench: Bench, vocab: int, hidden: int, rows: Sequence[int]) -> Rows:
    """Measure the head with the fused draw for one slot's window.

    The rival is the head without it.
    """
    kernels = bench.kernels
    table_rows = Rows()
    copies = bench.timer.copies(2 * vocab * hidden)
    weights = bench.normal(copies, vocab, hidden, scale=hidden**-0.5).unbind()
    seed = bench.integers(1, fill=7)
    first = bench.integers(1, fill=1000)
    for count in rows:
        x = bench.normal(count, hidden)
        bare = [partial(kernels.head_logits, x, w) for w in weights]
        for temperature in (0.0, 0.8):
            draw = Draw(
                seed=seed,
                first=first,
                step=0,
                temperature=torch.full((1,), temperature, device=x.device),
                usable_vocab=vocab,
            )
            calls = [partial(kernels.head_sample, x, w, draw) for w in weights]
            table_rows[f"{count} T={temperature}"] = bench.row(calls, weights[0].nbytes, bare)
    return table_rows


def row_case(bench: Bench, hidden: int, vocab: int, rows: Sequence[int]) -> Rows:
    """Measure the embedding, the last norm, and the norm after a block with the sum that follows it.

    The embedding also of a table in blocks.
    """
    kernels = bench.kernels
    table_rows = Rows()
    table = bench.normal(vocab, hidden)
    blocks = draw_blocks("Q8_0", vocab, hidden, table.device)
    weight = bench.normal(hidden)
    for count in rows:
        ids = torch.randint(vocab, (count,), device=table.device)
        x, squares = kernels.embed(ids, table)
        rival: list[Call] = [partial(F.embedding, ids, table)]
        table_rows[f"embed {count}"] = bench.row([partial(kernels.embed, ids, table)], None, rival)
        lookup = partial(kernels.code_rows, ids, blocks, bench.dtype)
        table_rows[f"rows in Q8_0 {count}"] = bench.row([lookup], None, rival)
        rival = [partial(F.rms_norm, x, (hidden,), weight, EPSILON)]
        norm = partial(kernels.rms_norm_rows, x, squares, weight, EPSILON)
        table_rows[f"norm {count}"] = bench.row([norm], None, rival)
        norm_sum = partial(kernels.norm_residual, x, weight, EPSILON, bench.normal(count, hidden))
        table_rows[f"norm_residual {count}"] = bench.row([norm_sum], None, rival)
    return table_rows


@dataclass(frozen=True)
class Pools:
    """Keys and values of several layers, each [pages, PAGE, K, D], and the slots' page table [S,
    P].

    Those of rounded heads are codes, and their scales follow.
    """

    layers: list[tuple[Tensor, ...]]
    page_table: Tensor

    @classmethod
    def build(
        cls, bench: Bench, heads: AttentionHeads, slots: int, context: int, copies: int
    ) -> Pools:
        """Build full pages for `context` positions a slot, in an order that no stride predicts."""
        pages = -(-context // PAGE)
        shape = (slots * pages + 2, PAGE, heads.num_kv_heads, heads.head_dim)

        def random_pool() -> Tensor:
            if heads.rounded:
                return bench.normal(*shape, scale=30.0).clamp(-127, 127).to(torch.int8)
            return bench.normal(*shape)

        def random_scales() -> Tensor:
            return torch.rand(shape[:3], device=bench.timer.device).half() / 30

        layers: list[tuple[Tensor, ...]] = [(random_pool(), random_pool()) for _ in range(copies)]
        if heads.rounded:
            layers = [(*layer, random_scales(), random_scales()) for layer in layers]
        table = torch.randperm(slots * pages, device=bench.timer.device) + 2
        return cls(layers, table.view(slots, pages))

    def contiguous(self, slots: int, context: int) -> list[tuple[Tensor, ...]]:
        """Return the same memory viewed as [slots, K, context, D] for a kernel without pages."""

        def transposed(pool: Tensor) -> Tensor:
            kv_heads, size = pool.shape[2:]
            flat = pool.view(-1)[: slots * context * kv_heads * size]
            return flat.view(slots, context, kv_heads, size).transpose(1, 2)

        return [tuple(transposed(pool) for pool in layer) for layer in self.layers]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, scale=scale, is_causal=causal, enable_gqa=True
    )


def _entry_bytes(heads: AttentionHeads) -> int:
    """Return the bytes of one head's keys or values of a position, with the scale of codes."""
    return heads.head_dim + 2 if heads.rounded else 2 * heads.head_dim


def attention_case(
    bench: Bench, heads: AttentionHeads, slots: int, context: int, rows: Sequence[int]
) -> Rows:
    """Measure windows at a context's end, against torch's attention to contiguous keys, unmasked.

    The rival of codes is the same operation on the bench's type.
    """
    kernels = bench.kernels
    table_rows = Rows()
    device = bench.timer.device
    nbytes = slots * context * 2 * heads.num_kv_heads * _entry_bytes(heads)
    pools = Pools.build(bench, heads, slots, context, bench.timer.copies(nbytes))
    wide_heads = replace(heads, rounded=False)
    wide_pools = pools
    if heads.rounded:
        copies = bench.timer.copies(2 * nbytes)
        wide_pools = Pools.build(bench, wide_heads, slots, context, copies)
    params = AttentionParams(heads.head_dim**-0.5)
    for width in rows:
        positions = (
            (torch.arange(width, device=device) + context - width).expand(slots, width).contiguous()
        )
        valid = torch.ones(slots, width, dtype=torch.bool, device=device)
        window = Windows(positions, valid, pools.page_table, [context] * slots, [None] * slots)
        planning = partial(kernels.plan_attention, window, heads, PAGE, bench.dtype)
        plan = planning()
        query = bench.normal(slots, width, heads.num_heads, heads.head_dim)
        calls = [
            partial(kernels.paged_attention, query, layer, plan, params) for layer in pools.layers
        ]
        rival: list[Call]
        if heads.rounded:
            window = replace(window, page_table=wide_pools.page_table)
            plan = kernels.plan_attention(window, wide_heads, PAGE, bench.dtype)
            rival = [
                partial(kernels.paged_attention, query, layer, plan, params)
                for layer in wide_pools.layers
            ]
        else:
            rows_first = query.transpose(1, 2)
            rival = [
                partial(_attend, rows_first, k, v, params.scale, False)
                for k, v in pools.contiguous(slots, context)
            ]
        table_rows[str(width)] = bench.row(calls, nbytes, rival)
        table_rows[f"plan {width}"] = bench.row([planning], None)
    return table_rows


def prefill_case(bench: Bench, heads: AttentionHeads, chunk: int, starts: Sequence[int]) -> Rows:
    """Measure a prompt chunk after `start` positions; the second column is teraflops a second.

    Torch's counterpart has a mask only where the chunk is all there is.
    """
    kernels = bench.kernels
    table_rows = Rows()
    pools = Pools.build(bench, heads, 1, max(starts) + chunk, 1)
    first_pools = pools.layers[0]
    table = pools.page_table
    query = bench.normal(chunk, heads.num_heads, heads.head_dim)
    scale = heads.head_dim**-0.5
    for start in starts:
        [(k, v)] = pools.contiguous(1, start + chunk)
        rival = partial(_attend, query[None].transpose(1, 2), k, v, scale, start == 0)
        where = torch.arange(start, start + chunk, device=query.device)[None]
        rows = Windows(
            where, torch.ones_like(where, dtype=torch.bool), table, [start + chunk], [None], start
        )
        plan = kernels.plan_attention(rows, heads, PAGE, bench.dtype)
        call = partial(
            kernels.paged_attention, query[None], first_pools, plan, AttentionParams(scale)
        )
        us, _, torch_us = bench.row([call], None, [rival])
        flops = 4 * chunk * (start + chunk / 2) * heads.num_heads * heads.head_dim
        table_rows[str(start)] = [us, 1e-6 * flops / us if us else None, torch_us]
    return table_rows


def rotary_case(bench: Bench, heads: AttentionHeads, rows: Sequence[int]) -> Rows:
    """Measure the steps between the projection and attention, with the per-head norm."""
    table_rows = Rows()
    size = heads.head_dim
    pools = Pools.build(bench, heads, 1, 1024, 1).layers[0]
    cos = bench.normal(1024, size)
    sin = bench.normal(1024, size)
    weight = bench.normal(heads.num_heads + heads.num_kv_heads, size)
    for count in rows:
        qkv = bench.normal(count, (heads.num_heads + 2 * heads.num_kv_heads) * size)
        positions = torch.arange(count, device=cos.device) + 500
        rotated = RotatedRows(cos, sin, positions, positions + 2 * PAGE)
        call = partial(
            bench.kernels.rotary_store, qkv, rotated, weight, EPSILON, pools, heads.num_heads
        )
        table_rows[str(count)] = bench.row([call], None)
    return table_rows


def rotary_attention_case(
    bench: Bench, heads: AttentionHeads, slots: int, context: int, rows: Sequence[int]
) -> Rows:
    """Measure windows at a context's end from their projection on, against two operations."""
    kernels = bench.kernels
    table_rows = Rows()
    device = bench.timer.device
    size = heads.head_dim
    nbytes = slots * context * 2 * heads.num_kv_heads * _entry_bytes(heads)
    pools = Pools.build(bench, heads, slots, context, bench.timer.copies(nbytes))
    params = AttentionParams(size**-0.5)
    cos = bench.normal(context, size)
    sin = bench.normal(context, size)
    weight = bench.normal(heads.num_heads + heads.num_kv_heads, size)
    for width in rows:
        positions = (torch.arange(width, device=device) + context - width).repeat(slots, 1)
        page = pools.page_table.gather(1, positions // PAGE)
        slot_rows = (page * PAGE + positions % PAGE).flatten()
        rotated = RotatedRows(cos, sin, positions.flatten(), slot_rows)
        valid = torch.ones_like(positions, dtype=torch.bool)
        window = Windows(positions, valid, pools.page_table, [context] * slots, [None] * slots)
        plan = kernels.plan_attention(window, heads, PAGE, bench.dtype)
        qkv = bench.normal(slots, width, (heads.num_heads + 2 * heads.num_kv_heads) * size)

        def in_two(
            layer: tuple[Tensor, ...], qkv: Tensor, rows: RotatedRows, plan: AttentionPlan
        ) -> Tensor:
            query = kernels.rotary_store(
                qkv.flatten(0, 1), rows, weight, EPSILON, layer, heads.num_heads
            )
            query = query.view(slots, -1, heads.num_heads, size)
            return kernels.paged_attention(query, layer, plan, params)

        calls = [
            partial(kernels.rotary_attention, qkv, rotated, weight, EPSILON, layer, plan, params)
            for layer in pools.layers
        ]
        rival = [partial(in_two, layer, qkv, rotated, plan) for layer in pools.layers]
        table_rows[str(width)] = bench.row(calls, nbytes, rival)
    return table_rows


Case = Callable[[Bench], Rows]
