"""The model's log-probabilities of a prompt's tokens, computed from the passes that write the prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart

ROWS_AT_A_TIME = 16
"""Rows of logits computed at a time: a row may have a quarter of a million float32 values."""


class PromptScores(NamedTuple):
    """Log-probabilities at all positions of a prompt but the first, on the host."""

    prompt: list[float]
    """Log-probability of each prompt token [n]."""
    values: list[list[float]]
    """Log-probabilities of the likeliest tokens at each position [n][num_likeliest]."""
    ids: list[list[int]]
    """The ids of these tokens."""


class UnreadPromptScores:
    """Log-probabilities of one prompt while it is written, on the device, in blocks of rows."""

    def __init__(self, num_likeliest: int) -> None:
        """num_likeliest: how many of the likeliest tokens to score at each position."""
        self.num_likeliest = num_likeliest
        self._prompt: list[Tensor] = []
        self._values: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add_part(self, runner: ModelRunner, part: PromptPart, hidden: Tensor) -> None:
        """Compute and append the scores of the prompt token after each position of a part.

        hidden: the target's hidden states of the part, [1, end - begin, hidden].
        """
        following = part.token_ids[0, part.begin + 1 : part.end + 1]
        for begin in range(0, len(following), ROWS_AT_A_TIME):
            tokens = following[begin : begin + ROWS_AT_A_TIME]
            logits = runner.logits(hidden[0, begin : begin + len(tokens)])
            scores = logits.log_softmax(dim=-1)
            values, ids = scores.topk(self.num_likeliest, dim=-1)
            self._prompt.append(scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
            self._values.append(values)
            self._ids.append(ids)

    def fetch(self) -> PromptScores:
        """Wait until all scores are computed, copy them to the host and return them."""
        if not self._prompt:
            return PromptScores([], [], [])
        return PromptScores(
            torch.cat(self._prompt).tolist(),
            torch.cat(self._values).tolist(),
            torch.cat(self._ids).tolist(),
        )
