"""The model's own log-probabilities of a prompt's tokens, made of the passes that write the prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart

ROWS = 16
"""Rows of logits at a time: a row may have a quarter of a million float32 values."""


class PromptScores(NamedTuple):
    """Scores of the tokens behind the first, in host values: own [n], the likeliest ones [n][top]."""

    prompt: list[float]
    values: list[list[float]]
    ids: list[list[int]]


class ScoreRows:
    """Scores of one prompt while it is written, on the device."""

    def __init__(self, top: int) -> None:
        """top: how many of the likeliest tokens to keep at each place."""
        self.top = top
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, runner: ModelRunner, part: PromptPart, hidden: Tensor) -> None:
        """Score the token behind each position of a part. hidden: [1, end - begin, hidden]."""
        following = part.token_ids[0, part.begin + 1 : part.end + 1]
        for begin in range(0, len(following), ROWS):
            tokens = following[begin : begin + ROWS]
            logits = runner.logits(hidden[0, begin : begin + len(tokens)])
            scores = logits.log_softmax(dim=-1)
            values, ids = scores.topk(self.top, dim=-1)
            own = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            self._rows.append((own, values, ids))

    def fetch(self) -> PromptScores:
        """Return all of them once they are computed."""
        if not self._rows:
            return PromptScores([], [], [])
        own, values, ids = (torch.cat(tensors) for tensors in zip(*self._rows, strict=True))
        return PromptScores(own.tolist(), values.tolist(), ids.tolist())
