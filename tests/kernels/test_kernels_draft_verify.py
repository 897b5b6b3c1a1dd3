"""Rejection and block verification keep the target's joint law: by exact enumeration in float64.

Three tokens, every draft string, every pattern of passed tests, every last token: each case is a slot of
one call of the rule, with the comparison and the last draw scripted and their probabilities recorded.
Then seeded faults that the enumeration must see, and the real streams of noise.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import draft_verify
from spd.kernels.sampling.draft_verify import NO_TOKEN, STREAM_ACCEPTANCE, STREAM_DRAFT, STREAM_RESIDUAL
from spd.kernels.sampling.philox import STREAM_TARGET, gumbel

VOCAB = 3
LIMIT_OF_ERROR = 1e-12
RULES = ["rejection", "block"]
Text = tuple[int, ...]
Law = dict[Text, Tensor]
Patch = pytest.MonkeyPatch


# -- the law -----------------------------------------------------------------------------------------


def conditionals(depth: int, seed: int, kind: str) -> tuple[Law, Law]:
    """The target's and the drafter's float64 laws after every prefix shorter than depth."""
    g = torch.Generator().manual_seed(seed)
    p: Law = {}
    q: Law = {}
    for length in range(depth):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            both = torch.rand(2, VOCAB, generator=g, dtype=torch.float64) ** 3
            if kind == "masked":  # zeros in either, also where the other has its mass
                both = both * (torch.rand(2, VOCAB, generator=g) < 0.6)
                both[0, int(torch.randint(VOCAB, (1,), generator=g))] += 0.3
                both[1, int(torch.randint(VOCAB, (1,), generator=g))] += 0.3
            elif kind == "equal":
                both[1] = both[0]
            p[prefix], q[prefix] = both / both.sum(dim=-1, keepdim=True)
    return p, q


def drafts_of(q: Law, k: int, one_hot: bool) -> list[tuple[Text, float]]:
    """Every draft string and its probability; a drafter that does not draw takes its likeliest token."""
    if one_hot:
        text: Text = ()
        for _ in range(k):
            text = (*text, int(q[text].argmax()))
        return [(text, 1.0)]
    found = []
    for text in itertools.product(range(VOCAB), repeat=k):
        mass = 1.0
        for i in range(k):
            mass *= float(q[text[:i]][text[i]])
        found.append((text, mass))
    return found


class Scripted:
    """Stands for the uniforms: comparing them gives a scripted pattern and records the chances."""

    def __init__(self, pattern: Tensor) -> None:
        self.pattern, self.chances = pattern, torch.empty(0)

    def __lt__(self, chances: Tensor) -> Tensor:
        self.chances = chances.clamp(0, 1)
        return self.pattern


@dataclass(frozen=True)
class Setting:
    """One enumeration: k drafts of which `real` count, and the laws' kind."""

    rule: str
    k: int
    real: int
    one_hot: bool
    kind: str = "random"
    seed: int = 0


def masses(setting: Setting, p: Law, q: Law, patch: Patch) -> tuple[dict[Text, float], float]:
    """What the rule emits, by text, with its probability; and how many drafts it accepts on average."""
    k, real = setting.k, setting.real
    strings = drafts_of(q, real, setting.one_hot)
    plan = list(itertools.product(strings, itertools.product((False, True), repeat=real), range(VOCAB)))
    slots, filler = len(plan), (0,) * (k - real)
    draft = torch.tensor([text + filler for (text, _), _, _ in plan]).view(slots, k)
    target = torch.stack([torch.stack([p[tuple(row[:i])] for i in range(k + 1)]) for row in draft.tolist()])
    laws = torch.stack([torch.stack([q[tuple(row[:i])] for i in range(k)]) for row in draft.tolist()])
    pattern = torch.tensor([passed + (True,) * (k - real) for _, passed, _ in plan]).view(slots, k)
    last = torch.tensor([token for _, _, token in plan])
    script, drawn = Scripted(pattern), {}

    def draw_last(weights: Tensor, *_: Tensor) -> Tensor:
        drawn["law"] = weights / weights.sum(dim=-1, keepdim=True)
        return last

    patch.setattr(draft_verify, "acceptance_uniforms", lambda *_: script)
    patch.setattr(draft_verify, "draw_last", draw_last)
    tokens, accepted = draft_verify.verify_drafts(
        target, None if setting.one_hot else laws, draft, torch.full((slots,), real),
        torch.zeros(slots, dtype=torch.long), torch.arange(k + 1).expand(slots, -1),
        setting.rule == "block",
    )  # fmt: skip
    weight = torch.tensor([mass for (_, mass), _, _ in plan], dtype=torch.float64)
    weight = weight * drawn["law"].gather(1, last[:, None])[:, 0]
    chances = torch.where(pattern, script.chances, 1 - script.chances)[:, :real]
    weight = weight * chances.prod(dim=-1)
    found: defaultdict[Text, float] = defaultdict(float)
    for row, count, mass in zip(tokens.tolist(), accepted.tolist(), weight.tolist(), strict=True):
        if mass > 0:
            assert row[count + 1 :] == [NO_TOKEN] * (k - count)
            found[tuple(row[: count + 1])] += mass
    return found, float((weight * accepted).sum())


