"""The draft model's cache: what rounds without drafting left out is brought up, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spd.runtime import Request, SamplingParams
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.rows import SlotView
from tests.helpers import make_engine, random_prompts

ROUNDS = 9
"""Rounds without drafting, of which the second slot saw the last one only."""


@pytest.mark.parametrize(
    ("length", "passes"), [(65, 1), (70, 2)], ids=["a whole chunk", "a chunk and a tail"]
)
def test_catching_up_leaves_a_new_slots_prompt_alone(
    tiny: Callable[..., Path], length: int, passes: int
) -> None:
    """Prefilled pages may be shared, and were written by another program."""
    model = tiny("qwen3", layers=2, seed=3)
    engine = make_engine(model, spec="draft", draft_model=model, draft_max=2, slots=2)
    engine._draft_length.choose = lambda: 0  # type: ignore[method-assign]
    old, new = (random_prompts(1, n, 256, seed=n)[0] for n in (20, length))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(Request("old", old, params))
    for _ in range(ROUNDS - passes):
        engine.step()
    engine.add(Request("new", new, params))
    for _ in range(passes):
        engine.step()
    proposer, sequence = engine._device.proposer, engine._scheduler.slots[1]
    assert isinstance(proposer, DraftModelProposer) and sequence is not None
    assert engine._device.behind == ROUNDS and sequence.length == length + 1
    views = [SlotView(s.length, s.pages) for s in engine._scheduler.running()]
    for slot, first in ((0, len(old) - 1), (1, length - 1)):
        pages = list(views[slot].pages)
        for layer in proposer.runners[0].cache.layers:
            for pool in layer.pools:
                pool[pages] = 7.0
        proposer.catch_up(ROUNDS, views)
        for layer in proposer.runners[0].cache.layers:
            for pool in layer.pools:
                written = (pool[pages].flatten(0, 1) != 7.0).flatten(1).any(dim=1).nonzero().flatten()
                assert written.tolist() == list(range(first, views[slot].bound))
    engine.close()
