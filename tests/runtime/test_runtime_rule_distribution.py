"""Rejection and block verification keep the target's joint distribution, enumerated and as sampled."""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import draft_verify
from spd.kernels.sampling.draft_verify import STREAM_DRAFT, STREAM_RESIDUAL
from spd.kernels.sampling.philox import random_bits, uniform
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams
from tests.runtime import seeded_faults as fault
from tests.runtime.round_distribution import (
    EVERYTHING,
    MIN_TOKENS,
    PENALTIES,
    PLAIN,
    STOPS_AND_LIMIT,
    TRUNCATION,
)
from tests.runtime.rule_distribution import RULES, Passing, RuleCase, check_rule, drawn_texts
from tests.runtime.seeded_faults import Mutation, Patch
from tests.runtime.target_distribution import PROMPT
from tests.runtime.test_runtime_sampler import FALSE_ALARM, assert_fair

COOL = SamplingParams(temperature=0.5)
BIASED = SamplingParams(temperature=1.0, logit_bias=((0, 1.5), (2, -1.0)))
PARAMETERS = {
    "cool": COOL,
    "bias": BIASED,
    "penalties": PENALTIES,
    "min-tokens": MIN_TOKENS,
    "truncation": TRUNCATION,
    "everything": EVERYTHING,
    "stops-and-limit": STOPS_AND_LIMIT,
}
by_rule = pytest.mark.parametrize("rule", RULES)
by_draft = pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
TWO = RuleCase((2,), seed=5)
CERTAIN = RuleCase((2,), seed=5, drawn=False)
SLOTS = 20_000


@pytest.mark.covers(2)
@by_rule
@by_draft
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_round_has_the_targets_distribution(
    k: int, masked: bool, drawn: bool, rule: str
) -> None:
    check_rule(RuleCase((k,), seed=k, masked=masked, rule=rule, drawn=drawn))


@pytest.mark.covers(2)
@by_rule
@by_draft
@pytest.mark.parametrize("ks", [(1, 1), (0, 2), (2, 1), (1, 1, 1)])
def test_rounds_in_a_row_have_the_targets_distribution(
    ks: tuple[int, ...], drawn: bool, rule: str
) -> None:
    check_rule(RuleCase(ks, seed=11, rule=rule, drawn=drawn))


@pytest.mark.covers(2)
@by_rule
@by_draft
@pytest.mark.parametrize("name", PARAMETERS)
def test_processed_rows_have_the_distribution_of_the_definition(
    name: str, drawn: bool, rule: str
) -> None:
    for ks in ((3,), (1, 1), (0, 2)):
        check_rule(RuleCase(ks, PARAMETERS[name], seed=5, rule=rule, drawn=drawn))


@by_rule
def test_a_drafter_of_the_targets_distribution_changes_none(rule: str) -> None:
    for params in (PLAIN, PENALTIES, TRUNCATION):
        check_rule(RuleCase((3,), params, seed=8, rule=rule, drafter="target"))


@by_rule
def test_ids_beyond_the_vocabulary_change_no_distribution(rule: str) -> None:
    check_rule(RuleCase((3,), seed=6, rule=rule, drawn=False, odd_drafts=True))


def target_rows(**step: Any) -> Mutation:
    """Return a mutation by which tested rows do not get a processing step."""
    with_step = lambda a: {"tensors": replace(a.tensors, **step)}  # noqa: E731
    return fault.operation("row_distributions", lambda a: with_step(a) if a.draft.shape[1] else {})


def draft_row(change: Any) -> Mutation:
    """Return a mutation of the parameters of the stored draft distributions."""
    changed = lambda a: {"tensors": replace(a.tensors, **change(a.tensors))}  # noqa: E731
    return fault.operation("row_distributions", lambda a: {} if a.draft.shape[1] else changed(a))


def stored_of_the_first_drafting(patch: Patch) -> None:
    draw = Sampler.draw_draft

    def changed(self: Sampler, runner: Any, hidden: Tensor, step: int, needs: Any) -> Tensor:
        assert self.draft_distributions is not None
        stored_distributions = self.draft_distributions.clone()
        drawn = draw(self, runner, hidden, step, needs)
        if (self.state.length > len(PROMPT)).any():
            self.draft_distributions.copy_(stored_distributions)
        return drawn

    patch.setattr(Sampler, "draw_draft", changed)


