"""What a round moves of recurrent states: each is read once and written once, whatever k is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.recurrent import delta_rule as torch_form
from spd.kernels.recurrent.delta_rule import DeltaMemory
from spd.kernels.recurrent.short_conv import Segments
from spd.runtime import SamplingParams
from tests.helpers import INTERPRETED, make_engine, random_prompts, run_all
from tests.kernels.test_kernels_recurrent import Layer, Shape
from tests.recipes.tiny_hybrid import write_tiny_hybrid

DRAFTS = (0, 1, 4, 8)


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


class Interpreted:
    """Counts how often Triton's interpreter loads and stores each element of a tensor."""

    def __init__(self, patch: pytest.MonkeyPatch, tensor: Tensor) -> None:
        from triton.runtime.interpreter import InterpreterBuilder as Builder

        self.loads, self.stores = torch.zeros(tensor.numel()), torch.zeros(tensor.numel())
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        load, store = Builder.create_masked_load, Builder.create_masked_store

        def count(counts: Tensor, pointers: Any, mask: Any) -> None:
            places = pointers.data[mask.data].astype("int64")
            places = places[(places >= first) & (places < end)]
            each = torch.from_numpy((places - first) // tensor.element_size())
            counts.index_add_(0, each, torch.ones(len(each)))

        def loading(builder: Any, pointers: Any, mask: Any, *more: Any) -> Any:
            count(self.loads, pointers, mask)
            return load(builder, pointers, mask, *more)

        def storing(builder: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
            count(self.stores, pointers, mask)
            return store(builder, pointers, value, mask, *more)

        patch.setattr(Builder, "create_masked_load", loading)
        patch.setattr(Builder, "create_masked_store", storing)


@INTERPRETED[0]
@INTERPRETED[1]
@pytest.mark.parametrize("k", DRAFTS)
def test_the_gpu_s_kernel_loads_and_stores_each_element_once(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With accepted drafts to apply first, in two slots of three."""
    layer = Layer(Shape(4, 2, 16, 40), load_kernels("triton"), torch.float32, 3)
    x = layer.inputs(2 * (10 + k))
    layer.run(x[:20], (0, 0, 10, 0, 10), (2, 10, 10, 0, 10))
    layer.run(x[:6], (0, 0, 3, 10, 10), (2, 3, 3, 10, 10))  # a window: its state is as of before it
    counted = Interpreted(monkeypatch, layer.memory.state)
    runs = torch.tensor([(0, 0, k + 1, 12, 12), (2, k + 1, k + 1, 13, 13)])
    rows, width = Segments(runs.T.contiguous(), layer.applied), layer.shape.channels
    gates = x[:, width + layer.shape.heads * layer.shape.size :]
    mixed = x[: 2 * (k + 1), :width].float()
    layer.kernels.delta_rule(mixed, gates[: 2 * (k + 1)], layer.rate, layer.step_bias, layer.memory, rows)
    for counts in (counted.loads, counted.stores):
        each = counts.view(3, -1)
        assert (each[[0, 2]] == 1).all() and not each[1].any()
