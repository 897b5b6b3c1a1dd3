"""Routing and experts: against loops over rows, ties, NaN, and rows that do not see each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from spd.kernels.experts.moe import experts, gate_chosen, route, router_logits

RULES = {
    "deepseek_v3": {"groups": 4, "groups_kept": 2, "group_best": 2, "sigmoid": True, "normalised": True},
    "deepseek_v2": {"groups": 4, "groups_kept": 2, "group_best": 1, "sigmoid": False, "normalised": False},
    "softmax": {"groups": 1, "groups_kept": 1, "group_best": 1, "sigmoid": False, "normalised": True},
}
CORRECTED = ("deepseek_v3",)


def routed(name: str, x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor | None) -> tuple:
    logits = router_logits(x, weight)
    rule = SimpleNamespace(per_token=3, scale=2.5, **RULES[name])
    return route(logits, correction if name in CORRECTED else None, rule)


def by_hand(name: str, logits: list[float], correction: list[float]) -> list[tuple[int, float]]:
    """(expert, weight) of one row, in plain Python."""
    rule, size = RULES[name], len(logits) // RULES[name]["groups"]
    values = torch.tensor(logits, dtype=torch.float64)
    scores = (values.sigmoid() if rule["sigmoid"] else values.softmax(0)).tolist()
    choice = [s + c for s, c in zip(scores, correction, strict=True)] if name in CORRECTED else scores
    groups = [list(range(g * size, (g + 1) * size)) for g in range(rule["groups"])]
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[: rule["group_best"]]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-worth[g], g))[: rule["groups_kept"]]
    allowed = [e for g in kept for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:3]
    total = sum(scores[e] for e in chosen) if rule["normalised"] else 1.0
    return [(e, scores[e] / total * 2.5) for e in chosen]


@pytest.mark.parametrize("name", RULES)
def test_routes_as_by_hand(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 32, generator=generator), torch.randn(12, 32, generator=generator) * 0.3
    correction = torch.randn(12, generator=generator) * 0.4
    ids, weights = routed(name, x, weight, correction)
    different = 0
    for row in range(40):
        expected = by_hand(name, (x[row].double() @ weight.double().T).tolist(), correction.tolist())
        assert ids[row].tolist() == [e for e, _ in expected]
        assert (weights[row].double() - torch.tensor([w for _, w in expected]).double()).abs().max() < 2e-6
        plain = by_hand(name, (x[row].double() @ weight.double().T).tolist(), [0.0] * 12)
        different += plain != expected
    assert (different > 0) == (name in CORRECTED), "the correction chooses"


@pytest.mark.parametrize("name", RULES)
def test_ties_go_to_the_lowest_id_and_nan_stays_in_range(name: str) -> None:
    weight, correction = torch.zeros(12, 8), torch.zeros(12)
    x = torch.ones(6, 8)
    x[4] = float("nan")
    ids, weights = routed(name, x, weight, correction)
    assert ids[[0, 1, 2, 3, 5]].tolist() == [[0, 1, 2]] * 5
    assert sorted(ids[4].tolist()) == [0, 1, 2] and bool(weights[4].isnan().all())
    assert bool(weights[[0, 1, 2, 3, 5]].isfinite().all())
    weight[7] = float("nan")
    ids, _ = routed(name, torch.randn(5, 8), weight, correction)
    assert bool(((ids >= 0) & (ids < 12)).all()) and all(len(set(row)) == 3 for row in ids.tolist())


def case(dtype: torch.dtype, rows: int = 32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(6, 48, 40, generator=generator) * 0.2
    down = torch.randn(6, 40, 24, generator=generator) * 0.2
    x = torch.randn(rows, 40, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2, generator=generator)
    return x.to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype)


def merged(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor
) -> torch.Tensor:
    """All experts as one MLP, as a layer with small ones computes them."""
    gate_up, down = matrices
    every = F.linear(x, gate_up.flatten(0, 1)).view(x.shape[0], gate_up.shape[0], -1)
    return F.linear(gate_chosen(every, ids, weights), down.transpose(0, 1).flatten(1))


FORMS = pytest.mark.parametrize("form", [merged, experts, partial(experts, chunk=True)])


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_as_a_loop(form: Callable, dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = case(dtype)
    found = form(x, ids, weights, gate_up, down)
    assert found.dtype == dtype
    for row, slots in enumerate(ids.tolist()):
        expected = torch.zeros(40, dtype=torch.float64)
        for slot, expert in enumerate(slots):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            expected += weights[row, slot].double() * (down[expert].double() @ (F.silu(gate) * up))
        tolerance = 1e-5 if dtype == torch.float32 else 0.04  # of values up to 3
        assert (found[row].double() - expected).abs().max() < tolerance


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_where_others_go(form: Callable, dtype: torch.dtype) -> None:
    """Each row among strangers, at every place of as many rows: the same bits.

    Which numbers of rows agree with each other is the processor's affair, tried when a model is loaded.
    """
    x, ids, weights, gate_up, down = case(dtype)
    whole = form(x, ids, weights, gate_up, down)
    known = {(32, row): whole[row] for row in range(0, 32, 5)}
    for rows, seed in itertools.product((4, 8, 16, 32), (1, 2, 3)):
        others = case(dtype, seed=seed)
        for row in range(0, 32, 5):
            place = (row + seed) % rows
            mixed = [torch.cat((theirs[:rows],)) for theirs in others[:3]]
            for theirs, ours in zip(mixed, (x, ids, weights), strict=True):
                theirs[place] = ours[row]
            found = form(*mixed, gate_up, down)
            assert torch.equal(found[place], known.setdefault((rows, row), found[place])), (rows, row)


@FORMS
def test_not_finite_rows_stay_alone(form: Callable) -> None:
    x, ids, weights, gate_up, down = case(torch.float32, rows=8)
    whole = form(x, ids, weights, gate_up, down)
    x[3] = float("nan")
    found = form(x, ids, weights, gate_up, down)
    assert bool(found[3].isnan().all())
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[keep], whole[keep])


@FORMS
def test_an_expert_that_overflows_spoils_only_its_own_rows(form: Callable) -> None:
    """Small experts are computed for every row: what is not chosen must not be seen."""
    x, ids, weights, gate_up, down = case(torch.float32, rows=8)
    gate_up[5] = float("inf")
    found = form(x, ids, weights, gate_up, down)
    chosen = (ids == 5).any(dim=1)
    assert bool(found[~chosen].isfinite().all()) and not bool(found[chosen].isfinite().any())
    assert 0 < int(chosen.sum()) < 8