def law_error(setting: Setting, patch: Patch) -> float:
    """Greatest difference of the emitted texts' law, continued by the target, from the target's own."""
    p, q = conditionals(setting.k + 1, setting.seed, setting.kind)

    def extend(law: defaultdict[Text, float], text: Text, mass: float) -> None:
        if len(text) == setting.k + 1:
            law[text] += mass
            return
        for token in range(VOCAB):
            extend(law, (*text, token), mass * float(p[text][token]))

    wanted: defaultdict[Text, float] = defaultdict(float)
    extend(wanted, (), 1.0)
    got: defaultdict[Text, float] = defaultdict(float)
    for text, mass in masses(setting, p, q, patch)[0].items():
        extend(got, text, mass)
    return max(abs(got[text] - wanted[text]) for text in {*got, *wanted})


@pytest.mark.covers(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "masked", "equal"])
def test_the_joint_law_is_the_targets(
    rule: str, one_hot: bool, k: int, kind: str, monkeypatch: Patch
) -> None:
    for real in {k, k - 1, 0}:
        for seed in range(3):
            error = law_error(Setting(rule, k, real, one_hot, kind, seed), monkeypatch)
            assert error < LIMIT_OF_ERROR, f"the law differs by {error:.3g}"


@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
def test_a_block_accepts_no_less(one_hot: bool, monkeypatch: Patch) -> None:
    gains = []
    for seed in range(10):
        p, q = conditionals(4, seed, "random")
        single, block = (
            masses(Setting(rule, 3, 3, one_hot, seed=seed), p, q, monkeypatch)[1] for rule in RULES
        )
        gains.append(block - single)
    assert min(gains) > -LIMIT_OF_ERROR
    assert (max(gains) > 0.05) == (not one_hot)
    assert not one_hot or max(gains) < LIMIT_OF_ERROR


# -- seeded faults -----------------------------------------------------------------------------------

Mutation = Callable[[Patch], None]
_ratio = draft_verify.draft_ratios


def _weights(change: Callable[..., Tensor]) -> Mutation:
    """Another law of the last token, given the right one and its arguments."""

    def apply(patch: Patch) -> None:
        right = draft_verify.last_token_weights
        patch.setattr(draft_verify, "last_token_weights", lambda *arguments: change(right, *arguments))

    return apply


def _chances(change: Callable[..., tuple[Tensor, Tensor]]) -> Mutation:
    def apply(patch: Patch) -> None:
        right = draft_verify.block_chances
        patch.setattr(draft_verify, "block_chances", lambda *arguments: change(right, *arguments))

    return apply


def _passed(change: Callable[[Tensor], Tensor]) -> Mutation:
    """Other tests than the comparison says passed."""

    def apply(patch: Patch) -> None:
        compare = Scripted.__lt__
        patch.setattr(Scripted, "__lt__", lambda self, chances: change(compare(self, chances)))

    return apply


def _uncapped(right: Callable[..., tuple[Tensor, Tensor]], *arguments: Tensor) -> tuple[Tensor, Tensor]:
    joint = draft_verify.draft_ratios(*arguments[:3]).cumprod(dim=-1)
    joint = torch.cat((torch.ones_like(joint[:, :1]), joint), dim=1).clamp(max=1)
    return right(*arguments)[0], joint


