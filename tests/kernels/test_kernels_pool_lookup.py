"""Lookup in a pool: every form against a plain search, and nothing written where nothing is longer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from spd.kernels.round import pool_lookup as torch_form
from spd.runtime.proposers.ngram import LookupPool
from tests.kernels.forms import form_of, needs_compiled, round_state

NAMES = ("tokens", "length", "active", "draft", "num_drafts", "match")
WIDTH = 60
WIDE = 12
THERE = -7
SHORTEST = 3
LONGEST = 8
POOL_TOKENS = 200


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiled), "triton"])
def op(request: pytest.FixtureRequest) -> Any:
    return form_of(request, request.param, "round.pool_lookup")


def match_in(text: Sequence[int], suffix: Sequence[int]) -> dict[int, int]:
    """Return the length of the suffix's match before each token of a text."""
    lengths = {}
    for end in range(len(text) - 1):
        size = 0
        while size < min(LONGEST, len(suffix), end + 1) and text[end - size] == suffix[-1 - size]:
            size += 1
        lengths[end + 1] = size
    return lengths


def expected(
    texts: Sequence[Sequence[int]], suffix: Sequence[int], k: int, least: int
) -> tuple[int, list[list[int]]]:
    """Return the longest match above `least`, or 0, and each draft of up to k tokens behind such a one."""
    matches = [
        (size, text[start : start + k])
        for text in texts
        for start, size in match_in(text, suffix).items()
    ]
    best = max((size for size, _ in matches), default=0)
    if best <= max(least, SHORTEST - 1):
        return 0, []
    return best, [list(draft) for size, draft in matches if size == best]


