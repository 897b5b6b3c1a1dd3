"""A statistical test of the law of the first tokens, for rules that promise the law and not the tokens.

Two samples of replies with different seeds, one speculated and one plain: their tokens and pairs of
tokens must come from one distribution (chi-square, Bonferroni over the tests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from spd.runtime.engine.request import Request, derived_seed
from spd.runtime.lab.replay import run_requests
from spd.runtime.lab.statistics import chi_square_tail
from spd.runtime.lab.sweep import Question
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams

FALSE_ALARM = 1e-4
"""Probability that a right program fails the whole test."""
TOKENS = 5
LEAST = 10
"""Draws that a class of tokens has in both samples together, at least."""


@dataclass(frozen=True)
class LawTest:
    """The outcome; `probability` is that of the most surprising of `tests`, before the correction."""

    temperatures: tuple[float, ...]
    prompts: tuple[str, ...]
    draws: int
    tests: int
    probability: float
    worst: str
    false_alarm: float
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def law_test(
    reference: EngineConfig,
    candidate: EngineConfig,
    questions: Sequence[Question],
    temperatures: Sequence[float],
    draws: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> LawTest:
    """Draw `draws` replies of a few tokens to each question at each temperature with both settings, and
    test every position."""
    samples: list[dict[str, list[tuple[int, ...]]]] = []
    for side, config in enumerate((reference, candidate)):
        replies: dict[str, list[tuple[int, ...]]] = {}
        requests = []
        for question, t, number in product(questions, temperatures, range(draws)):
            own = derived_seed(seed, question.prompt.name, 2 * number + side)
            params = SamplingParams(temperature=t, seed=own, max_tokens=TOKENS, ignore_eos=True)
            requests.append(Request(f"{question.prompt.name}, T {t!r}/{number}", question.ids, params))
        for outcome in run_requests(config, requests, check)[1]:
            replies.setdefault(outcome.request.id.rpartition("/")[0], []).append(outcome.token_ids)
        samples.append(replies)
    found: list[tuple[float, str]] = []
    for name, plain in samples[0].items():
        for at in range(1, TOKENS):  # the first token comes before any draft
            for first in (at, at - 1):
                words = f"{name}, token {at}" if first == at else f"{name}, tokens {first} and {at}"
                classes = [[reply[first : at + 1] for reply in side] for side in (plain, samples[1][name])]
                found.append((same_law(*classes), words))
    probability, worst = min(found)
    names = tuple(question.prompt.name for question in questions)
    passed = probability * len(found) >= FALSE_ALARM
    return LawTest(tuple(temperatures), names, draws, len(found), probability, worst, FALSE_ALARM, passed)


def same_law(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Chi-square probability of two samples this different from one law; rare values share a class."""
    counts = [Counter(first), Counter(second)]
    total = counts[0] + counts[1]
    classes = [[counts[0][value], counts[1][value]] for value, count in total.items() if count >= LEAST]
    rest = [len(first) - sum(c[0] for c in classes), len(second) - sum(c[1] for c in classes)]
    if sum(rest) >= LEAST:
        classes.append(rest)
    elif classes and sum(rest):
        classes[-1] = [classes[-1][0] + rest[0], classes[-1][1] + rest[1]]
    everything = len(first) + len(second)
    shares = len(first) / everything, len(second) / everything
    statistic = sum(
        (seen - share * sum(pair)) ** 2 / (share * sum(pair))
        for pair in classes
        for seen, share in zip(pair, shares, strict=True)
    )
    return chi_square_tail(statistic, len(classes) - 1)
