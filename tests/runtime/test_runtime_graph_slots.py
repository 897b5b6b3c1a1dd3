"""A captured round runs the first few slots where the others are empty: same texts, same tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine.request import GrammarText
from spd.runtime.round.graphs import slot_counts
from spd.runtime.round.state import narrowed
from tests.helpers import make_engine, random_prompts, run_requests
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime import test_runtime_graphs as graphs
from tests.runtime.graph_stand_in import StandIn, tensors_in

watched_engine = graphs.watched_engine
SLOTS = 7
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 6, "temperature": 0.8, "logprobs": 2},
    {"max_tokens": 20, "repetition_penalty": 1.3, "logit_bias": ((7, 2.0),)},
    {"max_tokens": 40, "temperature": 0.9, "top_p": 0.8, "ignore_eos": True},
    {"max_tokens": 9, "grammar": GrammarText("regex", "[a-z ]{4,9}[.]")},
    {"max_tokens": 26, "temperature": 0.7, "min_tokens": 4},
    {"max_tokens": 8, "presence_penalty": 0.4},
    {"max_tokens": 5},
    {"max_tokens": 11, "temperature": 1.0},
]
"""More than there are slots; the first is the longest, then one among the first four."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph_slots") / "target"
    return write_tiny_mtp(folder, kind="copy", layers=2, tie=False)


@pytest.fixture(scope="module")
def methods(target: Path) -> dict[str, dict[str, Any]]:
    drafter = {"spec": "draft", "draft_model": target, "draft_max": 2}
    return {
        "off": {"spec": "off"},
        "ngram": {"spec": "ngram", "ngram_min": 1, "draft_max": 2},
        "mtp": {"spec": "mtp", "draft_max": 2},
        "mtp+ngram": {"spec": "mtp+ngram", "ngram_min": 1, "draft_max": 2},
        "block+ngram": {**drafter, "spec": "draft+ngram", "ngram_min": 1, "verify": "block"},
    }


def requests() -> list[Request]:
    found = []
    for i, kind in enumerate(KINDS):
        options = dict(kind)
        grammar = options.pop("grammar", None)
        prompt = random_prompts(1, 12 + 9 * (i % 3), 256, seed=i)[0]
        found.append(Request(f"r{i}", prompt, SamplingParams(seed=i, **options), grammar=grammar))
    return found


@pytest.mark.covers(1)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("method", ["off", "ngram", "mtp", "mtp+ngram", "block+ngram"])
def test_texts_and_drafts_are_those_of_whole_rounds(
    target: Path,
    methods: dict[str, dict[str, Any]],
    watched_engine: Callable[..., tuple[Engine, StandIn]],
    method: str,
    lag: int,
) -> None:
    wishes = {**methods[method], "slots": SLOTS}
    whole = run_requests(make_engine(target, **wishes), requests())
    engine, captured = watched_engine(target, lag=lag, **wishes)
    runs = run_requests(engine, requests())
    assert graphs.story(runs) == graphs.story(whole)
    if not lag:  # what is read later finds, without a GPU's copies, those of a later round
        for run, one in zip(runs, whole, strict=True):
            assert run.logprobs == pytest.approx(one.logprobs, abs=1e-5)
    assert {shape.slots for shape in captured.captured} == {1, 4, SLOTS}
    assert captured.replays > len(captured.captured)


@pytest.mark.parametrize("method", ["mtp+ngram", "block+ngram"])
def test_a_part_is_made_of_the_same_memory_and_of_nothing_wider(
    target: Path, methods: dict[str, dict[str, Any]], method: str
) -> None:
    """A proposer that keeps another tensor by slots, and does not narrow it, is found here."""
    engine = make_engine(target, **methods[method], slots=SLOTS)
    run_requests(engine, requests())  # what is made at first use is there
    whole = engine._device.round
    kept = {path: tensor for path, tensor in tensors_in(whole) if tensor.numel()}
    part = {path: tensor for path, tensor in tensors_in(narrowed(whole, 4)) if tensor.numel()}
    assert part.keys() == kept.keys() and len(part) > 30
    cut = set()
    for path, tensor in part.items():
        assert tensor.data_ptr() == kept[path].data_ptr(), path
        shape = kept[path].shape
        if shape and shape[0] == SLOTS:
            assert tensor.shape == (4, *shape[1:]), path
            cut.add(path.rpartition(".")[2])
        else:
            assert tensor.shape == shape, path
    assert {"tokens", "draft", "page_table", "seed", "bias", "mask", "generated"} <= cut
    assert narrowed(whole, 4).state.slots == 4 and whole.state.slots == SLOTS


def test_few_numbers_of_slots() -> None:
    assert [slot_counts(n) for n in (1, 2, 4, 5, 64, 100)] == [
        (1,), (1, 2), (1, 4), (1, 4, 5), (1, 4, 16, 64), (1, 4, 16, 64, 100)
    ]  # fmt: skip
