"""Eight-bit weights, latent attention, experts and MTP layers on the device: one text, one story."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_wishes, outputs, run_work, story
from tests.gpu.test_gpu_rounds import check_case, spoke
from tests.helpers import Run
from tests.recipes.fp8_twin import write_twin

METHODS = ("ngram", "draft", "mtp")


def wishes_of(method: str) -> dict[str, Any]:
    return {"spec": "mtp"} if method == "mtp" else method_wishes(method)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo, a DeepSeek-V3-shaped model with an MTP layer, and its twin in FP8 blocks."""
    twin = write_twin(demo_folder(), tmp_path_factory.mktemp("twins") / "demo")
    return {"bfloat16": demo_folder(), "int8": demo_folder(), "fp8": twin}


@pytest.fixture(scope="module")
def work() -> Work:
    return [
        (prompt, SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i, ignore_eos=True))
        for i, prompt in enumerate(demo_prompts())
    ]


def form_of(weights: str) -> dict[str, Any]:
    return {"dtype": "bfloat16", "quantize": "int8" if weights == "int8" else "none"}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], work: Work) -> dict[str, list[Run]]:
    """Eager, in step, one at a time, nothing speculated; in each form of the weights."""
    found = {}
    for weights, folder in folders.items():
        with gpu_engine(folder, graphs=False, **form_of(weights)) as engine:
            assert engine.plan.weights == weights, engine.plan.weights_reason
            found[weights] = run_work(engine, work, 0)
    return found


def test_the_forms_are_not_one(plain: dict[str, list[Run]]) -> None:
    texts = {weights: str(outputs(runs)) for weights, runs in plain.items()}
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(("method", "k"), [(m, k) for m in METHODS for k in (1, 3)])
def test_acceptance_is_the_same_captured_and_eager_at_every_lag(
    folders: dict[str, Path],
    work: Work,
    plain: dict[str, list[Run]],
    weights: str,
    method: str,
    k: int,
) -> None:
    wishes = {**form_of(weights), **wishes_of(method), "draft_max": k}
    spoke(check_case(folders[weights], work, plain[weights], wishes))


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("method", ["off", *METHODS])
def test_in_a_batch(
    folders: dict[str, Path], work: Work, plain: dict[str, list[Run]], weights: str, method: str
) -> None:
    """Sixteen slots: every request three times, beside all the others."""
    wishes = {**form_of(weights), **wishes_of(method), **({} if method == "off" else {"draft_max": 3})}
    with gpu_engine(folders[weights], slots=16, **wishes) as engine:
        runs = run_work(engine, work * 3, 1)
    assert outputs(runs) == outputs(plain[weights] * 3)
    for copy in (1, 2):
        first, again = runs[: len(work)], runs[copy * len(work) : (copy + 1) * len(work)]
        assert story(first) == story(again)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_hundred_thousand_tokens(folders: dict[str, Path], weights: str, slots: int) -> None:
    """With and without speculation by the MTP layer: not one differs."""
    prompts, each, count = demo_prompts(), 400, 250
    many: Work = [
        (
            prompts[i % len(prompts)],
            SamplingParams(max_tokens=each, temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]
    told = []
    for method in ({"spec": "off"}, {"spec": "mtp", "draft_max": 3}):
        with gpu_engine(folders[weights], slots=slots, ctx=2048, **form_of(weights), **method) as engine:
            told.append(outputs(run_work(engine, many)))
    differing = sum(a != b for off, on in zip(*told, strict=True) for a, b in zip(off[0], on[0], strict=True))
    assert sum(len(tokens) for tokens, _, _ in told[0]) >= 100_000 and differing == 0
