"""Which program writes which position: runs against a plain list of positions, and hits in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.spans import Run, clip_runs, extend_tile, kinds_in, program_runs, reusable_prefix
from tests.recipes.tiny import write_tiny

spans_lists = st.lists(st.tuples(st.sampled_from(["prompt", "generated"]), st.integers(0, 19)), max_size=5)
chunks = st.integers(1, 6)
Position = tuple[str, int]  # how a position is written: ("tile", 0) or ("chunk", offset in its chunk)


def positions_of(spans: list[tuple[str, int]], chunk: int) -> list[Position]:
    """Every position by the rule: full chunks of a prompt span that leave it a last token, tiles else."""
    written: list[Position] = []
    for origin, length in spans:
        whole = (max(length, 1) - 1) // chunk * chunk if origin == "prompt" else 0
        written += [("chunk", i % chunk) if i < whole else ("tile", 0) for i in range(length)]
    return written


def expand(runs: list[Run]) -> list[Position]:
    """Runs as positions; asserts that they lie end to end and that neighbouring tiles are joined."""
    written: list[Position] = []
    for i, run in enumerate(runs):
        assert run.start == len(written) < run.end
        assert i == 0 or not (run.kind == runs[i - 1].kind == "tile")
        written += [(run.kind, n if run.kind == "chunk" else 0) for n in range(run.end - run.start)]
    return written


@settings(max_examples=200, deadline=None)
@given(spans=spans_lists, chunk=chunks)
def test_runs_follow_the_rule(spans: list[tuple[str, int]], chunk: int) -> None:
    runs = program_runs(spans, chunk)
    assert expand(runs) == positions_of(spans, chunk)
    assert all(run.end - run.start == chunk for run in runs if run.kind == "chunk")


@settings(max_examples=200, deadline=None)
@given(spans=spans_lists, chunk=chunks, data=st.data())
def test_clipped_runs_hold_whole_chunks_only(
    spans: list[tuple[str, int]], chunk: int, data: st.DataObject
) -> None:
    written = positions_of(spans, chunk)
    end = data.draw(st.integers(0, len(written)))
    expected = written[:end]
    while expected and expected[-1][0] == "chunk" and expected[-1][1] < chunk - 1:
        cut = expected[-1][1] + 1
        expected[-cut:] = [("tile", 0)] * cut
    assert expand(clip_runs(program_runs(spans, chunk), end)) == expected


@settings(max_examples=200, deadline=None)
@given(spans=spans_lists, chunk=chunks, data=st.data())
def test_a_reusable_prefix_is_the_longest_that_cuts_no_chunk(
    spans: list[tuple[str, int]], chunk: int, data: st.DataObject
) -> None:
    written = [*positions_of(spans, chunk), ("tile", 0)]
    cached = data.draw(st.integers(0, len(written) - 1))
    whole = [n for n in range(cached + 1) if written[n][0] == "tile" or written[n][1] == 0]
    assert reusable_prefix(program_runs(spans, chunk), cached) == max(whole)


@settings(max_examples=100, deadline=None)
@given(spans=spans_lists, chunk=chunks, more=st.integers(-3, 9))
def test_extended_runs_go_on_in_tiles(spans: list[tuple[str, int]], chunk: int, more: int) -> None:
    written = positions_of(spans, chunk)
    end = max(0, len(written) + more)
    extended = expand(extend_tile(program_runs(spans, chunk), end))
    assert extended == written + [("tile", 0)] * (end - len(written))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_windows_look_alike_exactly_where_their_positions_do(width: int, chunk: int) -> None:
    """Over all windows of some texts: equal kinds if and only if every position was written alike."""
    texts = [
        [("prompt", 14)],
        [("prompt", 3), ("generated", 4), ("prompt", 9)],
        [("generated", 2), ("prompt", 1), ("prompt", 11)],
    ]
    looks: dict[object, set[object]] = {}
    for spans in texts:
        positions, runs = positions_of(spans, chunk), program_runs(spans, chunk)
        for start in range(len(positions) - width + 1):
            view = kinds_in(runs, start, start + width)
            looks.setdefault(view, set()).add(tuple(positions[start : start + width]))
    assert all(len(written) == 1 for written in looks.values())
    assert len(set().union(*looks.values())) == len(looks)


# -- in the engine -----------------------------------------------------------------------------------


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """(first position, rows, whether a chunk) of every pass over a prompt that is wider than one row."""
    seen: list[tuple[int, int, bool]] = []
    forward = ModelRunner.forward_prompt

    def spy(self: ModelRunner, ids: torch.Tensor, begin: int, end: int, *rest: Any, **more: Any) -> Any:
        if end - begin > 1:
            seen.append((begin, end - begin, more["chunked"]))
        return forward(self, ids, begin, end, *rest, **more)

    monkeypatch.setattr(ModelRunner, "forward_prompt", spy)
    return seen


@pytest.mark.parametrize("first_span", [0, 10, 64, 100])
def test_a_cache_hit_cuts_no_chunk(
    first_span: int, tmp_path: Path, forwards: list[tuple[int, int, bool]]
) -> None:
    """Wherever a later span begins, what a hit leaves to do runs through the programs of a miss."""
    model = write_tiny(tmp_path, vocab=61, tokenizer=False, layers=1)
    text = torch.randint(61, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    wishes: dict[str, Any] = {"threads": 1, "dtype": "float32", "kernels": "torch", "ctx": 512, "spec": "off"}
    engine, cached = Engine(EngineConfig(model=model, **wishes)), []
    for length in (290, 150, 220, 290):
        forwards.clear()
        spans = [("prompt", first_span), ("prompt", length - first_span)]
        request = Request(str(length), tuple(text[:length]), SamplingParams(max_tokens=2), tuple(spans))
        assert sum(len(event.token_ids) for event in engine.stream([request])) == 2
        written = positions_of(spans, 64)
        for start, rows, chunked in forwards:
            expected = [("chunk", n) if chunked else ("tile", 0) for n in range(rows)]
            assert written[start : start + rows] == expected
        cached.append(engine.metrics(str(length)).cached_tokens)
    assert cached[0] == 0
    assert (
        cached[1:] == {0: [128, 192, 256], 10: [0, 0, 0], 64: [128, 192, 256], 100: [64, 64, 256]}[first_span]
    )
