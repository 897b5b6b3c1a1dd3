"""The model's log-probabilities of a prompt's tokens, computed from the passes that write the prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart

ROWS = 16
"""Rows of logits computed at a time: a row may have a quarter of a million float32 values."""


class PromptScores(NamedTuple):
    """Log-probabilities of all tokens but the first, on the host.

    prompt [n] are those of the prompt's tokens, values and ids [n][top] those of the likeliest
    ones.
    """

    prompt: list[float]
    values: list[list[float]]
    ids: list[list[int]]


class ScoreRows:
    """Scores of one prompt while it is written, on the device, in blocks of rows."""

    def __init__(self, top: int) -> None:
        """top: how many of the likeliest tokens to score at each position."""
        self.top = top
        self._prompt: list[Tensor] = []
        self._values: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, runner: ModelRunner, part: PromptPart, hidden: Tensor) -> None:
        """Score the token after each position of a part. hidden: [1, end - begin, hidden]."""
        following = part.token_ids[0, part.begin + 1 : part.end + 1]
        for begin in range(0, len(following), ROWS):
            tokens = following[begin : begin + ROWS]
            logits = runner.logits(hidden[0, begin : begin + len(tokens)])
            scores = logits.log_softmax(dim=-1)
            values, ids = scores.topk(self.top, dim=-1)
            self._prompt.append(scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
            self._values.append(values)
            self._ids.append(ids)

    def fetch(self) -> PromptScores:
        """Wait until all scores are computed, and return them."""
        if not self._prompt:
            return PromptScores([], [], [])
        return PromptScores(
            torch.cat(self._prompt).tolist(),
            torch.cat(self._values).tolist(),
            torch.cat(self._ids).tolist(),
        )
