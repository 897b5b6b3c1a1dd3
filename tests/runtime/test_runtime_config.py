"""Configurations that are refused, each with its message, and plans of others without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import IncompatibleError, ResourceError, SpdError, UsageError
from spd.runtime import EngineConfig, SamplingParams, make_plan
from spd.runtime.plan.config import CLASHES, DTYPES, KERNELS, MAX_DRAFT, METHODS, VERIFY_RULES
from spd.runtime.plan.kernel_choice import choose_kernels
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.plan import _draft_tiers, _resolve_graphs
from spd.runtime.proposers import MODEL_PROPOSERS
from spd.runtime.round.imposed_acceptance import ImposedAcceptance, conditional_rate

DRAFT = Path("draft")
REFUSED_TOGETHER: list[tuple[dict[str, Any], type[SpdError], str]] = [
    ({"verify": "rejection", "spec": "off"}, UsageError, "block are about drafts"),
    ({"verify": "block", "draft_max": 0}, UsageError, "block are about drafts"),
    ({"verify": "block", "adaptive": True}, UsageError, "--adaptive fits K"),
    (
        {"verify": "rejection", "synthetic_acceptance": 2.0},
        UsageError,
        "--synthetic-acceptance imposes",
    ),
    (
        {"draft_model": DRAFT, "spec": "ngram"},
        UsageError,
        "--draft-model is for --spec auto, mtp, draft",
    ),
    ({"spec": "off", "draft_max": 1}, UsageError, "--draft-max, --adaptive"),
    ({"lookup": DRAFT}, UsageError, "--spec asks for no lookup"),
    ({"lookup": DRAFT, "spec": "mtp"}, UsageError, "--spec asks for no lookup"),
    ({"lookup": DRAFT, "spec": "off"}, UsageError, "--spec asks for no lookup"),
    ({"ngram_min": 9}, UsageError, "--ngram-min is more than --ngram-max"),
    ({"spec": "off", "adaptive": True}, UsageError, "--adaptive and --synthetic"),
    ({"spec": "off", "tp": 2, "draft_tp": 2}, UsageError, "about a model that drafts"),
    ({"spec": "ngram", "tp": 2, "draft_tp": 1}, UsageError, "about a model that drafts"),
    ({"rendezvous": 2}, UsageError, "--tp 1 has no other rank"),
    ({"graphs": True, "device": "cpu"}, IncompatibleError, "--graphs on captures"),
    ({"graphs": True, "kernels": "torch"}, IncompatibleError, "--graphs on captures"),
    ({"graphs": True, "kernels": "native"}, IncompatibleError, "torch or native rule"),
    (
        {"activations": "int8", "device": "cuda:1"},
        IncompatibleError,
        "--activations int8 is for a CPU",
    ),
    (
        {"activations": "int8", "kernels": "triton"},
        IncompatibleError,
        "--activations int8 is for a CPU",
    ),
    ({"draft_ctx": 64, "spec": "ngram"}, UsageError, "about a model that drafts"),
    ({"tp": 4, "draft_tp": 3}, UsageError, "--draft-tp must divide --tp"),
    (
        {"synthetic_acceptance": 2.0, "spec": "off"},
        UsageError,
        "--synthetic-acceptance are about drafts",
    ),
]


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model=Path("model"), **options)


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED_TOGETHER)
def test_options_that_clash_are_refused(
    options: dict[str, Any], kind: type[SpdError], words: str
) -> None:
    with pytest.raises(SpdError) as caught:
        config(**options)
    error = caught.value
    assert type(error) is kind and error.exit_code == {UsageError: 2, IncompatibleError: 4}[kind]
    assert words in error.message and error.fix and "\n" not in error.message


def test_every_clash_has_its_own_message_and_a_case_here() -> None:
    messages = {clash.message for clash in CLASHES}
    assert len(messages) == len(CLASHES) and {*MODEL_PROPOSERS} == {*METHODS} - {
        "auto",
        "off",
        "ngram",
    }
    assert all(any(words in message for _, _, words in REFUSED_TOGETHER) for message in messages)


RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "draft_max": ([0, MAX_DRAFT], [-1, MAX_DRAFT + 1]),
    "draft_ctx": ([1, 2**24], [0, 2**24 + 1]),
    "ngram_min": ([1, 8], [0, 65]),
    "ngram_max": ([3, 64], [0, 65]),
    "lag": ([0, 2], [-1, 3]),
    "ctx": ([2, 2**24], [1, 2**24 + 1]),
    "memory_fraction": ([0.01, 1.0], [0.0, 1.01]),
    "threads": ([1, 1024], [0, 1025]),
    "slots": ([1, 1024], [0, 1025]),
    "tp": ([1, 64], [0, 65]),
    "draft_tp": ([1], [0, 65]),
    # sampling parameters
    "temperature": ([0.0, 0.001, 100.0], [-0.1, 1e-9, 0.0009, 100.1]),
    "top_p": ([1e-9, 1.0], [0.0, -0.1, 1.01]),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31]),
    "min_p": ([0.0, 1.0], [-0.01, 1.01]),
    "repetition_penalty": ([0.01, 100.0], [0.0, -1.0, 101.0]),
    "presence_penalty": ([-100.0, 100.0], [-100.5, 100.5]),
    "frequency_penalty": ([-100.0, 100.0], [-100.5, 100.5]),
    "min_tokens": ([0, 2**24], [-1, 2**24 + 1]),
    "max_tokens": ([None, 1, 2**24], [0, -1, 2**24 + 1]),
    "seed": ([0, 2**63 - 1], [-1, 2**63]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "logit_bias": ([((0, -1000.0), (5, 1000.0))], [((-1, 0.0),), ((0, 1000.5),), ((2**31, 0.0),)]),
    "stop_token_ids": ([(), tuple(range(16))], [tuple(range(17)), (-1,), (2**31,)]),
    "stop": ([(), ("x" * 256,), ("a",) * 16], [("",), ("x" * 257,), ("a",) * 17]),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_hold_at_their_edges(name: str) -> None:
    make: Callable[..., object] = config if hasattr(config(), name) else SamplingParams
    accepted, refused = RANGES[name]
    for value in accepted:
        assert getattr(make(**{name: value}), name) == value
    unreal = [] if isinstance(accepted[0], tuple) else [float("nan"), float("inf")]
    for value in [*refused, *unreal]:
        with pytest.raises(UsageError) as caught:
            make(**{name: value})
        flag = name if name == "slots" else f"--{name.replace('_', '-')}"
        assert (
            name in caught.value.message
            or caught.value.message == f"{flag} {value} is out of range"
        )
        assert caught.value.reason[0].startswith("valid: ") and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("spec", METHODS),
        ("verify", VERIFY_RULES),
        ("dtype", DTYPES),
        ("kernels", KERNELS),
        ("load", ("auto", "dummy")),
        ("device", ("auto", "cpu", "cuda", "cuda:0", "cuda:17")),
    ],
)
def test_choices_are_known_words(field: str, choices: tuple[str, ...]) -> None:
    for value in choices:
        assert getattr(config(**{field: value}), field) == value
    nearly = ("cuda:-1", "cuda:x", "cuda0", "off+ngram", "ngram+mtp", "mtp+", "mtp,ngram")
    for value in ("", "AUTO", "fast", *nearly):
        with pytest.raises(UsageError) as caught:
            config(**{field: value})
        assert caught.value.message == f"--{field} {value} is not known"
        assert caught.value.fix[0].startswith(f"--{field} ")


def test_the_minimum_is_not_above_the_maximum() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(UsageError, match="min_tokens 6 is more than max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    ("device", "kernels"), [("cpu", "torch"), ("cpu", "triton"), ("cuda:0", "torch")]
)
def test_graphs_need_a_device(device: str, kernels: str) -> None:
    with pytest.raises(IncompatibleError, match="CUDA device and Triton kernels"):
        _resolve_graphs(True, Machine(device, 2**30), kernels)
    assert not _resolve_graphs(None, Machine(device, 2**30), kernels)
    assert _resolve_graphs(None, Machine("cuda:0", 2**30), "triton")


def test_triton_on_a_cpu_is_the_interpreters(tiny: Callable[..., Path], monkeypatch: Any) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert (
        make_plan(EngineConfig(model=tiny(), kernels="triton", **ON_CPU)).shape.kernels == "triton"
    )
    with pytest.raises(IncompatibleError, match="bfloat16 products"):
        make_plan(EngineConfig(model=tiny(), kernels="triton", device="cpu", dtype="bfloat16"))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ResourceError, match="needs a CUDA device"):
        make_plan(EngineConfig(model=tiny(), kernels="triton", **ON_CPU))


@pytest.mark.parametrize(
    ("capability", "kernels"), [((7, 5), "torch"), ((8, 0), "triton"), ((12, 0), "triton")]
)
def test_a_gpu_too_old_for_tritons_kernels_runs_torchs(
    capability: tuple[int, int], kernels: str
) -> None:
    pytest.importorskip("triton")
    machine = Machine("cuda", 2**30, capability)
    chosen, reason = choose_kernels("auto", machine, "float16", ())
    assert chosen == kernels and ("sm_80, and this one is sm_75" in reason) == (kernels == "torch")
    if kernels == "torch":
        with pytest.raises(IncompatibleError, match="--kernels triton"):
            choose_kernels("triton", machine, "float16", ())


@pytest.mark.parametrize("draft_max", [0, 1, 3, 4, 7, 8, 31])
def test_graphs_keep_few_lengths_and_always_none(draft_max: int) -> None:
    tiers = _draft_tiers(draft_max, graphs=True)
    assert (
        tiers[0] == 0
        and tiers[-1] == draft_max
        and list(tiers) == sorted(set(tiers))
        and len(tiers) <= 10
    )
    assert _draft_tiers(draft_max, graphs=False) == tuple(range(draft_max + 1))


@pytest.mark.parametrize("length", [0.9, 5.1])
def test_imposed_lengths_beyond_a_round_are_refused(
    tiny: Callable[..., Path], length: float
) -> None:
    config = EngineConfig(
        model=tiny(), spec="ngram", draft_max=4, synthetic_acceptance=length, **ON_CPU
    )
    with pytest.raises(UsageError, match="out of range"):
        make_plan(config)


@pytest.mark.parametrize(("length", "k"), [(1.0, 4), (1.75, 1), (3.08, 4), (3.65, 7), (5.0, 4)])
def test_imposed_acceptance_has_the_length_asked_for(length: float, k: int) -> None:
    """8,192 positions; six standard errors of a round's length are at most 0.15."""
    rate = conditional_rate(length, k)
    assert 1 + sum(rate**i for i in range(1, k + 1)) == pytest.approx(length, abs=1e-6)
    imposed = ImposedAcceptance(length, k, "cpu")
    positions = torch.arange(8192)
    accepted = imposed.count_accepted(positions, torch.full((8192,), k), k)
    assert accepted.min() >= 0 and accepted.max() <= k
    assert 1 + float(accepted.double().mean()) == pytest.approx(length, abs=0.15)
    assert imposed.count_accepted(positions, torch.ones(8192, dtype=torch.long), k).max() <= 1