def last_token(change: Callable[..., Tensor]) -> Mutation:
    """Return a mutation of the last token's distribution; `change` gets the original function."""
    right = draft_verify.last_token_weights

    def changed(
        target: Tensor,
        draft_probs: Tensor,
        draft: Tensor,
        num_drafts: Tensor,
        accepted: Tensor,
        scale: Tensor,
    ) -> Tensor:
        return change(right, target, draft_probs, draft, num_drafts, accepted, scale)

    return lambda patch: patch.setattr(draft_verify, "last_token_weights", changed)


def block_chances(change: Callable[..., tuple[Tensor, Tensor]]) -> Mutation:
    """Return a mutation of a block's acceptance probabilities and joint ratios."""
    right = draft_verify.block_chances
    return lambda patch: patch.setattr(draft_verify, "block_chances", partial(change, right))


def passed(change: Callable[[Tensor], Tensor]) -> Mutation:
    """Return a mutation of which tests pass."""
    right = Passing.__lt__
    return lambda patch: patch.setattr(
        Passing, "__lt__", lambda self, chances: change(right(self, chances))
    )


def uncapped(
    right: Callable[..., tuple[Tensor, Tensor]],
    target: Tensor,
    draft_probs: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
) -> tuple[Tensor, Tensor]:
    joint = draft_verify.draft_ratios(target, draft_probs, draft).cumprod(dim=-1)
    joint = torch.cat((torch.ones_like(joint[:, :1]), joint), dim=1).clamp(max=1)
    return right(target, draft_probs, draft, num_drafts)[0], joint


def unclamped(
    right: Callable[..., Tensor], p: Tensor, q: Tensor, x: Tensor, *arguments: Tensor
) -> Tensor:
    n, a, _ = arguments
    at = a.clamp(max=1)[:, None, None].expand(-1, 1, 3)
    residual = (p[:, :-1] - q).abs().gather(1, at)[:, 0]
    return torch.where((a < n)[:, None], residual, right(p, q, x, *arguments))


def stored_distributions(change: Callable[[Any], Tensor]) -> Mutation:
    """Return a mutation of the stored draft distributions."""
    return fault.operation("verify_drafts", lambda a: {"draft_probs": change(a)})


def one_by_one(_: object, p: Tensor, q: Tensor, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    return draft_verify.draft_ratios(p, q, x).clamp(max=1), torch.ones_like(p[..., 0])


def last_row(
    right: Any, p: Tensor, q: Tensor, x: Tensor, n: Tensor, a: Tensor, s: Tensor
) -> Tensor:
    return torch.where((a == n)[:, None], p[:, -1], right(p, q, x, n, a, s))


commit, distributions = (
    functools.partial(fault.operation, name) for name in ("round_commit", "row_distributions")
)
PENALISED = replace(TWO, params=PENALTIES)
SINGLY = replace(TWO, rule="rejection")
ROUNDS = RuleCase((1, 1), seed=5)
THREE = RuleCase((3,), seed=5)
MUTANTS: dict[str, tuple[Mutation, RuleCase]] = {
    "the rule sees no penalties": (target_rows(generated=None), PENALISED),
    "the rule sees no truncation": (target_rows(truncation=False), replace(TWO, params=TRUNCATION)),
    "the rule sees no bias": (target_rows(bias=None), replace(TWO, params=BIASED)),
    "the rule sees no minimum length": (
        target_rows(min_length=None),
        replace(TWO, params=MIN_TOKENS),
    ),
    "penalties see other drafts": (
        distributions(lambda a: {"draft": a.draft.roll(1, 1)}),
        PENALISED,
    ),
    "what is kept knows no temperature": (
        draft_row(lambda t: {"temperature": torch.ones_like(t.temperature)}),
        replace(TWO, params=COOL),
    ),
    "what is kept knows no bias": (
        draft_row(lambda t: {"bias": None}),
        replace(TWO, params=BIASED),
    ),
    "what is kept is of another step": (
        stored_distributions(lambda a: a.draft_probs.roll(1, 1)),
        TWO,
    ),
    "what is kept is a neighbour's": (
        stored_distributions(lambda a: a.draft_probs.roll(7, 0)),
        TWO,
    ),
    "what is kept is of an earlier round": (stored_of_the_first_drafting, ROUNDS),
    "a certain draft is drawn": (
        stored_distributions(lambda a: torch.full_like(a.target[:, 1:], 1 / 3)),
        CERTAIN,
    ),
    "drafts that do not count are tested": (
        fault.operation(
            "verify_drafts", lambda a: {"num_drafts": torch.full_like(a.num_drafts, 2)}
        ),
        replace(CERTAIN, rule="rejection"),
    ),
    "a block is tested one by one": (block_chances(one_by_one), TWO),
    "the residual of the target": (
        last_token(lambda f, p, q, x, n, a, s: f(p, q, x, a, a, s)),
        SINGLY,
    ),
    "the residual is not clamped": (last_token(unclamped), SINGLY),
    "the residual comes from the next row": (
        last_token(lambda f, p, q, x, n, a, s: f(p.roll(-1, 1), q, x, n, a, s)),
        SINGLY,
    ),
    "the bonus comes from the last row": (last_token(last_row), SINGLY),
    "one after a rejected one counts": (
        passed(lambda t: t.flip(-1).cumsum(dim=-1).flip(-1) > 0),
        SINGLY,
    ),
    "a block ends at its first failure": (
        passed(lambda tests: tests.long().cumprod(dim=-1) > 0),
        THREE,
    ),
    "a block's residual is not scaled": (
        last_token(lambda f, p, q, x, n, a, s: f(p, q, x, n, a, torch.ones_like(s))),
        THREE,
    ),
    "a block's joint ratio is capped at the end only": (block_chances(uncapped), THREE),
    "inner prefixes use the joint ratio": (
        block_chances(lambda f, p, q, x, n: (f(p, q, x, n)[1][:, 1:], f(p, q, x, n)[1])),
        THREE,
    ),
    "a shorter block is taken for a whole one": (
        block_chances(lambda right, p, q, x, n: right(p, q, x, torch.full_like(n, x.shape[1]))),
        THREE,
    ),
    "nothing is counted": (
        commit(lambda a: {"generated": None}),
        replace(ROUNDS, params=PENALTIES),
    ),
    "one draft more is committed": (
        commit(lambda a: {"accepted": torch.minimum(a.accepted + 1, a.num_drafts)}),
        SINGLY,
    ),
}
passes_unchanged = functools.cache(check_rule)
WORDS_OF_A_CATCH = "the distribution differs|do not add up|^lengths|^reasons|other tokens are told"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fault_is_caught(mutant: str, monkeypatch: Patch) -> None:
    mutation, case = MUTANTS[mutant]
    passes_unchanged(case)
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=WORDS_OF_A_CATCH):
        check_rule(case)


