"""Routing and experts in every form: against loops over rows, ties, NaN, and rows that stay
apart."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spd.formats.gguf.block_types import TYPES_BY_NAME
from spd.kernels.experts import moe
from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.few_bits import quantize_int8
from spd.kernels.linear.tiled_weight import tile_weight
from spd.kernels.native.packed import PackedWeight
from spd.runtime.models.gguf_forms import FORMS
from tests.kernels.forms import (
    ACTS,
    EVERY,
    ROUNDED,
    Form,
    apply_activation,
    normal,
    parametrize_forms,
)
from tests.kernels.gguf_cases import drawn_blocks, grouped
from tests.kernels.skinny_cases import drawn

# -- routing -------------------------------------------------------------------------------------------

FIELDS = (
    "per_token",
    "groups",
    "top_groups",
    "experts_per_group_score",
    "sigmoid",
    "normalised",
    "weight_epsilon",
    "scale",
)
RULES = [
    (2, 1, 1, 1, False, True, 1e-20, 1.0),
    (3, 1, 1, 1, True, False, 1e-20, 2.5),
    (4, 4, 2, 2, True, True, 0.25, 1.5),
    (3, 4, 3, 1, False, False, 1e-20, 16.0),
]
"""Of plain softmax and sigmoid gates, and as DeepSeek-V3 and V2 choose groups first."""
SMALLEST: list[tuple[Any, int, int, int]] = [
    ((1, 1, 1, 1, False, True, 1e-20, 1.0), 1, 1, 1),
    ((2, 1, 1, 1, True, False, 1e-20, 2.5), 2, 33, 1),
    ((1, 3, 1, 1, True, True, 1e-6, 1.0), 3, 7, 2),
    ((3, 3, 2, 2, False, False, 1e-20, 16.0), 9, 257, 1),
]
ROUTED = [(rule, *sizes) for rule in RULES for sizes in ((12, 40, 1), (16, 300, 40))] + SMALLEST
"""(rule, experts, K, T): few experts and odd sizes too."""


def rule_of(values: tuple[Any, ...]) -> Any:
    return SimpleNamespace(**dict(zip(FIELDS, values, strict=True)))


def by_hand(rule: Any, logits: Tensor, correction: Tensor | None) -> tuple[list[int], list[float]]:
    """Compute experts and weights of one row in plain Python."""
    values = logits.double()
    size = len(logits) // rule.groups
    scores = (values.sigmoid() if rule.sigmoid else values.softmax(0)).tolist()
    added = [0.0] * len(scores) if correction is None else correction.tolist()
    choice = [s + c for s, c in zip(scores, added, strict=True)]
    groups = [list(range(g * size, (g + 1) * size)) for g in range(rule.groups)]
    worth = [
        sum(sorted((choice[e] for e in group), reverse=True)[: rule.experts_per_group_score])
        for group in groups
    ]
    kept_groups = sorted(range(len(groups)), key=lambda g: (-worth[g], g))[: rule.top_groups]
    allowed = [e for g in kept_groups for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: rule.per_token]
    total = sum(scores[e] for e in chosen) + rule.weight_epsilon if rule.normalised else 1.0
    return chosen, [scores[e] / total * rule.scale for e in chosen]


@pytest.mark.parametrize(
    ("form", "rule", "count", "k", "rows", "corrected"),
    parametrize_forms(
        [(*row, corrected) for row in ROUTED for corrected in (False, True)],
        (1, 3, 8, 12, 15, 18, 21, 23),
    ),
    indirect=["form"],
    ids=str,
)
def test_routing_equals_its_definition(
    form: Form, rule: tuple[Any, ...], count: int, k: int, rows: int, corrected: bool
) -> None:
    """The experts of a loop in their order, weights in float32.

    A row alone is the row among others.
    """
    routing = rule_of(rule)
    dtype = form.dtypes[-1]
    x = normal(rows, k, seed=rows).to(form.device, dtype)
    weight = (normal(count, k, seed=k) / k**0.5).to(form.device)
    correction = normal(count, seed=count).to(form.device) * 0.4 if corrected else None
    logits = form.ops.router_logits(x, weight)
    torch.testing.assert_close(logits.sum(1), F.linear(x.float(), weight), rtol=1e-5, atol=1e-5)
    ids, weights = form.ops.route(logits, correction, routing)
    plain = 0
    for row in range(rows):
        expected, shares = by_hand(routing, logits[row].sum(0), correction)
        assert ids[row].tolist() == expected
        torch.testing.assert_close(weights[row].tolist(), shares, rtol=2e-5, atol=1e-6)
        plain += by_hand(routing, logits[row].sum(0), None)[0] == expected
    assert corrected == (plain < rows) or rows < 9 or count == 1, "the correction chooses"
    for row in {0, rows // 2, rows - 1}:
        alone = form.ops.router_logits(x[row : row + 1], weight)
        if form.name != "torch":
            assert torch.equal(alone[0], logits[row])
        row_ids, share = form.ops.route(logits[row : row + 1], correction, routing)
        # Torch's own sigmoid of a few numbers is not that of many, where vectors are as wide as
        # AVX512's.
        same = torch.allclose if form.name == "torch" else torch.equal
        assert torch.equal(row_ids[0], ids[row]) and same(share[0], weights[row])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ties_go_to_the_lowest_expert_and_nonsense_stays_in_range(
    form: Form, rule: tuple[Any, ...]
) -> None:
    """Equal scores, NaN everywhere and in one expert, infinities that win and that all have."""
    routing = rule_of(rule)
    logits = normal(6, 1, 12, seed=1).to(form.device)
    logits[0], logits[1], logits[2, 0, 7] = 1.0, float("nan"), float("nan")
    logits[3, 0, :6], logits[4, 0, 2:] = float("inf"), float("-inf")
    ids, weights = form.ops.route(logits, torch.zeros(12, device=form.device), routing)
    expected, shares = moe.route(logits, torch.zeros(12, device=form.device), routing)
    for row in (0, 5):
        assert ids[row].tolist() == by_hand(routing, logits[row, 0], None)[0]
        torch.testing.assert_close(weights[row], shares[row], rtol=2e-5, atol=1e-6)
    assert ids[0].tolist() == list(range(routing.per_token))
    for chosen in ids.tolist():
        assert len(set(chosen)) == routing.per_token and set(chosen) <= set(range(12))
    if form.native:
        assert torch.equal(ids[2], expected[2])
    assert shares[1].isnan().all() and shares[[0, 5]].isfinite().all()


# -- experts -------------------------------------------------------------------------------------------


def prepared(form: Form, expert_weights: moe.ExpertWeights) -> moe.ExpertWeights:
    """Convert weights to the form's layout."""

    def converted(weight: Any, gated: bool = False) -> Any:
        if form.native:
            return form.ops.pack(weight, gated=gated)
        return weight if isinstance(weight, Tensor) else tile_weight(weight)

    return expert_weights._replace(
        gate_up=converted(expert_weights.gate_up, expert_weights.act.gated),
        down=converted(expert_weights.down),
    )


