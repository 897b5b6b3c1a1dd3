"""Latent attention, experts, MTP layers and eight-bit weights on the device: one text, in batches too."""

from __future__ import annotations

import pytest

from spd.runtime import SamplingParams
from tests.gpu.gpu_forms import METHODS, Form, form_wishes, make_form
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, outputs, run_work, story


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    place = tmp_path_factory.mktemp("forms")
    return {weights: make_form(weights, place) for weights in ("bfloat16", "int8", "fp8")}


def test_the_forms_are_not_one(forms: dict[str, Form]) -> None:
    assert len({str(outputs(form.plain)) for form in forms.values()}) == 3


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_heads_are_the_same_captured_and_eager_at_every_lag(
    forms: dict[str, Form], method: str, k: int
) -> None:
    """As stored; other drafters are in test_gpu_rounds, other forms in files of their own."""
    forms["bfloat16"].check(method, k)


@pytest.mark.parametrize(
    ("weights", "method"),
    [
        ("bfloat16", "mtp"),
        ("bfloat16", "eagle3"),
        *((weights, method) for weights in ("int8", "fp8") for method in ("off", *METHODS)),
    ],
)
def test_in_a_batch(forms: dict[str, Form], weights: str, method: str) -> None:
    """Sixteen slots: every request three times, beside all the others."""
    form = forms[weights]
    with gpu_engine(form.folder, slots=16, **form.wishes(method, 3)) as engine:
        runs = run_work(engine, form.work * 3, 1)
    assert outputs(runs) == outputs(form.plain * 3)
    count = len(form.work)
    for copy in (1, 2):
        assert story(runs[:count]) == story(runs[copy * count : (copy + 1) * count])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_hundred_thousand_tokens(forms: dict[str, Form], weights: str, slots: int) -> None:
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
        wishes = {"slots": slots, "ctx": 2048, **form_wishes(weights), **method}
        with gpu_engine(forms[weights].folder, **wishes) as engine:
            told.append(outputs(run_work(engine, many)))
    differing = sum(a != b for off, on in zip(*told, strict=True) for a, b in zip(off[0], on[0], strict=True))
    assert sum(len(tokens) for tokens, _, _ in told[0]) >= 100_000 and differing == 0
