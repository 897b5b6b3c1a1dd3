"""Whole texts by weights of eight bits that Triton's kernels multiply as they are, in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spd.runtime import SamplingParams
from tests.helpers import INTERPRETED, Damped, Run, few_programs, make_engine, run_all
from tests.recipes.fp8_twin import write_twin
from tests.recipes.tiny_mtp import write_tiny_mtp

pytest.importorskip("triton")

pytestmark = INTERPRETED

VOCAB = 48
DENSE: dict[str, Any] = {
    "hidden": 48,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 48,
    "vocab": VOCAB,
    "tokenizer": False,
    "seed": 5,
}
LATENT: dict[str, Any] = {**DENSE, "heads": 4, "kv_heads": 4, "layers": 2}
PROMPT = [(5, 6, 7, 8, 5, 6, 7, 8, 5)]
PARAMS = [SamplingParams(max_tokens=3, temperature=t, seed=3) for t in (0.0, 0.8)]


REPEATING = [replace(each, logit_bias=((5, 9.0), (6, 9.0), (7, 9.0))) for each in PARAMS]
"""Texts in which a lookup finds something."""

damped = Damped(loud=1, soft=0.15)


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs idle programs too."""

    few_programs(monkeypatch)


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two targets and a draft model, and twins in FP8 blocks; the latent one has an MTP head."""
    shelf = tmp_path_factory.mktemp("eight")
    head: dict[str, Any] = {"family": "deepseek", "variant": "deepseek_v3", "kind": "copy"}
    plain = {
        "dense": tiny("qwen3", layers=2, residual_gain=damped, **DENSE),
        "draft": tiny("qwen3", layers=1, residual_gain=damped, **DENSE),
        "latent": write_tiny_mtp(shelf / "latent", **head, **LATENT),
    }
    twins = {
        f"{name}-fp8": write_twin(folder, shelf / f"{name}-fp8", ue8m0=name == "latent")
        for name, folder in plain.items()
    }
    return {**plain, **twins}


def method_of(name: str, folders: dict[str, Path], weights: str) -> dict[str, Any]:
    draft = folders["draft-fp8" if weights == "fp8" else "draft"]
    return {
        "off": {"spec": "off"},
        "ngram": {"spec": "ngram", "ngram_min": 1, "draft_max": 2},
        "draft": {"spec": "draft", "draft_model": draft, "draft_max": 2},
        "mtp": {"spec": "mtp", "draft_max": 2},
    }[name]


def generate(
    folders: dict[str, Path], target: str, weights: str, method: str, kernels: str, *, repeats: bool = False
) -> list[Run]:
    folder = folders[f"{target}-fp8" if weights == "fp8" else target]
    wishes = {"quantize": "int8"} if weights == "int8" else {}
    wishes |= method_of(method, folders, weights)
    engine = make_engine(folder, kernels=kernels, ctx=128, slots=2, **wishes)
    if kernels == "triton":
        kept = "e4m3" if weights == "fp8" else weights
        assert engine.plan.weights == kept, engine.plan.weights_reason
    return run_all(engine, PROMPT * 2, REPEATING if repeats else PARAMS)


SLOW = pytest.mark.slow
CASES = [
    ("dense", "draft", "int8"),
    pytest.param("latent", "mtp", "fp8", marks=SLOW),
    pytest.param("dense", "draft", "fp8", marks=SLOW),
    pytest.param("latent", "mtp", "int8", marks=SLOW),
    *(pytest.param(t, "ngram", w, marks=SLOW) for t in ("dense", "latent") for w in ("int8", "fp8")),
]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str, str, bool], list[Run]]:
    """Runs without speculation, by target, weights and whether they repeat themselves, each once."""
    found: dict[tuple[str, str, bool], list[Run]] = {}

    def get(*case: Any) -> list[Run]:
        target, weights, repeats = case
        if case not in found:
            found[case] = generate(folders, target, weights, "off", "triton", repeats=repeats)
        return found[case]

    return get


@pytest.mark.parametrize(("target", "method", "weights"), CASES)
def test_the_same_text_with_every_drafter(
    folders: dict[str, Path],
    plain: Callable[[str, str, bool], list[Run]],
    target: str,
    method: str,
    weights: str,
) -> None:
    """And the one that torch's products make of the same weights, widened: float32 in both."""
    repeats = method == "ngram"
    told = generate(folders, target, weights, method, "triton", repeats=repeats)
    assert [run.output for run in told] == [run.output for run in plain(target, weights, repeats)]
    assert sum(run.metrics.draft_n for run in told) > 0 and len(told[0].tokens) == 3
    widened = generate(folders, target, weights, method, "torch", repeats=repeats)
    assert [(run.output, run.drafts) for run in told] == [(run.output, run.drafts) for run in widened]