def stacked(kind: str, count: int, n: int, k: int, device: str, dtype: torch.dtype) -> Any:
    """Return matrices in the dtype, in int8 by rows, of any codes by "kind group", or of a GGUF
    type's blocks."""
    if kind in FORMS:
        blocks = grouped(kind, drawn_blocks(kind, count * n, k), count * n).as_experts(count)
        return blocks.map_tensors(lambda part: part.to(device))
    wide = normal(count, n, k, seed=n + k) / k**0.5
    if kind == "plain":
        return wide.to(device, dtype)
    code, group = kind.split() if " " in kind else (kind, "0")
    coded = (
        drawn(code, n, k, int(group), code == "int4", count=count)
        if group != "0"
        else quantize_int8(wide)
    )
    return coded.map_tensors(lambda part: part.to(device))


def widened(expert_weights: moe.ExpertWeights, dtype: torch.dtype) -> moe.ExpertWeights:
    return expert_weights._replace(
        gate_up=plain_matrices(expert_weights.gate_up, dtype),
        down=plain_matrices(expert_weights.down, dtype),
    )


def plain_matrices(matrices: moe.ExpertMatrices, dtype: torch.dtype) -> Tensor:
    assert not isinstance(matrices, PackedWeight)
    return matrices.to(dtype) if isinstance(matrices, Tensor) else matrices.plain(dtype)


