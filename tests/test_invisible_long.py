"""The long equality matrices: the demo over every drafter, k, temperature and lag, and a 0.35 B checkpoint.

Slow lane. Each test prints how many tokens it compared and how many differed; the gate is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import SamplingParams
from tests.helpers import Run, make_engine, run_all
from tests.recipes.demo_corpus import question_answers
from tests.test_demo import ask

pytestmark = pytest.mark.slow
TEMPERATURES = (0.0, 0.8, 1.3)
TOKENS = 24


def demo_prompts(count: int = 100) -> list[tuple[int, ...]]:
    """Questions, and beginnings of Python code, in turn."""
    tokenizer = Tokenizer.open(demo_folder())
    names = [name for name, _ in question_answers()]
    prompts = []
    for i in range(count):
        name = names[i * 13 % len(names)]
        module, _, function = name.rpartition(".")
        code = f"import {module or 'os'}\n\n\ndef {function.lower()}(self, *args):\n    "
        prompts.append(ask(name) if i % 2 else tuple(tokenizer.encode(code)))
    return prompts


def differing(found: list[Run], wanted: list[Run]) -> int:
    """Tokens that are not the same, counting everything after a first difference in length."""
    return sum(
        sum(a != b for a, b in zip(f.tokens, w.tokens, strict=False)) + abs(len(f.tokens) - len(w.tokens))
        for f, w in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_demo_matrix(method: str, dtype: str, say: Callable[[str], None]) -> None:
    prompts = demo_prompts()
    work = [
        (p, SamplingParams(temperature=t, max_tokens=TOKENS, seed=i))
        for t in TEMPERATURES
        for i, p in enumerate(prompts)
    ]
    asked, params = [p for p, _ in work], [q for _, q in work]
    # Speculation runs eight requests together; the plain run, each alone.
    wishes: dict[str, Any] = {"spec": method, "dtype": dtype, "ctx": 256, "ngram_min": 2, "slots": 8}
    if method == "draft":
        wishes["draft_model"] = demo_draft_folder()
    plain = run_all(make_engine(demo_folder(), dtype=dtype), asked, params)
    compared, wrong = 0, 0
    for k in (1, 2, 4, 8):
        at_lag_zero: list[Run] = []
        for lag in (0, 1, 2):
            runs = run_all(make_engine(demo_folder(), draft_max=k, lag=lag, **wishes), asked, params)
            compared += sum(len(run.tokens) for run in runs)
            wrong += differing(runs, plain)
            at_lag_zero = at_lag_zero or runs
            assert [run.drafts for run in runs] == [run.drafts for run in at_lag_zero]
        drafted = sum(run.metrics.draft_n for run in at_lag_zero)
        accepted = sum(run.metrics.draft_n_accepted for run in at_lag_zero)
        say(f"{method} {dtype} k={k}: {accepted} of {drafted} drafts accepted")
    say(f"{method} {dtype}: {compared} tokens compared, {wrong} differ")
    assert wrong == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_medium_matrix(medium: Path, dtype: str, say: Callable[[str], None]) -> None:
    generator = torch.Generator().manual_seed(11)
    prompts = [
        tuple(torch.randint(3, 8000, (16 + 8 * (i % 12),), generator=generator).tolist()) for i in range(20)
    ]
    params = [
        SamplingParams(temperature=TEMPERATURES[i % 3], max_tokens=64, seed=i, ignore_eos=True)
        for i in range(20)
    ]
    wishes: dict[str, Any] = {"dtype": dtype, "ctx": 512, "threads": torch.get_num_threads()}
    plain = run_all(make_engine(medium, **wishes), prompts, params)
    for k in (1, 4, 8):
        runs = run_all(
            make_engine(medium, spec="draft", draft_model=medium / "draft", draft_max=k, **wishes),
            prompts,
            params,
        )
        wrong = differing(runs, plain)
        drafted = sum(run.metrics.draft_n for run in runs)
        accepted = sum(run.metrics.draft_n_accepted for run in runs)
        say(
            f"0.35 B {dtype} k={k}: {wrong} of {sum(len(r.tokens) for r in runs)} tokens differ, "
            f"{accepted} of {drafted} drafts accepted"
        )
        assert wrong == 0
