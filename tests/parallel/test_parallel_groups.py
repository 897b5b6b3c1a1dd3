"""The exchanges of a group of ranks, by a stand-in for torch's group: where and when they run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spd.runtime.ranks.communicator import Heartbeat, ProcessGroup
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.sampling_params import SamplingSteps


class Group:
    """Stand in for NCCL's group of two equal ranks: its first exchange cannot be captured."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.is_capturing = False

    def _exchange(self, options: Any) -> None:
        assert self.options or not self.is_capturing, "the communicator is made in a capture"
        self.options.append(options)

    def _allgather_base(self, received: Tensor, sent: Tensor, options: Any) -> None:
        self._exchange(options)
        received.copy_(sent.repeat(2))

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._exchange(options)


def test_exchanges_run_on_the_rounds_own_stream() -> None:
    """Another stream would be forked to and joined for every sum, in a graph too."""
    torch_group = Group()
    group = ProcessGroup(torch_group, 0, 2, Heartbeat())  # type: ignore[arg-type]
    assert torch.equal(group.sum(torch.ones(3)), torch.full((3,), 2.0))
    group.broadcast(torch.ones(2))
    assert [options.asyncOp for options in torch_group.options] == [False, False]
    assert not group.heartbeat.is_waiting


def test_every_group_has_exchanged_before_a_round_is_captured() -> None:
    groups = [Group(), Group()]
    target, draft = (ProcessGroup(group, 0, 2, Heartbeat()) for group in groups)  # type: ignore[arg-type]
    state = SimpleNamespace(slots=1)
    for name in ("active", "draft", "num_drafts", "counter"):
        setattr(state, name, torch.zeros(1))

    def run(k: int, *rest: Any) -> None:
        target.sum(torch.ones(2))
        if k:
            draft.sum(torch.ones(2))

    def capture(program: Any) -> Any:
        for group in groups:
            group.is_capturing = True
        result = program()
        for group in groups:
            group.is_capturing = False
        return program, result

    sampler = SimpleNamespace(draft_distributions=None)
    round_: Any = SimpleNamespace(state=state, sampler=sampler, run=run)
    captured = CapturedRounds(round_, capture)
    for k in (0, 2):
        captured.capture(RoundShape(k, k, SamplingSteps(), None, 1), [])
    assert [len(group.options) for group in groups] == [4, 2]