def by_definition(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: moe.ExpertWeights
) -> Tensor:
    """Compute experts in float64, one row and one expert after another."""
    gate_up = expert_weights.gate_up
    down = expert_weights.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, place in itertools.product(range(x.shape[0]), range(ids.shape[1])):
        expert = ids[row, place]
        both = gate_up[expert].double() @ x[row].double()
        result = down[expert].double()
        shifts = [
            0.0 if bias is None else bias[expert]
            for bias in (expert_weights.gate_up_bias, expert_weights.down_bias)
        ]
        out[row] += weights[row, place].double() * (
            result @ apply_activation(both + shifts[0], expert_weights.act) + shifts[1]
        )
    return out


def routed(rows: int, count: int, per_token: int, device: str) -> tuple[Tensor, Tensor]:
    """Return ids and weights: more rows than a tile choose the first expert, none the last of
    several."""
    ids = normal(rows, max(per_token, count - 1), seed=3).argsort(-1)[:, :per_token].to(device)
    ids[:, 0] = torch.where(ids[:, 1:].eq(0).any(-1), ids[:, 0], 0)
    return ids.contiguous(), normal(rows, per_token, seed=4).abs().to(device)


SIZES = [
    (5, 48, 32, 1, 2),
    (4, 144, 80, 23, 3),
    (2, 1, 1, 1, 1),
    (3, 33, 7, 3, 2),
    (6, 256, 64, 70, 3),
    (32, 96, 32, 7, 8),
]
EXPERTS = [
    *(("plain", SILU, *sizes) for sizes in SIZES),
    *(("int8", SILU, *SIZES[i]) for i in (1, 3)),
]
EXPERTS += [(f"{code} 32", SILU, 3, 64, 32, 9, 2) for code in ("int4", "e2m1", "int8")]
EXPERTS += [("plain", act, *SIZES[1]) for act in ACTS[1:]] + [
    ("int8", act, *SIZES[3]) for act in ACTS[1:]
]
"""With biases where the activation is gpt-oss's."""
IN_LANE: tuple[int, ...] = (1, 6, 8, 9, 12, 17)
BLOCKS = [
    (name, SILU, 2, *((256, 256) if TYPES_BY_NAME[name].elements == 256 else (64, 96)), 3, 2)
    for name in FORMS
]
IN_LANE += tuple(len(EXPERTS) + [*FORMS].index(name) for name in ("Q4_0", "Q8_0"))
EXPERTS += BLOCKS


