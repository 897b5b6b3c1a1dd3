"""Ways to generate held against each other on the CPU: what the comparisons find, and what they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from benchmarks.gpu_suite import spd_rounds
from benchmarks.gpu_suite.gemm_equality import position_differences, random_operands
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


def test_rounds_are_compared_on_the_cpu_too(pair: tuple[Path, Path]) -> None:
    settings = (
        Setting("draft", 2, slots=2),
        Setting("draft", 2, lag=2),
        Setting("ngram", 2, requests=2, tokens=5),
        Setting("off", graphs=True),
    )
    reports = list(compare(*pair, PROMPTS, tokens=10, device="cpu", settings=settings, threads=1))
    result = reports[-1]
    assert len(reports) == 4
    assert result["differing_tokens"] == result["differing_counts"] == 0
    rows = result["settings"]
    # Requests end 0, 3 or 6 tokens early, in each of three runs.
    assert [rows[name]["tokens"] for name in ("draft_k2_b2", "draft_k2_lag2", "ngram_k2_5t")] == [63, 63, 21]
    assert result["compared_tokens"] == 147
    assert rows["draft_k2_b2"]["acceptance_length"] > 1 and rows["draft_k2_b2"]["rejected"] > 0
    assert "IncompatibleError" in rows["off_captured"]["error"]


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


def _even_linear(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.linear(row, w) for row in x])


def test_positions_and_neighbours_that_change_bits_are_found() -> None:
    w, x = random_operands(24, 32, 6, torch.float32, "cpu", 0)

    def by_position(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = _even_linear(w, x)
        out[3] *= 1 + 1e-6
        return out

    def by_neighbour(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _even_linear(w, x) + x.abs().amax() * 1e-5

    assert position_differences(_even_linear, w, x) == []
    assert position_differences(by_position, w, x) == [3]
    assert position_differences(by_neighbour, w, x) == [1, 2, 3, 4, 5]
