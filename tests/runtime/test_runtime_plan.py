"""What the plan makes of kernels, graphs, tiers and imposed acceptance on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import IncompatibleError, ResourceError, UsageError
from spd.runtime import EngineConfig, make_plan
from spd.runtime.plan.kernel_choice import choose_kernels
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.plan import _draft_tiers, _graphs
from spd.runtime.round.synthetic_acceptance import ImposedAcceptance, conditional_rate

ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(("device", "kernels"), [("cpu", "torch"), ("cpu", "triton"), ("cuda:0", "torch")])
def test_graphs_need_a_device(device: str, kernels: str) -> None:
    with pytest.raises(IncompatibleError, match="CUDA device and Triton kernels"):
        _graphs(True, Machine(device, 2**30), kernels)
    assert not _graphs(None, Machine(device, 2**30), kernels)
    assert _graphs(None, Machine("cuda:0", 2**30), "triton")


def test_triton_on_a_cpu_is_the_interpreters(tiny: Callable[..., Path], monkeypatch: Any) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert make_plan(EngineConfig(model=tiny(), kernels="triton", **ON_CPU)).shape.kernels == "triton"
    with pytest.raises(IncompatibleError, match="bfloat16 products"):
        make_plan(EngineConfig(model=tiny(), kernels="triton", device="cpu", dtype="bfloat16"))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ResourceError, match="needs a CUDA device"):
        make_plan(EngineConfig(model=tiny(), kernels="triton", **ON_CPU))


@pytest.mark.parametrize(("held", "kernels"), [((7, 5), "torch"), ((8, 0), "triton"), ((12, 0), "triton")])
def test_a_gpu_too_old_for_tritons_kernels_runs_torchs(held: tuple[int, int], kernels: str) -> None:
    pytest.importorskip("triton")
    asked: tuple[Any, ...] = (Machine("cuda", 2**30, held), "float16", "none", ())
    chosen, why = choose_kernels("auto", *asked)
    assert chosen == kernels and ("sm_80, and this one is sm_75" in why) == (kernels == "torch")
    if kernels == "torch":
        with pytest.raises(IncompatibleError, match="--kernels triton"):
            choose_kernels("triton", *asked)


@pytest.mark.parametrize("most", [0, 1, 3, 4, 7, 8, 31])
def test_graphs_keep_few_lengths_and_always_none(most: int) -> None:
    tiers = _draft_tiers(most, graphs=True)
    assert tiers[0] == 0 and tiers[-1] == most and list(tiers) == sorted(set(tiers)) and len(tiers) <= 10
    assert _draft_tiers(most, graphs=False) == tuple(range(most + 1))


@pytest.mark.parametrize("length", [0.9, 5.1])
def test_imposed_lengths_beyond_a_round_are_refused(tiny: Callable[..., Path], length: float) -> None:
    wishes = EngineConfig(model=tiny(), spec="ngram", draft_max=4, synthetic_acceptance=length, **ON_CPU)
    with pytest.raises(UsageError, match="out of range"):
        make_plan(wishes)


@pytest.mark.parametrize(("length", "k"), [(1.0, 4), (1.75, 1), (3.08, 4), (3.65, 7), (5.0, 4)])
def test_imposed_acceptance_has_the_length_asked_for(length: float, k: int) -> None:
    """8,192 positions; six standard errors of a round's length are at most 0.15."""
    rate = conditional_rate(length, k)
    assert 1 + sum(rate**i for i in range(1, k + 1)) == pytest.approx(length, abs=1e-6)
    imposed = ImposedAcceptance(length, k, "cpu")
    positions = torch.arange(8192)
    accepted = imposed.accepted(positions, torch.full((8192,), k), k)
    assert accepted.min() >= 0 and accepted.max() <= k
    assert 1 + float(accepted.double().mean()) == pytest.approx(length, abs=0.15)
    assert imposed.accepted(positions, torch.ones(8192, dtype=torch.long), k).max() <= 1
