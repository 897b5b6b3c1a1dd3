"""Ranks of a GGUF file's model: each has its part of the codes; tables have the intended width."""

from pathlib import Path
from typing import Any

import pytest

from spd.runtime import SamplingParams
from tests.helpers import assert_same_runs, count_drafted, make_fast_engine, random_prompts, run_all
from tests.kernels.forms import needs_compiled
from tests.recipes.tiny_gguf import write_tiny_gguf

pytestmark = [pytest.mark.usefixtures("threads"), needs_compiled]
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.9)]
PROMPTS = random_prompts(2, 20, 300, seed=4)


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K", "Q8_0"])
def test_speculation_on_two_ranks_changes_no_token(tmp_path: Path, kind: str) -> None:
    """Values have another type than queries and keys, which one rank stores in pieces."""
    file = write_tiny_gguf(tmp_path / "a.gguf", {"attn_v.weight": "Q8_0", "": kind}, inner=1024)
    draft = write_tiny_gguf(tmp_path / "b.gguf", "Q4_0", layers=1)
    options: dict[str, Any] = {"kernels": "native", "dtype": "bfloat16", "tp": 2}
    plain = run_all(make_fast_engine(file, **options), PROMPTS, PARAMS)
    spoken = run_all(
        make_fast_engine(file, spec="draft", draft_model=draft, **options), PROMPTS, PARAMS
    )
    assert_same_runs(spoken, plain)
    assert count_drafted(spoken) > 0
