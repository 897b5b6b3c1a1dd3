"""Recurrent layers on the device: rows however passes cut them, chunks of prompts, a tiny hybrid's
texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spd.kernels.dispatch import load_kernels
from spd.runtime import Request, SamplingParams
from tests.gpu import gpu_helpers as lane
from tests.helpers import (
    collect_outputs,
    get_local_queue,
    make_next_turn,
    random_prompts,
    run_requests,
)
from tests.kernels import test_kernels_recurrent as recurrent
from tests.kernels.forms import Form
from tests.kernels.test_kernels_recurrent import Shape

PUBLISHED = [Shape(48, 16, 128, 128), Shape(32, 16, 128, 128)]
"""Of Qwen3.5's 27B and 35B-A3B."""


@pytest.mark.parametrize("shape", [*PUBLISHED, Shape(3, 1, 24, 40)], ids=str)
def test_rows_and_chunks_are_the_same_however_passes_cut_them(shape: Shape) -> None:
    """Windows and passes are single steps, and whole chunks the recurrence, up to rounding."""
    types = (torch.bfloat16, torch.float16, torch.float32)
    form = Form("triton", load_kernels("triton"), "cuda", types)
    for dtype in types:
        recurrent.check_windows(form, dtype, shape, 60)
        recurrent.check_passes(form, dtype, shape)
    for regime in ("usual", "slow", "mixed"):
        recurrent.check_chunks(form, shape, 600, regime)
    recurrent.test_how_many_chunks_a_call_holds_changes_no_bit(shape, form)


OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "ctx": 1024}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lane.write_hybrid(tmp_path_factory.mktemp("hybrid"), mtp=True)


def test_short_pages_change_no_text(hybrid: Path) -> None:
    """A request that gives way is written again by the programs that wrote it."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.8, seed=1)
    long = [(random_prompts(1, n, 256, seed=n)[0], params) for n in (5, 75, 300, 600)]
    stories = []
    for options in ({}, {"slots": 4, "cache_pages": 18, "spec": "mtp", "draft_max": 4}):
        with lane.gpu_engine(hybrid, **OPTIONS, **options) as engine:
            stories.append(collect_outputs(lane.run_work(engine, long, 1)))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("spec", ["off", "mtp", "mtp+ngram"])
def test_a_next_turn_goes_on_from_a_checkpoint(hybrid: Path, spec: str, lag: int) -> None:
    """A hit gives the text of a miss from pinned copies, and prefills the new tokens only."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=3)
    drafted = {} if spec == "off" else {"draft_max": 4}
    for length in (40, 64, 300):
        stories = []
        for sharing in (True, False):
            options = {**OPTIONS, **drafted, "spec": spec, "prefix_sharing": sharing, "lag": lag}
            with lane.gpu_engine(hybrid, **options) as engine:
                prompt = random_prompts(1, length, 256, seed=length)[0]
                first = run_requests(engine, [Request("first", prompt, params)])[0]
                turn = make_next_turn(prompt, first.tokens, params)
                later = run_requests(engine, [turn, Request("again", prompt, params)])
                cached = [run.metrics.cached_tokens for run in later]
                assert cached == ([length + 19, length - 1] if sharing else [0, 0])
                places = get_local_queue(engine).snapshots.places if sharing else {}
                assert all(part.is_pinned() for parts in places.values() for part in parts)
                stories.append([first.output, *(run.output for run in later)])
        assert stories[0] == stories[1]
