"""Ways to generate held against each other on the CPU: what the comparisons find, and what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite import spd_rounds
from benchmarks.gpu_suite.round_settings import Setting
from benchmarks.gpu_suite.spd_rounds import (
    Outcome,
    compare,
)
from tests.recipes.medium import write_medium, write_medium_draft


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model and its draft."""
    place = tmp_path_factory.mktemp("pair")
    shape = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
    folder = write_medium(place / "target", "float32", vocab=300, max_positions=256, **shape)
    return folder, write_medium_draft(place / "draft", folder)


PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 60)), [3]]


def test_a_changed_token_and_a_changed_count_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = spd_rounds.generate

    def faulty(engine: Any, jobs: Any, prompts: Any, tokens: int) -> Any:
        outcomes = generate(engine, jobs, prompts, tokens)
        if engine.plan.spec == "draft" and engine.plan.lag == 1:
            one = outcomes[jobs[0]]
            outcomes[jobs[0]] = Outcome((one.ids[0] + 1, *one.ids[1:-1]), (*one.counts[:1], 99), 0)
        return outcomes

    monkeypatch.setattr(spd_rounds, "generate", faulty)
    settings = (Setting("draft", 2), Setting("draft", 2, lag=1))
    given: dict[str, Any] = {"device": "cpu", "settings": settings, "runs": ("greedy",), "threads": 1}
    *_, result = compare(*pair, PROMPTS[:1], tokens=6, **given)
    rows = result["settings"]
    assert (rows["draft_k2"]["differing_tokens"], rows["draft_k2"]["other_counts"]) == (0, 0)
    # One token is another, one is missing.
    assert (rows["draft_k2_lag1"]["differing_tokens"], rows["draft_k2_lag1"]["other_counts"]) == (2, 1)
    assert (result["differing_tokens"], result["differing_counts"]) == (2, 1)
