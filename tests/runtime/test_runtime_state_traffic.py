"""What a round moves of recurrent states: each is read once and written once, whatever k is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spd.kernels.recurrent import delta_rule as torch_form
from spd.kernels.recurrent.delta_rule import DeltaMemory
from spd.runtime import SamplingParams
from tests.helpers import make_engine, random_prompts, run_all
from tests.recipes.tiny_hybrid import write_tiny_hybrid

DRAFTS = (0, 4)


class Watched:
    """States [S, ...] that count the bytes that are read and written of them, a slot at a time."""

    def __init__(self, states: Tensor) -> None:
        self.states, self.shape, self.read, self.written = states, states.shape, 0, 0

    def __getitem__(self, slot: int) -> Tensor:
        self.read += self.states[slot].nbytes
        return self.states[slot].clone()  # what is made of it is no second look

    def __setitem__(self, slot: int, state: Tensor) -> None:
        self.written += state.nbytes
        self.states[slot] = state


Pass = tuple[int, int, int, int]
"""Of one call: rows of its longest run, bytes of the states that it names, bytes read, bytes written."""


def watch(patch: pytest.MonkeyPatch) -> list[Pass]:
    """Count in every call of torch's recurrence from now on."""
    honest, passes = torch_form.delta_rule, list[Pass]()

    def counting(*given: Any) -> Tensor:
        *before, memory, rows = given
        states = Watched(memory.state)
        out = honest(*before, DeltaMemory(states, *memory[1:]), rows)  # type: ignore[arg-type]
        runs = rows.runs()
        whole = len(runs) * memory.state[0].nbytes
        passes.append((max(run[2] for run in runs), whole, states.read, states.written))
        return out

    patch.setattr(torch_form, "delta_rule", counting)
    return passes


def moved(passes: list[Pass], k: int) -> list[tuple[float, float]]:
    """Of each call that verifies up to k drafts how often each state that it names was read and written."""
    assert any(rows == k + 1 for rows, *_ in passes)
    return [(read / states, written / states) for rows, states, read, written in passes if rows <= k + 1]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), mtp=True, agreeing=True)


@pytest.mark.parametrize("k", DRAFTS)
def test_a_round_reads_and_writes_each_state_once(
    k: int, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = watch(monkeypatch)
    wishes = {"spec": "mtp", "draft_max": k} if k else {"spec": "off"}
    engine = make_engine(hybrid, kernels="torch", slots=2, **wishes)
    passes.clear()  # those of trying which numbers of rows agree
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 0.9)]
    runs = run_all(engine, random_prompts(2, 20, 256), params)
    found = moved(passes, k)
    assert len(found) >= 4 * max(run.metrics.rounds for run in runs), "four recurrent layers"
    assert set(found) == {(1.0, 1.0)}
    assert not k or any(run.metrics.draft_n_accepted for run in runs)


def test_a_second_look_would_be_seen(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence that writes the state of every draft, as snapshots do."""
    honest = torch_form._apply
    states: list[Any] = []

    def kept(state: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        made = honest(state, key, value, gates)
        if states:
            states[-1][0] = made
        return made

    passes, counting = watch(monkeypatch), torch_form.delta_rule

    def snapshots(*given: Any) -> Tensor:
        states.append(Watched(given[4].state))
        out = counting(*given)
        rows, whole, read, written = passes[-1]
        passes[-1] = rows, whole, read, written + states.pop().written
        return out

    monkeypatch.setattr(torch_form, "_apply", kept)
    monkeypatch.setattr(torch_form, "delta_rule", snapshots)
    engine = make_engine(hybrid, kernels="torch", slots=1, spec="mtp", draft_max=4)
    passes.clear()
    run_all(engine, random_prompts(1, 20, 256), [SamplingParams(max_tokens=6, ignore_eos=True)])
    assert all(read == 1 for read, _ in moved(passes, 4)) and max(moved(passes, 4))[1] > 4
