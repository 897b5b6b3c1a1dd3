"""Experts chosen and computed by kernels: as the torch form does, whoever else chose the same ones."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.experts import moe as reference
from spd.kernels.experts import moe_triton as twin
from spd.kernels.linear.eight_bits import block_scales, int8_rows
from spd.kernels.linear.skinny_linear import AnyWeight, ScaledWeight

RULES = [
    (2, 1, 1, 1, False, True, 1.0),
    (3, 1, 1, 1, True, False, 2.5),
    (4, 4, 2, 2, True, True, 1.5),
    (3, 4, 3, 1, False, False, 16.0),
]
FIELDS = ("per_token", "groups", "groups_kept", "group_best", "sigmoid", "normalised", "scale")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(form: Any, x: Tensor, weight: Tensor, correction: Tensor | None, *rule: Any) -> Any:
    given = SimpleNamespace(**dict(zip(FIELDS, rule, strict=True)))
    return form.route(form.router_logits(x, weight), correction, given)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("count", "k", "rows"), [(12, 40, 1), (16, 300, 19)])
def test_routing(rule: tuple, count: int, k: int, rows: int, device: str) -> None:
    x = normal(rows, k, seed=rows).to(device, torch.float16)
    weight = (normal(count, k, seed=k) / k**0.5).to(device)
    for correction in (None, normal(count, seed=count).to(device)):
        ids, weights = chosen(twin, x, weight, correction, *rule)
        right_ids, right = chosen(reference, x, weight, correction, *rule)
        assert torch.equal(ids, right_ids)
        torch.testing.assert_close(weights, right, rtol=2e-5, atol=1e-6)
        for row in {0, rows // 2, rows - 1}:
            alone = chosen(twin, x[row : row + 1], weight, correction, *rule)
            assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


@pytest.mark.parametrize(
    ("rule", "count", "k", "rows"),
    [
        ((1, 1, 1, 1, False, True, 1.0), 1, 1, 1),
        ((2, 1, 1, 1, True, False, 2.5), 2, 33, 1),
        ((1, 3, 1, 1, True, True, 1.0), 3, 7, 2),
        ((3, 3, 2, 2, False, False, 16.0), 9, 257, 1),
    ],
)
def test_routing_of_few_experts_and_odd_sizes(
    rule: tuple, count: int, k: int, rows: int, device: str
) -> None:
    x = normal(rows, k, seed=rows).to(device)
    weight, correction = normal(count, k, seed=k).to(device), normal(count, seed=count).to(device)
    ids, weights = chosen(twin, x, weight, correction, *rule)
    right_ids, right = chosen(reference, x, weight, correction, *rule)
    assert torch.equal(ids, right_ids)
    torch.testing.assert_close(weights, right, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_ties_go_to_the_lowest_expert_and_nonsense_stays_in_range(groups: int, device: str) -> None:
    x = torch.ones(3, 16, device=device)
    x[2] = float("nan")
    weight = torch.zeros(8, 16, device=device)
    ids, weights = chosen(twin, x, weight, None, 3, groups, max(1, groups // 2), 1, True, True, 1.0)
    assert ids[0].tolist() == ids[1].tolist() == [0, 1, 2]
    assert sorted(set(ids[2].tolist())) == sorted(ids[2].tolist()) and 0 <= ids.min() <= ids.max() < 8
    torch.testing.assert_close(weights[:2], torch.full((2, 3), 1 / 3, device=device))


def stacked(kind: str, count: int, n: int, k: int, device: str, dtype: torch.dtype) -> AnyWeight:
    wide = normal(count, n, k, seed=n + k) / k**0.5
    if kind == "plain":
        return wide.to(device, dtype)
    if kind == "int8":
        made = [int8_rows(one) for one in wide]
        values, scales = (torch.stack([getattr(m, name) for m in made]) for name in ("values", "scales"))
    else:
        inverse = 0.5 + normal(count, -(-n // 128), -(-k // 128), seed=k).abs()
        values = wide.to(torch.float8_e4m3fn)
        scales = torch.stack([block_scales(one, n) for one in inverse])
    return ScaledWeight(values.to(device), scales.to(device))


def by_definition(x: Tensor, ids: Tensor, weights: Tensor, gate_up: AnyWeight, down: AnyWeight) -> Tensor:
    wide = [w.plain(torch.float32) if isinstance(w, ScaledWeight) else w for w in (gate_up, down)]
    first, second = (w.double() for w in wide)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, place in itertools.product(range(x.shape[0]), range(ids.shape[1])):
        expert = ids[row, place]
        gate, up = (first[expert] @ x[row].double()).chunk(2)
        out[row] += weights[row, place].double() * (second[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
@pytest.mark.parametrize(
    ("count", "k", "n", "rows", "per_token"),
    [(5, 48, 32, 1, 2), (4, 144, 80, 23, 3), (2, 1, 1, 1, 1), (3, 33, 7, 3, 2)],
)
def test_experts(
    kind: str,
    count: int,
    k: int,
    n: int,
    rows: int,
    per_token: int,
    device: str,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """More rows than a tile choose one expert, and nobody another."""
    for dtype in dtypes:
        gate_up = stacked(kind, count, 2 * n, k, device, dtype)
        down = stacked(kind, count, k, n, device, dtype)
        x, stream = (normal(rows, k, seed=s).to(device, dtype) for s in (1, 2))
        ids = normal(rows, count - 1, seed=3).argsort(-1)[:, :per_token].to(device)
        ids[:, 0] = torch.where(ids[:, 1:].eq(0).any(-1), ids[:, 0], 0)
        weights = normal(rows, per_token, seed=4).abs().to(device)
        right = by_definition(x, ids, weights, gate_up, down)
        plain = [w.plain(dtype) if isinstance(w, ScaledWeight) else w for w in (gate_up, down)]
        slack = 8 * torch.finfo(dtype).eps * (1 + right.abs().max().item())
        allowed = 2 * (reference.experts(x, ids, weights, *plain).double() - right).abs().max().item() + slack
        made = twin.experts(x, ids, weights, gate_up, down)
        assert made.dtype == dtype and (made.double() - right).abs().max().item() <= allowed
        y, squares = twin.experts_onto(x, ids, weights, gate_up, down, stream)
        assert (y.double() - right - stream.double()).abs().max().item() <= allowed
        torch.testing.assert_close(squares.sum(-1), y.float().square().sum(-1))
        for row in {0, rows // 2, rows - 1}:
            one = slice(row, row + 1)
            case = (x[one], ids[one], weights[one], gate_up, down)
            alone, sums = twin.experts_onto(*case, stream[one])
            assert torch.equal(alone[0], y[row]) and torch.equal(sums[0], squares[row])
            assert torch.equal(twin.experts(*case)[0], made[row])
        shuffled = torch.arange(rows - 1, -1, -1, device=device)
        again = twin.experts(x[shuffled], ids[shuffled], weights[shuffled], gate_up, down)
        assert torch.equal(again[shuffled], made)