MUTANTS: dict[str, tuple[Mutation, Setting]] = {
    "the target's row for the residual": (
        _weights(lambda right, p, q, x, n, a, s: right(p, q, x, a, a, s)),
        Setting("rejection", 2, 2, False),
    ),
    "the residual is not clamped": (
        _weights(
            lambda right, p, q, x, n, a, s: torch.where(
                (a < n)[:, None],
                (p[:, :-1] - q).abs().gather(1, a.clamp(max=1)[:, None, None].expand(-1, 1, 3))[:, 0],
                right(p, q, x, n, a, s),
            )
        ),
        Setting("rejection", 2, 2, False),
    ),
    "the residual comes from the next row": (
        _weights(lambda right, p, q, x, n, a, s: right(p.roll(-1, 1), q, x, n, a, s)),
        Setting("rejection", 2, 2, False),
    ),
    "the bonus comes from the last row": (
        _weights(
            lambda right, p, q, x, n, a, s: torch.where(
                (a == n)[:, None], p[:, -1], right(p, q, x, n, a, s)
            )
        ),
        Setting("rejection", 3, 2, False),
    ),
    "a drawn draft is taken for certain": (
        lambda patch: patch.setattr(draft_verify, "draft_ratios", lambda p, q, x: _ratio(p, None, x)),
        Setting("rejection", 2, 2, False),
    ),
    "a certain draft is taken for drawn": (
        lambda patch: patch.setattr(
            draft_verify, "draft_ratios", lambda p, q, x: _ratio(p, torch.full_like(p[:, 1:], 0.5), x)
        ),
        Setting("rejection", 2, 2, True),
    ),
    "a draft after a rejected one is accepted": (
        _passed(lambda passed: passed.flip(-1).cumsum(dim=-1).flip(-1) > 0),
        Setting("rejection", 2, 2, False),
    ),
    "a block ends at its first failure": (
        _passed(lambda passed: passed.long().cumprod(dim=-1) > 0),
        Setting("block", 3, 3, False),
    ),
    "a block's residual is not scaled": (
        _weights(lambda right, p, q, x, n, a, s: right(p, q, x, n, a, torch.ones_like(s))),
        Setting("block", 3, 3, False),
    ),
    "a block's joint ratio is capped at the end only": (
        _chances(_uncapped),
        Setting("block", 3, 3, False),
    ),
    "a block's inner prefixes pass by the joint ratio": (
        _chances(lambda right, *arguments: (right(*arguments)[1][:, 1:], right(*arguments)[1])),
        Setting("block", 3, 3, False),
    ),
    "a shorter block is taken for a whole one": (
        _chances(lambda right, p, q, x, n: right(p, q, x, torch.full_like(n, x.shape[1]))),
        Setting("block", 3, 2, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fault_is_seen(mutant: str, monkeypatch: Patch) -> None:
    mutation, setting = MUTANTS[mutant]
    assert law_error(setting, monkeypatch) < LIMIT_OF_ERROR
    mutation(monkeypatch)
    assert law_error(setting, monkeypatch) > 1e-3


# -- the real noise ----------------------------------------------------------------------------------


def statistic_of_first_tokens(rule: str, draft_stream: int) -> float:
    """Chi-square of the first token over 30,000 positions; four tokens, most drafts rejected."""
    count = 30_000
    p = torch.tensor([0.35, 0.30, 0.10, 0.25])
    q = torch.tensor([0.05, 0.10, 0.45, 0.40])
    start = torch.arange(count)
    seed = torch.full((count,), 99)
    positions = start[:, None] + count * torch.arange(3)
    draft = torch.stack(
        [(q.log() + gumbel(seed, positions[:, i], draft_stream, 4)).argmax(-1) for i in range(2)], dim=1
    )
    laws = (p.expand(count, 3, 4), q.expand(count, 2, 4))
    given = (*laws, draft, torch.full((count,), 2), seed, positions)
    tokens, accepted = draft_verify.verify_drafts(*given, rule == "block")
    assert (accepted == 0).float().mean() > 0.3
    expected = p.double() * count
    observed = torch.bincount(tokens[:, 0], minlength=4).double()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("rule", RULES)
def test_streams_are_disjoint(rule: str, monkeypatch: Patch) -> None:
    """A right rule stays below 30.7 (df 3, 1e-6); noise shared with the draft or the test does not."""
    assert len({STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPTANCE, STREAM_RESIDUAL}) == 4
    assert statistic_of_first_tokens(rule, STREAM_DRAFT) < 30.7
    assert statistic_of_first_tokens(rule, STREAM_RESIDUAL) > 50
    monkeypatch.setattr(draft_verify, "STREAM_ACCEPTANCE", STREAM_RESIDUAL)
    assert statistic_of_first_tokens(rule, STREAM_DRAFT) > 50
