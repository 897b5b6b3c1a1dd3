"""The demo, DeepSeek-V3-shaped with an MTP layer, in every form of weights: one text, in batches too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_wishes, run_work, story
from tests.gpu.test_gpu_rounds import check_case, spoke
from tests.helpers import Run, outputs
from tests.recipes.packed_twin import write_twin

METHODS = ("ngram", "draft", "mtp", "eagle3", "mtp+ngram")


@dataclass(frozen=True)
class Form:
    """A form of the weights: where they lie, some work, and what plain decoding makes of it.

    Plain is eager, in step, one at a time, nothing speculated.
    """

    weights: str
    folder: Path
    work: Work
    plain: list[Run]

    def wishes(self, method: str, k: int) -> dict[str, Any]:
        """For an engine of this form that speculates so, or not at all."""
        return {**form_wishes(self.weights), **method_wishes(method, k)}

    def check(self, method: str, k: int) -> None:
        """One text and one story of acceptance, captured and eager, at every lag."""
        spoke(check_case(self.folder, self.work, self.plain, self.wishes(method, k)))


def form_wishes(weights: str) -> dict[str, Any]:
    """What asks for a form; the twin is in FP8 blocks by itself."""
    return {"dtype": "bfloat16", "quantize": "int8" if weights == "int8" else "none"}


def make_form(weights: str, place: Path) -> Form:
    """Bfloat16 as the demo is stored, rounded to int8, or its twin in FP8 blocks, written to `place`."""
    folder = write_twin(demo_folder(), place / "twin") if weights == "fp8" else demo_folder()
    work = [
        (prompt, SamplingParams(max_tokens=100, temperature=1.2 * (i % 2), seed=i, ignore_eos=True))
        for i, prompt in enumerate(demo_prompts())
    ]
    with gpu_engine(folder, graphs=False, **form_wishes(weights)) as engine:
        assert engine.plan.weights == {"fp8": "e4m3"}.get(weights, weights), engine.plan.weights_reason
        return Form(weights, folder, work, run_work(engine, work, 0))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    place = tmp_path_factory.mktemp("forms")
    return {weights: make_form(weights, place) for weights in ("bfloat16", "int8", "fp8")}


def test_the_forms_are_not_one(forms: dict[str, Form]) -> None:
    assert len({str(outputs(form.plain)) for form in forms.values()}) == 3


CASES = [
    *(("bfloat16", method) for method in ("mtp", "eagle3")),  # others are in test_gpu_rounds
    *((weights, method) for weights in ("int8", "fp8") for method in METHODS),
]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("weights", "method"), CASES)
def test_the_same_captured_and_eager_at_every_lag(
    forms: dict[str, Form], weights: str, method: str, k: int
) -> None:
    forms[weights].check(method, k)


@pytest.mark.parametrize(("weights", "method"), [*CASES, ("int8", "off"), ("fp8", "off")])
def test_in_a_batch(forms: dict[str, Form], weights: str, method: str) -> None:
    """Sixteen slots: every request three times, beside all the others."""
    form = forms[weights]
    with gpu_engine(form.folder, slots=16, **form.wishes(method, 3)) as engine:
        runs = run_work(engine, form.work * 3, 1)
    assert outputs(runs) == outputs(form.plain * 3)
    count = len(form.work)
    for copy in (1, 2):
        assert story(runs[:count]) == story(runs[copy * count : (copy + 1) * count])