@pytest.mark.covers(count=124)
@pytest.mark.parametrize(
    ("form", "kind", "act", "count", "k", "n", "rows", "per_token"),
    parametrize_forms(EXPERTS, IN_LANE, *EVERY[1:]),
    indirect=["form"],
    ids=str,
)
def test_experts_equal_their_definition(
    form: Form, kind: str, act: Activation, count: int, k: int, n: int, rows: int, per_token: int
) -> None:
    """The weighed sum of what they make of their rows, onto the stream.

    A row's bits are its own.
    """
    if form.native and (k % 8 or n % 8):
        pytest.skip("the C kernels take whole vectors")
    if form.name == "triton" and (rows * k > 4000 or count > 8):
        pytest.skip("the interpreter is slow")
    for dtype in form.types(count):
        gate_up = stacked(
            kind=kind, count=count, n=(1 + act.gated) * n, k=k, device=form.device, dtype=dtype
        )
        expert_weights = moe.ExpertWeights(
            gate_up, stacked(kind=kind, count=count, n=k, k=n, device=form.device, dtype=dtype), act
        )
        if act.kind == "swiglu":
            expert_weights = expert_weights._replace(
                gate_up_bias=normal(count, 2 * n, seed=2 * n).to(form.device),
                down_bias=normal(count, k, seed=k).to(form.device),
            )
        x, stream = (normal(rows, k, seed=s).to(form.device, dtype) for s in (1, 2))
        ids, weights = routed(rows, count, per_token, form.device)
        right = by_definition(x, ids, weights, widened(expert_weights, torch.float32))
        onto = right + stream.double()
        # C's has no squares
        prepared_layer = prepared(form, expert_weights)
        results = 2 - form.native

        def run(
            x: Tensor,
            ids: Tensor,
            weights: Tensor,
            stream: Tensor,
            prepared_weights: Any = prepared_layer,
            results: int = results,
        ) -> tuple[Tensor, ...]:
            return form.ops.experts(x, ids, weights, prepared_weights, stream)[:results]

        if form.native:  # what is inside is rounded before the second product
            allowed = 3 * ROUNDED * onto.abs().max()
        else:
            plain, _ = moe.experts(x, ids, weights, widened(expert_weights, dtype))
            allowed = 2 * (plain.double() - right).abs().max()
            allowed += 8 * torch.finfo(dtype).eps * (1 + right.abs().max())
            result, none = form.ops.experts(x, ids, weights, prepared_layer)
            assert none is None
            assert result.dtype == dtype and (result.double() - right).abs().max() <= allowed
        with_stream = run(x, ids, weights, stream)
        assert (with_stream[0].double() - onto).abs().max() <= allowed
        if not form.native:
            torch.testing.assert_close(
                with_stream[1].sum(-1), with_stream[0].float().square().sum(-1)
            )
        backwards = torch.arange(rows - 1, -1, -1, device=form.device)
        parts = [torch.tensor([row], device=form.device) for row in {0, rows // 2, rows - 1}]
        for part in (*parts, torch.arange(rows // 2 + 1, device=form.device), backwards):
            some = run(x[part], ids[part], weights[part], stream[part])
            assert all(torch.equal(a, b[part]) for a, b in zip(some, with_stream, strict=True))
        same = torch.arange(per_token, device=form.device).expand_as(ids).contiguous()
        crowd = run(x, same, weights, stream)
        alone = run(x[:1], same[:1], weights[:1], stream[:1])
        assert torch.equal(crowd[0][:1], alone[0])


# -- torch's two ways --------------------------------------------------------------------------------


def case(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    x = normal(32, 40, seed=seed)
    ids = normal(32, 6, seed=seed + 10).argsort(-1)[:, :2]
    return x.to(dtype), ids, normal(32, 2, seed=seed + 20).abs()


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_where_others_go(chunk: bool, dtype: torch.dtype) -> None:
    """Each row among strangers, at every place of as many rows: the same bits.

    Which numbers of rows agree with each other is the processor's affair, tried when a model is
    loaded. A row of NaN stays alone; an expert that overflows spoils only its own rows: small
    experts are computed for every row, and what is not chosen must not be seen.
    """
    gate_up = 0.2 * normal(6, 48, 40, seed=7).to(dtype)
    expert_weights = moe.ExpertWeights(gate_up, 0.2 * normal(6, 40, 24, seed=7).to(dtype))

    def way(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.experts(x, ids, weights, expert_weights, chunk=chunk)[0]

    x, ids, weights = case(dtype)
    full_result = way(x, ids, weights)
    expected_rows = {(32, row): full_result[row] for row in range(0, 32, 5)}
    for rows, seed in itertools.product((4, 8, 16, 32), (1, 2, 3)):
        other_rows = case(dtype, seed)
        for row in range(0, 32, 5):
            place = (row + seed) % rows
            mixed_x, mixed_ids, mixed_weights = (theirs[:rows].clone() for theirs in other_rows)
            mixed_x[place] = x[row]
            mixed_ids[place] = ids[row]
            mixed_weights[place] = weights[row]
            result = way(mixed_x, mixed_ids, mixed_weights)
            assert torch.equal(
                result[place], expected_rows.setdefault((rows, row), result[place])
            ), (
                rows,
                row,
            )
    wild = x.clone()
    keep = torch.arange(32) != 3
    wild[3] = float("nan")
    result = way(wild, ids, weights)
    assert bool(result[3].isnan().all()) and torch.equal(result[keep], full_result[keep])
    gate_up[5] = float("inf")
    result = way(x, ids, weights)
    chosen = (ids == 5).any(dim=1)
    assert bool(result[~chosen].isfinite().all()) and not bool(result[chosen].isfinite().any())
    assert 0 < int(chosen.sum()) < 32