@pytest.mark.parametrize(
    ("rule", "drawn"), [("rejection", True), ("block", True), ("block", False)]
)
def test_drawn_texts_follow_the_target(rule: str, drawn: bool) -> None:
    """20,000 texts of four tokens, 81 kinds: a chi-square of 80 degrees, false alarm 1e-6."""
    assert FALSE_ALARM == 1e-6
    counts, expected, acceptance = drawn_texts(rule, drawn, SLOTS)
    assert counts.sum() == SLOTS
    assert 0.1 < acceptance < 0.6, "drafts are hardly ever accepted, or hardly ever rejected"
    assert_fair(counts, expected)


def keyed_by_position(seed: Tensor, positions: Tensor) -> Tensor:
    seed = seed.unsqueeze(-1).expand_as(positions)
    return uniform(random_bits(seed, positions, draft_verify.STREAM_ACCEPTANCE, 1)).squeeze(-1)


SAMPLER = "spd.runtime.round.sampler"
NOISE_MUTANTS: dict[str, tuple[tuple[Any, ...], str]] = {
    # A block that fails early has looked at the tests and drafts behind; rejection stops at the first.
    "a position's test is one": ((draft_verify, "acceptance_uniforms", keyed_by_position), "block"),
    "its draft is": ((f"{SAMPLER}.row_stream", lambda stream, row: stream), "block"),
    "a block's drafts share the target's": (
        (f"{SAMPLER}.row_stream", lambda stream, row: 0),
        "block",
    ),
    "drafts share the residual's": ((f"{SAMPLER}.STREAM_DRAFT", STREAM_RESIDUAL), "rejection"),
    "tests share the drafts'": ((draft_verify, "STREAM_ACCEPTANCE", STREAM_DRAFT), "rejection"),
}


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("mutant", NOISE_MUTANTS)
def test_shared_noise_is_seen(mutant: str, monkeypatch: Patch) -> None:
    change, rule = NOISE_MUTANTS[mutant]
    monkeypatch.setattr(*change)
    counts, expected, _ = drawn_texts(rule, True, SLOTS)
    with pytest.raises(AssertionError):
        assert_fair(counts, expected)
