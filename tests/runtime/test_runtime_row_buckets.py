"""Which row counts an engine admits: those that agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from spd.runtime.row_buckets import (
    CANDIDATES,
    WIDEST,
    admitted_buckets,
    bucket_for,
    seconds_of,
    worth_running,
)
from tests.helpers import make_engine, run_all

ROWS = torch.randn(WIDEST, 8, generator=torch.Generator().manual_seed(0))


class Windows:
    """Rows whose last bit depends on their number or place where asked, in the context that is asked for."""

    def __init__(self, odd: dict[tuple[int, int, int], int] | None = None) -> None:
        self.odd = odd or {}
        self.asked: dict[int, set[int]] = {}

    def __call__(self, start: int, first: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        self.asked.setdefault(rows, set()).update(range(first, first + rows))
        hidden, logits = ROWS[first : first + rows].clone(), ROWS[first : first + rows, :2].clone()
        row = self.odd.get((rows, first, context))
        if row is not None:
            logits[row, 1] = torch.nextafter(logits[row, 1], torch.tensor(9.0))
        return hidden, logits


def test_row_counts_that_agree_are_admitted() -> None:
    windows = Windows()
    assert admitted_buckets(windows, 96, 128) == (*CANDIDATES, WIDEST)
    assert windows.asked[16] == windows.asked[2] == set(range(WIDEST)), "every place of the widest window"


@pytest.mark.parametrize(("width", "first", "context"), [(5, 20, 128), (8, 24, 256), (2, 30, 256)])
def test_one_bit_in_one_row_refuses_a_row_count(width: int, first: int, context: int) -> None:
    windows = Windows({(width, first, context): width - 1})
    assert admitted_buckets(windows, 96, 128) == (*(w for w in CANDIDATES if w != width), WIDEST)


def test_rows_are_padded_to_the_next_bucket() -> None:
    buckets = (2, 5, 8, 32)
    assert [bucket_for(rows, buckets) for rows in (1, 3, 5, 7, 9, 32, 33, 41)] == [2, 5, 5, 8, 32, 32, 34, 64]


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ({2: 1.0, 5: 2.0, 8: 3.0}, (2, 5, 8, 32)),
        ({2: 4.0, 5: 3.0, 8: 3.5}, (5, 8, 32)),  # five rows take less than two
        ({2: 4.0, 5: 3.9, 8: 3.5}, (8, 32)),
        ({2: 1.0, 5: 0.99, 8: 1.0}, (2, 5, 8, 32)),  # as fast is not faster
        ({}, (2, 5, 8, 32)),  # nothing is known
    ],
)
def test_row_counts_that_a_larger_one_outruns_are_not_run(
    seconds: dict[int, float], kept: tuple[int, ...]
) -> None:
    assert worth_running((2, 5, 8, 32), seconds) == kept


@pytest.mark.parametrize(("spec", "width"), [("off", 1), ("ngram", 4)])
def test_only_the_rows_of_slots_that_have_some_are_run(
    tiny: Callable[..., Path], spec: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request where eight could be, and three: no pass has more rows than their windows fill up to."""
    engine = make_engine(tiny("qwen3"), spec=spec, draft_max=width - 1, slots=8)
    runner, seen = engine._parts.runner, []
    model, forward = runner.model, runner.model.forward

    def spy(batch: object, caches: object) -> Tensor:
        if batch.chunk_start is None:  # type: ignore[attr-defined]
            seen.append(batch.token_ids.shape[0])  # type: ignore[attr-defined]
        return forward(batch, caches)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", spy)
    head = runner.model.logits
    scored = []
    monkeypatch.setattr(
        model, "logits", lambda hidden, tile: scored.append(len(hidden)) or head(hidden, tile)
    )
    for count in (1, 3):
        seen.clear(), scored.clear()
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        run_all(engine, [tuple(range(40 + i, 60 + i)) for i in range(count)], [params] * count)
        most = bucket_for(count * width, runner.row_counts)
        assert seen and max(seen[-4:]) <= most and max(scored[-4:]) <= most


def test_the_least_of_a_bucket_s_times_counts() -> None:
    """By a clock of which one run of 2 rows took long: what else runs on a machine adds to a time."""
    now, slow = [0.0], iter([10.0] + [0.0] * 99)

    def window(start: int, first: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        now[0] += rows + (next(slow) if rows == 2 else 0)
        return ROWS, ROWS

    assert seconds_of(window, (2, 4, 32), 96, 128, lambda: now[0]) == {2: 2.0, 4: 4.0}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("draft_max", [1, 3])
@pytest.mark.parametrize("spec", ["off", "ngram", "draft", "mtp"])
def test_texts_depend_neither_on_row_counts_nor_on_empty_slots(
    tiny: Callable[..., Path], spec: str, draft_max: int, lag: int
) -> None:
    """Two requests in six slots, by the fewest, all and the widest row counts: each as alone and plain."""
    target = demo_folder() if spec == "mtp" else tiny("qwen3")
    prompts = [tuple(range(40 + i, 60 + i)) for i in range(2)]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=12, ignore_eos=True) for t in (0.0, 0.8)]
    plain = make_engine(target, spec="off")
    alone = [run_all(plain, [prompts[i]], [params[i]])[0].tokens for i in range(2)]
    wishes: dict[str, Any] = {} if spec == "off" else {"draft_max": draft_max}
    wishes |= {"draft_model": target} if spec == "draft" else {}
    engine = make_engine(target, spec=spec, slots=6, lag=lag, **wishes)
    runner = engine._parts.runner
    assert runner.buckets is not None
    for counts in (runner.row_counts, runner.buckets, (WIDEST,)):
        runner.row_counts = counts
        assert [run.tokens for run in run_all(engine, prompts, params)] == alone
