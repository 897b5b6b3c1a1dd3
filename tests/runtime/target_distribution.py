"""A target of three tokens given by a table, its processed distribution in plain Python, and drafters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spd.runtime.round.sampling_params import SamplingParams

VOCAB = 3
PROMPT = (1, 2)
Text = tuple[int, ...]


def context_numbers(tokens: Tensor) -> Tensor:
    """Return a unique number for each prefix of tokens [S, n].

    -1 from the first unwritten one (-1) on.
    """
    numbers = torch.full_like(tokens, -1)
    number = tokens.new_zeros(tokens.shape[0])
    written = torch.ones(tokens.shape[0], dtype=torch.bool)
    for column in range(tokens.shape[1]):
        written = written & (tokens[:, column] >= 0)
        number = number * VOCAB + 1 + tokens[:, column].clamp(min=0)
        numbers[:, column] = torch.where(written, number, -1)
    return numbers


def number_of(text: Sequence[int]) -> int:
    return int(context_numbers(torch.tensor([list(text)]))[0, -1])


def target_table(depth: int, seed: int, masked: bool) -> Tensor:
    """Return float64 logits [contexts + 1, 3]; the last row is for unwritten contexts.

    masked: whether some of them are -inf.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(
        ((VOCAB ** (depth + 1)) // 2 + 1, VOCAB), generator=generator, dtype=torch.float64
    )
    logits = (4 * weights - 2).clone()
    if masked:
        visible = torch.randint(VOCAB, (len(logits), 1), generator=generator)
        hidden = torch.rand(logits.shape, generator=generator) < 0.4
        logits.masked_fill_(hidden.scatter(1, visible, False), float("-inf"))
    logits[-1] = torch.tensor([0.1, 0.0, -0.1], dtype=torch.float64)
    return logits


def processed_by_definition(
    logits: Sequence[float], text: Text, params: SamplingParams
) -> list[float]:
    """Return the probabilities of the next token after PROMPT + text, step by step as documented."""
    scores = list(logits)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for v in range(VOCAB):
        if v in PROMPT or v in text:
            r = params.repetition_penalty
            scores[v] = scores[v] / r if scores[v] > 0 else scores[v] * r
        scores[v] -= params.frequency_penalty * text.count(v) + params.presence_penalty * (
            v in text
        )
    if len(text) < params.min_tokens:
        scores = [-math.inf if v in params.stop_token_ids else x for v, x in enumerate(scores)]
    scores = [x / params.temperature for x in scores]
    order = sorted(range(VOCAB), key=lambda v: (-scores[v], v))[: params.top_k or VOCAB]
    total = math.fsum(math.exp(scores[v]) for v in order)
    retained = list[int]()
    cumulative = 0.0
    for v in order:
        share = math.exp(scores[v]) / total
        if not retained or (
            cumulative < params.top_p and share >= params.min_p * math.exp(scores[order[0]]) / total
        ):
            retained.append(v)
        cumulative += share
    total = math.fsum(math.exp(scores[v]) for v in retained)
    return [math.exp(x) / total if v in retained else 0.0 for v, x in enumerate(scores)]


class TextDistribution:
    """The target's distribution of complete texts, which have ended or reached the horizon."""

    def __init__(self, table: Tensor, params: SamplingParams, horizon: int) -> None:
        self.rows = table.tolist()
        self.params = params
        self.horizon = horizon
        self.conditionals: dict[Text, list[float]] = {}

    def ends(self, text: Text) -> bool:
        return len(text) >= self.horizon or (bool(text) and text[-1] in self.params.stop_token_ids)

    def extend(self, distribution: defaultdict[Text, float], text: Text, mass: float) -> None:
        """Add a text's mass, continued by the target until it ends."""
        if self.ends(text):
            distribution[text] += mass
            return
        if text not in self.conditionals:
            row = self.rows[number_of(PROMPT + text)]
            self.conditionals[text] = processed_by_definition(row, text, self.params)
        for v, probability in enumerate(self.conditionals[text]):
            if probability:
                self.extend(distribution, (*text, v), mass * probability)


EQUAL = torch.eye(VOCAB, dtype=torch.float64)
NEVER = (1 - EQUAL) / (VOCAB - 1)


def random_drafts(contexts: int) -> Tensor:
    source = torch.Generator().manual_seed(9)
    table = torch.rand(contexts, VOCAB, VOCAB, dtype=torch.float64, generator=source)
    return table / table.sum(-1, keepdim=True)


DRAFT_DISTRIBUTIONS: dict[
    str, Callable[[int], Tensor]
] = {  # contexts -> [contexts, sampled, draft]
    "equal": lambda contexts: EQUAL.expand(contexts, -1, -1),
    "never": lambda contexts: NEVER.expand(contexts, -1, -1),
    "random": random_drafts,
    "one-hot": lambda contexts: EQUAL[random_drafts(contexts)[:, 0].argmax(-1, True)].expand(
        -1, VOCAB, -1
    ),
    # Equal where the sample is token 0, else never: acceptance as biased as it can be.
    "only-zeros-match": lambda contexts: torch.cat((EQUAL[:1], NEVER[1:])).expand(contexts, -1, -1),
}
