"""A short replay of an agent's conversation: warm turns are cold ones' equals, and add what is new."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import agent_replay
from spd.runtime.round.limits import CHUNK

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("model", ["demo-hybrid", "demo"])
def test_a_turn_prefills_what_it_adds(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And less than a chunk more, compacted or not; what is cached was not written; a cut run goes on."""
    monkeypatch.setitem(agent_replay.METHODS, model, ("ngram",))
    for name, value in {"OWN": 4, "LEAST": 200, "MOST": 900}.items():
        monkeypatch.setattr(agent_replay, name, value)
    given = argparse.Namespace(turns=6, window=3200, threads=1, parts=tmp_path, cold_every=2)
    found = agent_replay.measure(model, given)
    (lookup,) = found["methods"].values()
    assert lookup["turns"] == 6 and lookup["turns_equal_to_cold"] == lookup["turns_cold"] == 3
    assert lookup["cached_is_true"] and lookup["compactions"] > 0
    assert lookup["prefilled_beyond_new_most"] < CHUNK["native"] and lookup["prefilled_again"] == 0
    assert lookup["prefilled_tokens"] < lookup["prompt_tokens"] * 0.8
    assert lookup["tokens_per_round"] > 1.5 and lookup["said_tokens"] > 100
    changing = found["without_rule"]
    assert changing["prefilled_tokens"] > changing["prompt_tokens"] - CHUNK["native"] * 6
    cold = tmp_path / f"{model}-cold.jsonl"
    cold.write_text("".join(cold.read_text().splitlines(keepends=True)[:-1]))
    assert agent_replay.measure(model, given) == found