def planted(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return texts of a pool, and the texts of slots that often end as a part of one does."""
    rng = random.Random(seed)
    texts = [[rng.randrange(40) for _ in range(rng.randint(1, 50))] for _ in range(4)]
    slots = []
    for _ in range(5):
        text = rng.choice(texts)
        end = rng.randint(0, len(text))
        piece = text[max(0, end - rng.randint(1, 12)) : end]
        slots.append([*(rng.randrange(40) for _ in range(rng.randint(1, 20))), *piece])
    return texts, slots


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_follow_the_longest_match(op: Any, device: str, seed: int, behind: int) -> None:
    """Drafts of slot 3 are there already, slot 4 is not active; behind drafts these are the suffix."""
    texts, slots = planted(seed)
    pool = LookupPool(POOL_TOKENS, SHORTEST, device)
    for text in texts:
        pool.add_text(text)
    rng = random.Random(seed)
    tokens = torch.full((len(slots), WIDTH), 1)
    draft = torch.full((len(slots), WIDE), THERE)
    for s, text in enumerate(slots):
        draft[s, :behind] = torch.tensor(text[len(text) - behind :])
        tokens[s, : len(text)] = torch.tensor(text)
    length = torch.tensor([max(1, len(text) - behind) for text in slots])
    match = torch.tensor([0, 0, 0, 6, 0])
    active = torch.tensor([True, True, True, True, False])
    counts = torch.full((len(slots),), behind)
    k = rng.choice((behind, 5, WIDE))
    before = [t.to(device) for t in (tokens, length, active, draft, counts, match)]
    state = [t.clone() for t in before]
    slots_state = round_state(**dict(zip(NAMES, state, strict=True)))
    op.pool_lookup(slots_state, pool.texts, k, SHORTEST, LONGEST, behind)
    assert all(torch.equal(a, b) for a, b in zip(before[:3], state[:3], strict=True))
    drafted, counted, matched = (t.tolist() for t in state[3:])
    for s, drafts in enumerate(drafted):
        count = counted[s]
        size = matched[s]
        least = int(match[s])
        best, choices = expected(texts, slots[s], k - behind, least)
        is_skipped = not active[s] or (behind and (least or len(slots[s]) <= behind))
        if is_skipped or not best:
            assert (drafts, count, size) == (draft[s].tolist(), behind, least), s
            continue
        assert drafts[:behind] == draft[s, :behind].tolist()
        assert drafts[behind:count] in choices and size == (-behind if behind else best), s
        assert drafts[count:] == [THERE] * (WIDE - count)


def test_forms_agree_where_many_places_match(device: str, request: pytest.FixtureRequest) -> None:
    """A bucket keeps the latest places; of equal ones all forms take the same."""
    rng = random.Random(0)
    results = []
    for name in ("torch", "native", "triton"):
        if name == "native" and (needs_compiled.args[0] or device != "cpu"):
            continue
        form = form_of(request, name, "round.pool_lookup")
        rng.seed(1)
        pool = LookupPool(POOL_TOKENS, SHORTEST, device)
        for _ in range(8):
            pool.add_text([rng.randrange(3) for _ in range(rng.randint(1, 90))])
        tokens = torch.tensor([[rng.randrange(3) for _ in range(WIDTH)] for _ in range(6)])
        state = round_state(
            tokens=tokens.to(device),
            length=torch.tensor([1, 2, 3, 20, 40, 60], device=device),
            active=torch.ones(6, dtype=torch.bool, device=device),
            draft=torch.full((6, WIDE), THERE, device=device),
            num_drafts=torch.zeros(6, dtype=torch.long, device=device),
            match=torch.zeros(6, dtype=torch.long, device=device),
        )
        form.pool_lookup(state, pool.texts, WIDE, SHORTEST, LONGEST)
        results.append([getattr(state, name).tolist() for name in NAMES[3:]])
    assert all(result == results[0] for result in results)
    assert sum(results[0][1]) > 0


def search(op: Any, device: str, pool: LookupPool, suffix: Sequence[int], match: int = 0) -> Any:
    """Return the drafts behind one text, and the match; `match` is that of the slot's own text."""
    state = round_state(
        tokens=torch.tensor([[*suffix, 0, 0, 0]], device=device),
        length=torch.tensor([len(suffix)], device=device),
        active=torch.ones(1, dtype=torch.bool, device=device),
        draft=torch.full((1, WIDE), THERE, device=device),
        num_drafts=torch.zeros(1, dtype=torch.long, device=device),
        match=torch.tensor([match], device=device),
    )
    op.pool_lookup(state, pool.texts, WIDE, SHORTEST, LONGEST)
    return state.draft[0, : int(state.num_drafts[0])].tolist(), int(state.match[0])


def test_a_longer_match_of_the_own_text_stays(op: Any, device: str) -> None:
    pool = LookupPool(POOL_TOKENS, SHORTEST, device)
    pool.add_text([9, 1, 2, 3, 4, 5, 6, 7])
    assert search(op, device, pool, (8, 1, 2, 3, 4, 5), match=5) == ([], 5)
    assert search(op, device, pool, (8, 1, 2, 3, 4, 5), match=4) == ([6, 7], 5)


def test_of_an_n_gram_that_occurs_often_the_latest_places_are_kept(op: Any, device: str) -> None:
    """Eight of twelve, in one text or in several; the others match by the n-gram alone."""
    pieces = [[100 + number, 1, 2, 3, 50 + number] for number in range(12)]
    for texts in ([[token for piece in pieces for token in piece]], pieces):
        pool = LookupPool(POOL_TOKENS, SHORTEST, device)
        for text in texts:
            pool.add_text(text)
        sizes = [search(op, device, pool, (100 + number, 1, 2, 3))[1] for number in range(12)]
        assert sizes == [3] * 4 + [4] * 8
        drafts, _ = search(op, device, pool, (111, 1, 2, 3))
        assert drafts == [61]


def test_a_pool_keeps_the_latest_texts(device: str) -> None:
    """Old texts give way, a text longer than the pool is cut at its beginning, an n-gram needs n tokens."""
    pool = LookupPool(20, SHORTEST, device)

    def drafts_after(*suffix: int) -> Any:
        return search(torch_form, device, pool, suffix)[0]

    pool.add_text([])
    pool.add_text([1, 2])
    pool.add_text([1, 2, 3, 4, 5])
    assert drafts_after(1, 2, 3) == [4, 5] and drafts_after(3, 4, 5) == []
    assert drafts_after(4, 1, 2) == [], "two texts are not one"
    pool.add_text([11, 12, 13, 14, 15, 16, 17, 18, 19])
    assert drafts_after(1, 2, 3) == [4, 5], "it is not full yet"
    pool.add_text([21, 22, 23, 24, 25])
    assert drafts_after(1, 2, 3) == [], "it was the oldest"
    assert drafts_after(11, 12, 13) == [14, 15, 16, 17, 18, 19]
    assert drafts_after(21, 22, 23) == [24, 25]
    pool.add_text([*range(100, 150)])
    assert drafts_after(100, 101, 102) == drafts_after(21, 22, 23) == []
    assert drafts_after(140, 141, 142) == [143, 144, 145, 146, 147, 148, 149]
