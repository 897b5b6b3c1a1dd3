"""Every Triton kernel as models launch it, for `compile_ahead`: operations on tensors without data.

A case is named for the reader; what it launches is compiled as Triton would compile it on that
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spd.formats.block_config import RouterConfig
from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.capabilities import SUPER_BLOCK
from spd.kernels.dispatch import load_kernels
from spd.kernels.experts.moe import ExpertWeights
from spd.kernels.interface import Kernels
from spd.kernels.linear.activation import GELU, RELU2, SILU, Activation
from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.linear.head_input import PairNorms
from spd.kernels.linear.skinny_linear import AnyWeight, Draw, Norm
from spd.kernels.linear.tiled_weight import TiledWeight, tile_weight
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.pool_lookup import TextPool
from spd.kernels.round.window import ENDED, Paging, RoundWindow, Rows
from spd.runtime.layers.base import HeadStates
from spd.runtime.models.gguf_forms import FORMS
from spd.runtime.round.state import RoundState
from tests.kernels.sampling_cases import EVERY_STEP, PLAIN, map_tensors, random_case, with_steps

Launches = dict[str, Callable[[], Any]]
BF16 = torch.bfloat16
F16 = torch.float16
F32 = torch.float32
I64 = torch.int64
BOOL = torch.bool
NAMES = {BF16: "bf16", F16: "fp16", torch.int8: "i8"}
CODED = ("int4 128", "int4 64", "int4 32", "e2m1 32", "e2m1 16", "int8 128", "e4m3 128")
"""Kinds and groups of codes, those of four-bit integers with zeros."""
Kind = torch.dtype | str | None
VOCAB = 151936
OPS = load_kernels("triton")
WIDE = load_kernels("triton", None, {"bfloat16": 64, "int8": 64})


def meta_tensor(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return meta_tensor(dtype, shape)


def weight_of(
    dtype: torch.dtype, kind: Kind, *shape: int, normed: bool = False
) -> Tensor | TiledWeight:
    """Return a weight [..., N, K] in eight bits of a kind, in codes with zeros, or in the dtype."""
    if kind is None:
        return meta_tensor(dtype, shape)
    *experts, n, k = shape
    if isinstance(kind, str) and kind in FORMS:
        return blocks_of(dtype, kind, *shape, normed=normed)
    if isinstance(kind, str):
        code, group = kind.split()
        scales = meta_tensor(BF16, (*experts, n, k // int(group)))
        zeros = meta_tensor(torch.uint8, scales.shape) if code == "int4" else None
        width = k // 2 if code in ("int4", "e2m1") else k
        codes = meta_tensor(torch.uint8, (*experts, n, width))
        columns = of(dtype, k) if normed else None
        return TiledWeight(code, codes, scales, zeros, int(group), columns, torch.Size(shape))  # type: ignore[arg-type]
    scales = meta_tensor(F32, (*experts, n, 1))
    columns = of(dtype, k) if normed else None
    codes = meta_tensor(kind, shape)
    return TiledWeight("int8", codes, scales, None, 0, columns, torch.Size(shape))


def blocks_of(dtype: torch.dtype, kind: str, *shape: int, normed: bool = False) -> TiledWeight:
    """Return a weight [..., N, K] of a GGUF type's blocks, as `tile_weight` lays them out."""
    k = shape[-1]
    spec = FORMS[kind]
    assert spec.group is not None
    parts = dict.fromkeys(spec.columns_per_parameter)

    def part(name: str, columns: int, dtype: torch.dtype) -> Tensor | None:
        return meta_tensor(dtype, (*shape[:-1], columns)) if name in parts else None

    scale_dtype = torch.float16 if spec.scales == "float16" else torch.uint8
    codes = meta_tensor(torch.uint8, (*shape[:-1], k // 2 if spec.is_paired else k))
    scales = part("scales", k // spec.group, scale_dtype)
    assert scales is not None
    return tile_weight(
        GroupedWeight(
            spec.kind,
            codes,
            scales,
            None,
            spec.group,
            of(dtype, k) if normed else None,
            minima=part("minima", k // spec.group, scale_dtype),
            factors=part("factors", k // SUPER_BLOCK, F16),
            minimum_factors=part("minimum_factors", k // SUPER_BLOCK, F16),
        )
    )


def dense(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    rows: int = 4,
    kind: Kind = None,
    act: Activation = SILU,
    ops: Kernels = OPS,
) -> Launches:
    """Return a layer's products; `sizes` are the stream's, qkv's, attention's and the MLP's."""
    hidden, qkv, out, inner = sizes

    def weight(n: int, k: int, normed: bool = False) -> AnyWeight:
        return weight_of(dtype, kind, n, k, normed=normed)

    def onto(k: int) -> Any:
        return ops.linear(
            of(dtype, rows, k), weight(hidden, k), None, residual=of(dtype, rows, hidden)
        )

    squares = of(F32, rows, hidden // (64 if hidden >= 2048 else 32))
    x = of(dtype, rows, hidden)
    norm = Norm(squares, 1e-6)
    code = kind if kind is None or isinstance(kind, str) else NAMES[kind]
    name = "_".join(filter(None, (name, code, NAMES[dtype])))
    return {
        f"out_{name}": lambda: onto(out),
        f"down_{name}": lambda: onto(inner),
        f"qkv_{name}": lambda: ops.linear(x, weight(qkv, hidden, True), None, None, norm),
        **(
            {f"chunk_{name}": lambda: ops.linear(x, weight(qkv, hidden), None, chunk=True)}
            if kind
            else {}
        ),
        name: lambda: ops.norm_gate_up(
            x=x,
            weight=weight(2 * inner, hidden, True),
            bias=None,
            workspace=None,
            norm=norm,
            act=act,
        ),
    }


def head(name: str, dtype: torch.dtype, rows: int = 4, ops: Kernels = OPS) -> Launches:
    """Return an 8B model's head: its logits, its draw, and the draw of a head with some ids
    only."""
    x = of(dtype, rows, 4096)
    table = of(dtype, VOCAB, 4096)
    slots = of(I64, rows)
    draw = Draw(seed=slots, first=slots, step=1, temperature=of(F32, rows), usable_vocab=VOCAB)
    return {
        f"logits_{name}": lambda: ops.head_logits(x, table),
        f"sample_{name}": lambda: ops.head_sample(x, table, draw),
        f"sample_ids_{name}": lambda: ops.head_sample(x, table, draw, of(I64, VOCAB)),
    }


def products() -> Launches:
    """Return products of an 8B and a 0.6B model, the 8B's also in eight bits, for 64 rows, and its
    head."""
    big = (4096, 6144, 4096, 12288)
    cases: Launches = {}
    for dtype in (BF16, F16):
        layers = dense("8b", dtype, big) | dense("0.6b", dtype, (1024, 4096, 2048, 3072))
        cases |= layers | head(f"8b_{NAMES[dtype]}", dtype)
    for kind in (None, torch.int8):
        cases |= dense("8b", BF16, big, kind=kind) | dense(
            name="8b_wide", dtype=BF16, sizes=big, rows=64, kind=kind, ops=WIDE
        )
    for code in (*CODED, *FORMS):
        cases |= dense("8b", BF16, big, kind=code)
    for code in FORMS:
        table = blocks_of(BF16, code, VOCAB, 4096)
        cases[f"rows_8b_{code}"] = partial(OPS.code_rows, of(I64, 4), table, BF16)
    cases |= head("8b_wide_bf16", BF16, 64, WIDE)
    cases["gelu_9b_bf16"] = dense("9b", BF16, (3584, 8192, 4096, 14336), act=GELU)["9b_bf16"]
    limited = Activation("silu", 16.0)
    cases["limited_step_bf16"] = dense("step", BF16, (4096, 8192, 4096, 11264), act=limited)[
        "step_bf16"
    ]
    x = of(BF16, 4, 4096)
    norm = of(BF16, 4096)
    return cases | {
        "8b": lambda: OPS.embed(of(I64, 4), of(BF16, VOCAB, 4096)),
        "norm_8b": lambda: OPS.rms_norm_rows(x, of(F32, 4, 64), norm, 1e-6),
        "9b": lambda: OPS.norm_residual(of(BF16, 4, 3584), of(F32, 3584), 1e-6, of(BF16, 4, 3584)),
    }


def attention() -> Launches:
    """Return attention of an 8B model, of Gemma 2 and 4's layers, and of DeepSeek-V3's latents."""
    positions = of(I64, 16, 5)
    table = of(I64, 16, 64)
    windows = Windows(positions, of(BOOL, 16, 5), table, (), ())
    chunk = Windows(of(I64, 1, 80), of(BOOL, 1, 80), table[:1], (), (), 64)
    cases: Launches = {}

    def pools_of(dtype: torch.dtype, kv_heads: int, size: int, rounded: bool) -> Pools:
        pool = of(torch.int8 if rounded else dtype, 99, 64, kv_heads, size)
        scales = of(F16, 99, 64, kv_heads)
        return (pool, pool, scales, scales) if rounded else (pool, pool)

    def attend(
        dtype: torch.dtype,
        heads: AttentionHeads,
        softcap: float | None,
        sinks: bool = False,
        windows: Windows = windows,
        rounded: bool = False,
    ) -> None:
        sink = of(F32, heads.num_heads) if sinks else None
        scores = AttentionParams(0.1, heads.sliding[0], softcap, sink)
        heads = replace(heads, rounded=rounded)
        plan = OPS.plan_attention(windows, heads, 64, dtype)
        pools = pools_of(dtype, heads.num_kv_heads, heads.head_dim, rounded)
        query = of(dtype, 16, 5, heads.num_heads, heads.head_dim)
        OPS.paged_attention(query, pools, plan, scores)
        plan = OPS.plan_attention(chunk, heads, 64, dtype)
        OPS.paged_attention(query.flatten(0, 1)[None], pools, plan, scores)

    def rotate_attend(
        dtype: torch.dtype,
        heads: AttentionHeads,
        softcap: float | None = None,
        normed: bool = False,
        sinks: bool = False,
        rounded: bool = False,
    ) -> None:
        size = heads.head_dim
        total = heads.num_heads + 2 * heads.num_kv_heads
        weight = of(dtype, heads.num_heads + heads.num_kv_heads, size) if normed else None
        sink = of(F32, heads.num_heads) if sinks else None
        turn = of(F32, 4096, size)
        OPS.rotary_attention(
            qkv=of(dtype, 16, 5, total * size),
            rows=RotatedRows(turn, turn, positions.view(-1), positions.view(-1)),
            qk_weight=weight,
            epsilon=1e-6,
            pools=pools_of(dtype, heads.num_kv_heads, size, rounded),
            plan=OPS.plan_attention(windows, replace(heads, rounded=rounded), 64, dtype),
            params=AttentionParams(0.1, heads.sliding[0], softcap, sink),
        )

    def store(dtype: torch.dtype, weight: Tensor | None, rounded: bool = False) -> None:
        turn = of(dtype, 4096, 128)
        rows = RotatedRows(turn, turn, of(I64, 4), of(I64, 4))
        OPS.rotary_store(
            qkv=of(dtype, 4, 6144),
            rows=rows,
            qk_weight=weight,
            epsilon=1e-6,
            pools=pools_of(dtype, 8, 128, rounded),
            num_heads=32,
        )

    def latent(dtype: torch.dtype, rounded: bool = False, count: int = 128) -> None:
        pool = of(torch.int8 if rounded else dtype, 99, 64, 576)
        scales = of(F16, 99, 64, 2) if rounded else None
        query = of(dtype, 80, count, 576)
        turn = of(F32, 4096, 64)
        query_rope = of(dtype, 80, count, 192)[..., 128:]
        latents = of(dtype, 80, 2112)[:, 1536:]
        rows = RotatedRows(turn, turn, positions.view(-1), positions.view(-1))
        OPS.latent_store(
            query=query_rope,
            latent=latents,
            rows=rows,
            norm=of(dtype, 512),
            epsilon=1e-6,
            pages=pool,
            scales=scales,
        )
        heads = AttentionHeads(count, 1, 512, rounded=rounded)
        plan = OPS.plan_attention(windows, heads, 64, dtype)
        attend_latents = partial(OPS.mla_attention, pages=pool, rank=512, scale=0.1, scales=scales)
        attend_latents(query=query.view(16, 5, count, 576), plan=plan)
        plan = OPS.plan_attention(chunk, heads, 64, dtype)
        attend_latents(query=query[None], plan=plan)

    for dtype, name in ((BF16, "bf16"), (F16, "fp16")):
        gemma = AttentionHeads(8, 4, 256, sliding=(4096,))
        cases[name] = partial(attend, dtype, AttentionHeads(32, 8, 128), None)
        cases[f"sliding_{name}"] = partial(attend, dtype, gemma, 50.0)
        cases[f"wide_{name}"] = partial(attend, dtype, AttentionHeads(16, 2, 512), None)
        cases[f"rotary_{name}"] = partial(
            rotate_attend, dtype, AttentionHeads(32, 8, 128), normed=True
        )
        cases[f"rotary_sliding_{name}"] = partial(rotate_attend, dtype, gemma, 50.0)
        cases[f"rotary_wide_{name}"] = partial(rotate_attend, dtype, AttentionHeads(16, 2, 512))
        cases[f"plain_{name}"] = partial(store, dtype, None)
        cases[f"normed_{name}"] = partial(store, dtype, of(dtype, 256))
        cases[f"latent_{name}"] = partial(latent, dtype)
        for side, a, b in (("in", 128, 512), ("out", 512, 128)):
            cases[f"{side}_{name}"] = partial(
                OPS.head_linear, of(dtype, 80, 128, a), of(dtype, 128, a, b)
            )
    oss = AttentionHeads(64, 8, 64, sliding=(128,))
    blocks = replace(windows, last=positions)
    drafter = AttentionHeads(32, 8, 128, sliding=(2048,), sees_block=True)
    cases["sliding_block_bf16"] = partial(attend, BF16, drafter, None, windows=blocks)
    wide_round = Windows(of(I64, 1024, 5), of(BOOL, 1024, 5), of(I64, 1024, 64), (), ())
    plain = AttentionHeads(32, 8, 128)
    cases["many_slots"] = partial(OPS.plan_attention, wide_round, plain, 64, BF16)
    cases["latent_lite_bf16"] = partial(latent, BF16, count=16)
    cases["sinks_bf16"] = partial(attend, BF16, oss, None, sinks=True)
    cases["rotary_sinks_bf16"] = partial(rotate_attend, BF16, oss, sinks=True)
    cases["plain_rotary_bf16"] = partial(rotate_attend, BF16, plain)
    # A cache in eight bits.
    rounded = partial(attend, BF16, rounded=True)
    cases["i8_bf16"] = partial(rounded, AttentionHeads(32, 8, 128), None)
    cases["sliding_i8_bf16"] = partial(rounded, gemma, 50.0)
    cases["wide_i8_bf16"] = partial(rounded, AttentionHeads(16, 2, 512), None)
    cases["sinks_i8_bf16"] = partial(rounded, oss, None, sinks=True)
    rotated = partial(rotate_attend, BF16, rounded=True)
    cases["rotary_i8_bf16"] = partial(rotated, AttentionHeads(32, 8, 128), normed=True)
    cases["rotary_sliding_i8_bf16"] = partial(rotated, gemma, 50.0)
    cases["rotary_wide_i8_bf16"] = partial(rotated, AttentionHeads(16, 2, 512))
    cases["rotary_sinks_i8_bf16"] = partial(rotated, oss, sinks=True)
    cases["plain_i8_bf16"] = partial(store, BF16, None, rounded=True)
    cases["latent_i8_bf16"] = partial(latent, BF16, rounded=True)
    return cases


def experts() -> Launches:
    """Return layers of Qwen3-30B-A3B in bfloat16, of DeepSeek-V3 in FP8, and experts of other
    activations."""

    def layer(
        count: int,
        hidden: int,
        inner: int,
        groups: int,
        groups_kept: int,
        kind: Kind = None,
        act: Activation = SILU,
    ) -> None:
        x = of(BF16, 32, hidden)
        corrected = kind is not None
        rule = RouterConfig(
            per_token=8,
            sigmoid=corrected,
            has_correction=corrected,
            normalised=True,
            scale=1.0,
            groups=groups,
            top_groups=groups_kept,
            experts_per_group_score=2,
        )
        parts = OPS.router_logits(x, of(F32, count, hidden))
        ids, weights = OPS.route(parts, of(F32, count) if corrected else None, rule)
        gate_up = weight_of(BF16, kind, count, (1 + act.gated) * inner, hidden)
        expert_weights = ExpertWeights(gate_up, weight_of(BF16, kind, count, hidden, inner), act)
        if act.kind == "swiglu":
            expert_weights = expert_weights._replace(
                gate_up_bias=of(F32, count, 2 * inner), down_bias=of(F32, count, hidden)
            )
        OPS.experts(x, ids, weights, expert_weights, x)

    cases: Launches = {"30b": partial(layer, 128, 2048, 768, 1, 1)}
    cases["v3"] = partial(layer, 256, 7168, 2048, 8, 4, kind="e4m3 128")
    for code in (*CODED, *FORMS):
        cases[f"30b_{code}"] = partial(layer, 128, 2048, 768, 1, 1, kind=code)
    swiglu = Activation("swiglu", 7.0, 1.702)
    limited = Activation("silu", 7.0)
    shapes = {
        "oss": (32, 2880, 2880, swiglu),
        "gemma": (128, 2816, 704, GELU),
        "step": (288, 4096, 1280, limited),
        "nemotron": (128, 2688, 1856, RELU2),
    }
    for name, (count, hidden, inner, act) in shapes.items():
        cases[name] = partial(layer, count, hidden, inner, 1, 1, act=act)
    cases["oss_e2m1"] = partial(layer, 32, 2880, 2880, 1, 1, kind="e2m1 32", act=swiglu)
    cases["nemotron_int4"] = partial(layer, 128, 2688, 1856, 1, 1, kind="int4 32", act=RELU2)
    return cases


def draws() -> Launches:
    """Return sampling and verification over an 8B vocabulary, with all steps and with the
    fewest."""
    case = random_case(slots=2, k=3, vocab=64, seed=0, device="cpu")
    wide = {"bias": F32, "in_prompt": BOOL, "generated": torch.int32}
    other: dict[str, Any] = {name: of(dtype, 2, VOCAB) for name, dtype in wide.items()}
    other |= {
        "mask": of(torch.int32, 2, 4, VOCAB // 32),
        "stop_ids": of(I64, 2, 24),
        "usable_vocab": VOCAB,
    }
    tensors = replace(map_tensors(case.tensors, lambda tensor: tensor.to("meta")), **other)
    logits = of(F32, 2, 4, VOCAB)
    draft = of(I64, 2, 3)
    positions = of(I64, 2, 4)
    cases: Launches = {
        name: partial(OPS.sample_rows, logits, draft, positions, with_steps(tensors, steps))
        for name, steps in (
            ("greedy", replace(PLAIN, noise=False)),
            ("noise", PLAIN),
            ("truncated", replace(PLAIN, truncation=True)),
            ("every_step", replace(EVERY_STEP, truncation=False)),
            ("every_step_truncated", EVERY_STEP),
        )
    }
    for name, steps in (("plain", PLAIN), ("truncated", EVERY_STEP)):
        cases[f"law_{name}"] = partial(
            OPS.row_distributions, logits, draft, with_steps(tensors, steps)
        )
    for law, probabilities in (("sampled", of(F32, 2, 3, VOCAB)), ("one_hot", None)):
        for rule in ("rejection", "block"):
            cases[f"{rule}_{law}"] = partial(
                OPS.verify_drafts,
                logits,
                probabilities,
                draft,
                num_drafts=of(I64, 2),
                seed=of(I64, 2),
                positions=positions,
                by_block=rule == "block",
            )
    return cases


def rounds() -> Launches:
    """Return the kernels around forward passes: plain decoding, a common and the widest window."""

    def state(width: int = 4096) -> RoundState:
        """Return the state of four slots."""
        return RoundState(slots=4, max_len=width - 32, max_draft=31, pages=64, device="meta")

    slots = of(I64, 4)
    paging = Paging(64, 4096, 64)
    s = state()
    generated = of(torch.int32, 4, VOCAB)
    cases: Launches = {}

    def commit(k: int, counts: Tensor | None, accepted: Tensor | None) -> None:
        token_ids = of(I64, 4, k + 1)
        valid = of(BOOL, 4, k + 1)
        window = RoundWindow(
            token_ids,
            positions=of(I64, 4, k + 1),
            valid=valid,
            kv_slots=of(I64, 4, k + 1),
            draft=of(I64, 4, k),
            num_drafts=slots,
        )
        OPS.round_commit(
            state=s,
            window=window,
            sampled=token_ids,
            finite=valid,
            accepted=accepted,
            generated=counts,
        )

    def pairs(size: int, keeps_state: bool) -> None:
        norm = of(BF16, size)
        states = HeadStates(of(BF16, 4, 9, size), 8)
        two = of(I64, 4, 2)
        batch = SimpleNamespace(positions=slots, width=1, states=states)
        OPS.head_input(
            token_ids=slots,
            table=of(BF16, VOCAB, size),
            batch=batch,
            norms=PairNorms(norm, norm, 1e-6),
            keeps_state=keeps_state,
        )
        rows = Rows(two, two, of(BOOL, 4, 2), two)
        OPS.keep_states(
            hidden=of(BF16, 4, 2, size),
            rows=rows,
            rings=states.rings,
            page_states=of(BF16, 99, size),
            page_size=64,
        )

    for k in (0, 7, 31):
        cases[f"{k + 1}"] = partial(OPS.round_window, s, k, paging, VOCAB)
    cases["commit_1"] = partial(commit, 0, None, None)
    cases["commit_8"] = partial(commit, 7, None, None)
    cases["commit_8_counted_given"] = partial(commit, 7, generated, slots)
    cases["commit_32_counted"] = partial(commit, 31, generated, None)
    for size in (4096, 7168):
        for keeps in (False, True):
            cases[f"{size}{'_kept' * keeps}"] = partial(pairs, size, keeps)
    for width in (2048, 32768):
        cases[f"lookup_{width}"] = partial(OPS.ngram_lookup, state(width), 8, 3, 8, 0, True)
    pool = TextPool(of(I64, 131072), of(torch.int32, 32768, 8))
    cases["pool"] = partial(OPS.pool_lookup, state(2048), pool, 8, 3, 8)
    cases["two"] = partial(OPS.committed_window, s, 2, s.active, paging, None)
    cases["many"] = partial(OPS.committed_window, s, 17, s.active, paging, slots)
    cases["draft"] = partial(OPS.draft_step, s, of(I64, 4, 1), 0, 8, paging)
    cases["end"] = partial(OPS.mark_time, s.times, s.counter, ENDED, True)
    return cases


def recurrent() -> Launches:
    """Return recurrent layers as in Qwen3.5 9B (32 value heads, 16 key heads of 128), and in odd
    sizes."""
    cases: Launches = {}
    rows = Segments(of(I64, 5, 4), of(I64, 16))

    def read(mixed: Tensor, gates: Tensor, sizes: tuple[int, ...], corrects: bool) -> None:
        heads, key_heads, width, size = sizes
        memory = DeltaMemory(
            state=of(F32, 16, heads, width, size),
            keys=of(F32, 16, 48, key_heads, width),
            updates=of(F32, 16, 48, heads, size),
            gates=of(F32, 16, 48, heads, 2),
        )
        for operation in (OPS.delta_rule, OPS.delta_chunks):
            operation(
                mixed, gates, DeltaRule(of(F32, heads), of(F32, heads), corrects), memory, rows
            )

    def layer(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
        heads, key_heads, width, size = sizes
        channels = 2 * key_heads * width + heads * size
        inputs = of(dtype, 20, channels + heads * size)
        ring = of(dtype, 16, 48, channels)
        mixed = inputs[:, :channels]
        bias = of(F32, channels)
        OPS.short_conv(x=mixed, weight=of(F32, 4, channels), bias=None, ring=ring, rows=rows)
        OPS.short_conv(
            x=of(dtype, 20, channels),
            weight=of(F32, 3, channels),
            bias=bias,
            ring=ring,
            rows=rows,
            silu=False,
        )
        read(of(F32, 20, channels), of(dtype, 20, 2 * heads), sizes, True)
        OPS.gated_norm(of(F32, 20, heads, size), inputs[:, channels:], of(F32, size), 1e-6)

    def scan(dtype: torch.dtype) -> None:
        """Launch the scan of Granite 4.0 H Tiny: 48 heads of 64 in one group, whose states are 128
        wide."""
        read(of(F32, 20, 2 * 128 + 48 * 64), of(dtype, 20, 48), (48, 1, 128, 64), False)
        OPS.gated_norm(
            x=of(F32, 20, 1, 3072),
            gate=of(dtype, 20, 3072),
            weight=of(F32, 1, 3072),
            epsilon=1e-6,
            gate_first=True,
        )

    for dtype in (BF16, F16):
        cases[f"mamba_{NAMES[dtype]}"] = partial(scan, dtype)
        for name, sizes in (("9b", (32, 16, 128, 128)), ("odd", (6, 2, 48, 40))):
            cases[f"{name}_{NAMES[dtype]}"] = partial(layer, dtype, sizes)
    return cases


def launches(capability: tuple[int, int]) -> Launches:
    """Return every case on a device of this capability."""
    return products() | attention() | experts() | draws() | rounds() | recurrent()
