"""A short replay of an agent's conversation: warm turns are cold ones' equals, and add what is new."""

from __future__ import annotations

import pytest

from benchmarks import agent_replay
from spd.runtime.round.limits import CHUNK

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("model", ["demo-hybrid", "demo"])
def test_a_turn_prefills_what_it_adds(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And less than a chunk more, and what is counted as cached was not written; lookup copies."""
    monkeypatch.setitem(agent_replay.METHODS, model, ("ngram",))
    monkeypatch.setattr(agent_replay, "OWN", 4)
    found = agent_replay.measure(model, 4, 4096, 1)
    (lookup,) = found["methods"].values()
    assert lookup["turns_equal_to_cold"] == lookup["turns"] == 4
    assert lookup["cached_is_true"] and found["cold"]["cached_is_true"]
    assert lookup["prefilled_beyond_new_most"] < CHUNK["native"] and lookup["prefilled_again"] == 0
    assert lookup["prefilled_tokens"] < found["cold"]["prefilled_tokens"] / 2
    assert lookup["tokens_per_round"] > 1.5 and lookup["said_tokens"] > 100
    changing = found["without_rule"]
    assert changing["prefilled_tokens"] > changing["prompt_tokens"] - CHUNK["native"] * 4
