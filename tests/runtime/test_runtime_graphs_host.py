"""A round asks the host nothing: what is asked in one is seen, and the source says who waits at all."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spd
from spd.runtime import SamplingParams
from spd.runtime.round.state import RoundState
from tests.helpers import run_all
from tests.runtime import test_runtime_graphs as graphs

no_host_reads = graphs.no_host_reads
target = graphs.target

STATE_READS: dict[str, Callable[[RoundState], object]] = {
    "__int__": lambda state: int(state.length.max()),
    "__bool__": lambda state: bool(state.active.any()),
    "item": lambda state: state.counter.item(),
    "tolist": lambda state: state.ring.tolist(),
    "aten.equal": lambda state: torch.equal(state.length, state.min_length),
    "aten.index": lambda state: state.length[state.active],
    "aten.where": lambda state: torch.where(state.active),
    "aten.allclose": lambda state: torch.allclose(state.length, state.min_length),
    "__index__": lambda state: state.tokens[:, : state.length[0]],
    "torch.cuda.synchronize": lambda state: torch.cuda.synchronize(),
    "Stream.synchronize": lambda state: torch.cuda.Stream.synchronize(None),  # type: ignore[arg-type]
    "Event.synchronize": lambda state: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
    "torch.accelerator.synchronize": lambda state: torch.accelerator.synchronize(),
    "torch.cpu.synchronize": lambda state: torch.cpu.synchronize(),
}


@pytest.mark.parametrize("what", STATE_READS)
def test_what_a_round_asks_is_seen(target: Path, what: str) -> None:
    """The watch over all rounds here notices what is asked in the middle of one, be it eager or captured."""
    engine = graphs.two_slots(target, spec="ngram", ngram_min=1, draft_max=2)
    honest, state = engine._device.round._commit, engine._device.state

    def curious(*args: Any) -> None:
        STATE_READS[what](state)
        honest(*args)

    engine._device.round._commit = curious  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=rf"waits for the device: ([A-Za-z.]+\.)?{re.escape(what)}[. ]"):
        run_all(engine, graphs.PROMPTS[:1], [SamplingParams(max_tokens=4)])


MAY_WAIT = {
    "runtime/round/round_queue.py": 1,  # for the copy of a row that is read
    "runtime/load/weight_reader.py": 1,  # while loading
}
"""Every place that waits for a stream, an event or the device, by file and how often."""


def test_who_waits_for_the_device() -> None:
    """By the source, for what is done on a GPU alone does not run here."""
    root, found = Path(spd.__file__).parent, Counter[str]()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, part, None) for part in ("attr", "id", "name")}
            if names & {"synchronize", "wait_stream", "cudaDeviceSynchronize"}:
                found[path.relative_to(root).as_posix()] += 1
    assert found == MAY_WAIT
