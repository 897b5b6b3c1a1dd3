"""The joint law of what rounds commit equals the target's own, by exact enumeration in float64.

How it is enumerated stands in `round_law`; errors stay below 1e-12.
"""

from __future__ import annotations

import pytest

from spd.runtime.round.sampling_params import SamplingParams
from tests.runtime.round_law import (
    EVERYTHING,
    MIN_TOKENS,
    PENALTIES,
    PLAIN,
    STOPS_AND_LIMIT,
    TRUNCATION,
    Case,
    check_emissions,
    check_law,
)
from tests.runtime.target_law import DRAFT_LAWS


@pytest.mark.covers(2)
@pytest.mark.parametrize("draft_law", DRAFT_LAWS)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_one_round_has_the_targets_law(k: int, masked: bool, draft_law: str) -> None:
    check_law(Case((k,), seed=k, masked=masked), draft_law)


@pytest.mark.parametrize("ks", [(1, 1), (0, 2), (2, 0, 1), (1, 1, 1)])
def test_rounds_in_a_row_have_the_targets_law(ks: tuple[int, ...]) -> None:
    check_law(Case(ks, seed=11), "random", "only-zeros-match")


@pytest.mark.covers(2)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("stops", [(), (2,), (0, 1)])
def test_texts_cut_by_stop_ids_and_limits_have_the_targets_cut_law(
    stops: tuple[int, ...], limit: int
) -> None:
    params = SamplingParams(temperature=1.0, stop_token_ids=stops, max_tokens=limit)
    check_law(Case((3,), params, seed=limit), "random", "equal")
    check_law(Case((1, 1), params, seed=limit), "random", "equal")


@pytest.mark.parametrize(
    "params",
    [PENALTIES, MIN_TOKENS, TRUNCATION, EVERYTHING],
    ids=["penalties", "min-tokens", "truncation", "everything"],
)
@pytest.mark.parametrize("ks", [(2,), (3,), (1, 1)])
def test_processed_rows_have_the_law_of_the_definition(ks: tuple[int, ...], params: SamplingParams) -> None:
    check_law(Case(ks, params, seed=5), "random", "equal")


@pytest.mark.parametrize(
    "params",
    [PLAIN, PENALTIES, MIN_TOKENS, TRUNCATION, EVERYTHING],
    ids=["plain", "penalties", "min-tokens", "truncation", "everything"],
)
def test_a_head_that_draws_by_itself_has_the_targets_law(params: SamplingParams) -> None:
    check_law(Case((2,), params, seed=7, head=True), "random", "equal")
    check_law(Case((1, 1), params, seed=7, head=True), "random")


@pytest.mark.parametrize("ks", [(3,), (1, 1)])
def test_ids_beyond_the_vocabulary_change_no_law(ks: tuple[int, ...]) -> None:
    check_law(Case(ks, seed=6, odd_drafts=True), "random", "equal")


@pytest.mark.covers(2)
@pytest.mark.parametrize("params", [PLAIN, STOPS_AND_LIMIT], ids=["plain", "stops-and-limit"])
@pytest.mark.parametrize("odd_drafts", [False, True], ids=["known", "odd"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_every_committed_token_is_the_targets_draw_for_its_own_context(
    masked: bool, odd_drafts: bool, params: SamplingParams
) -> None:
    """With `masked` some samples have no finite logit, stop ids too: they end a text with an error."""
    check_emissions(Case((3,), params, masked=masked, odd_drafts=odd_drafts))
