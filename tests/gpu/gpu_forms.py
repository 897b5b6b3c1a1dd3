"""The demo, a DeepSeek-V3-shaped model with an MTP layer, in the forms that its weights can have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.formats.demo import demo_eagle3_folder, demo_folder
from spd.runtime import SamplingParams
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_wishes, run_work
from tests.gpu.test_gpu_rounds import check_case, spoke
from tests.helpers import Run
from tests.recipes.fp8_twin import write_twin

METHODS = ("ngram", "draft", "mtp", "eagle3", "mtp+ngram")
CASES = [(method, k) for method in METHODS for k in (1, 3)]
"""A file of tests for each eight-bit form, so that they run side by side."""


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
        heads: dict[str, dict[str, Any]] = {
            "mtp": {"spec": "mtp"},
            "eagle3": {"spec": "eagle3", "draft_model": demo_eagle3_folder()},
            "mtp+ngram": {"spec": "mtp+ngram", "ngram_min": 2},
        }
        speculation = heads.get(method) or method_wishes(method)
        return {**form_wishes(self.weights), **speculation, **({} if method == "off" else {"draft_max": k})}

    def check(self, method: str, k: int) -> None:
        """One text and one story of acceptance, captured and eager, at every lag."""
        runs = check_case(self.folder, self.work, self.plain, self.wishes(method, k))
        spoke(runs)
        assert sum(run.metrics.draft_n for run in runs) > 0


def form_wishes(weights: str) -> dict[str, Any]:
    """What asks for a form; the twin is in FP8 blocks by itself."""
    return {"dtype": "bfloat16", "quantize": "int8" if weights == "int8" else "none"}


def make_form(weights: str, place: Path) -> Form:
    """Bfloat16 as the demo is stored, rounded to int8, or its twin in FP8 blocks, written to `place`."""
    folder = write_twin(demo_folder(), place / "twin") if weights == "fp8" else demo_folder()
    work = [
        (prompt, SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i, ignore_eos=True))
        for i, prompt in enumerate(demo_prompts())
    ]
    with gpu_engine(folder, graphs=False, **form_wishes(weights)) as engine:
        assert engine.plan.weights == weights, engine.plan.weights_reason
        return Form(weights, folder, work, run_work(engine, work, 0))
