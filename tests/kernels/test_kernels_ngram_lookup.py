"""Prompt lookup against a plain search, with blocks small enough that everything crosses them.

Alone, and over drafts that are there already; and what it says of its matches.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.forms import HERE, needs_compiled
from tests.prompt_lookup import match_length, search

WIDTH, WIDE = 150, 12
NAMES = ("tokens", "length", "active", "draft", "num_drafts", "match")
THERE, COUNT, MATCH = -7, 9, -5
"""What stands in drafts, their numbers and matches before."""


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiled), "short", "long", "whole"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every form; Triton's kernels with one program a slot, with several, and as they are."""
    if request.param == "native":
        if request.getfixturevalue("device") != "cpu":
            pytest.skip("C kernels run on a CPU")
        return request.getfixturevalue("native_with")(HERE[0])
    if request.param == "torch":
        return importlib.import_module("spd.kernels.round.ngram_lookup")
    pytest.importorskip("triton")
    module = importlib.import_module("spd.kernels.round.ngram_lookup_triton")
    if request.param != "whole":
        monkeypatch.setattr(module, "BLOCK", 16)
        monkeypatch.setattr(module, "PARTS", 4)
        monkeypatch.setattr(module, "ONE_PROGRAM", 1 << 30 if request.param == "short" else 8)
    return module


def lookup(
    op: Any,
    device: str,
    texts: Sequence[Sequence[int] | None],
    k: int,
    sizes: tuple[int, int],
    junk: int = 0,
    slack: int = 0,
    width: int = WIDTH,
) -> list[list[int]]:
    """Drafts of a batch in a state of one more slot; None is a silent slot whose row is full of matches.

    junk fills the rows after the texts; slack is how far the host's bound lies above the longest.
    """
    tokens = torch.full((len(texts) + 1, width), junk)
    length, active = torch.full((len(texts) + 1,), width - 3), torch.zeros(len(texts) + 1, dtype=torch.bool)
    for s, text in enumerate(texts):
        if text is not None:
            tokens[s, : len(text)] = torch.tensor(text)
            length[s], active[s] = len(text), True
    bound = min(width, slack + max((len(text) for text in texts if text is not None), default=0))
    draft = torch.full((len(texts) + 1, WIDE), -7)
    counts = torch.full((len(texts) + 1,), 9)
    matched = torch.full((len(texts) + 1,), 9)
    state = [tensor.to(device) for tensor in (tokens, length, active, draft, counts, matched)]
    kept = [tensor.clone() for tensor in state[:3]]
    rows = [tensor[: len(texts)] for tensor in state]
    op.ngram_lookup(SimpleNamespace(**dict(zip(NAMES, rows, strict=True))), k, *sizes, bound)
    assert all(torch.equal(now, then) for now, then in zip(state[:3], kept, strict=True))
    drafts, numbers = state[3].tolist(), state[4].tolist()
    assert numbers.pop() == 9 and drafts.pop() == [-7] * WIDE and state[5][-1] == 9
    found = []
    for row, count in zip(drafts, numbers, strict=True):
        assert 0 <= count <= k
        assert row[count:] == [0] * (k - count) + [-7] * (WIDE - k)
        found.append(row[:count])
    return found


def random_text(rng: random.Random, most: int = WIDTH - 20) -> list[int]:
    """Tokens of a small alphabet, often with a piece of the past at the end."""
    text = [rng.randrange(1, rng.choice((2, 3, 4, 20))) for _ in range(rng.randint(1, most))]
    if rng.random() < 0.5:
        start = rng.randrange(len(text))
        text = (text + text[start : start + rng.randint(1, 40)])[:most]
    return text


@pytest.mark.covers(1)
@pytest.mark.parametrize("seed", range(16))
def test_drafts_equal_a_plain_search(op: Any, device: str, seed: int) -> None:
    rng = random.Random(seed)
    slots = 5 if seed % 4 else 1
    texts = [None if rng.random() < 0.2 else random_text(rng) for _ in range(slots)]
    for k in (1, 4, WIDE):
        shortest = rng.randint(1, 4)
        longest = min(64, shortest + rng.choice((0, 1, 4, 5, 8, 60)))
        expected = [[] if text is None else search(text, k, shortest, longest) for text in texts]
        junk, slack = rng.randrange(3), rng.randrange(20)
        assert lookup(op, device, texts, k, (shortest, longest), junk, slack) == expected


@pytest.mark.parametrize("end", [2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 110])
def test_a_match_anywhere_is_found(op: Any, device: str, end: int) -> None:
    """Around the edges of blocks, and of the blocks that one program takes in turn."""
    for length in (112, 113, 120, 128, 129):
        text = list(range(10, 10 + length))
        text[-3:] = text[end - 2 : end + 1]
        assert lookup(op, device, [text], 4, (1, 8)) == [search(text, 4, 1, 8)]


def test_the_longest_match_comes_before_a_later_one(op: Any, device: str) -> None:
    text = [1, 2, 3, 7, 7, 9, *range(20, 60), 3, 8, 1, 2, 3]
    assert lookup(op, device, [text], 2, (1, 3)) == [[7, 7]]
    assert lookup(op, device, [text], 2, (1, 1)) == [[8, 1]]


def test_of_equal_matches_the_most_recent_wins(op: Any, device: str) -> None:
    text = [1, 2, 5, *range(20, 60), 1, 2, 6, 1, 2]
    assert lookup(op, device, [text], 3, (2, 4)) == [[6, 1, 2]]
    assert lookup(op, device, [[1, 2, 5, 1, 2, 6, 1, 2]], 3, (2, 4)) == [[6, 1, 2]]


@pytest.mark.parametrize("longest", [1, 2, 4, 5, 6, 8, 9, 33, 64])
def test_matches_longer_than_the_longest_are_equal(op: Any, device: str, longest: int) -> None:
    """The early occurrence is one token longer than the late one; only a longer limit tells them apart."""
    for size in (longest - 1, longest, longest + 1):
        suffix = list(range(100, 100 + size + 1))
        text = [*suffix, 7, *suffix[1:], 8, *suffix]
        assert lookup(op, device, [text], 1, (1, longest), width=250) == [search(text, 1, 1, longest)]


def test_a_period_goes_on(op: Any, device: str) -> None:
    """The match may overlap the suffix; nothing behind the text is proposed, but the text again."""
    assert lookup(op, device, [[4, 4, 4]], 8, (1, 8), junk=7, slack=9) == [[4] * 8]
    assert lookup(op, device, [[1, 2, 1, 2]], 7, (1, 8), junk=1, slack=9) == [[1, 2, 1, 2, 1, 2, 1]]
    assert lookup(op, device, [[4] * 100], 8, (1, 64), junk=7, slack=9) == [[4] * 8]


def test_a_match_ends_at_the_beginning_of_the_text(op: Any, device: str) -> None:
    """Nothing stands before the first token, whatever a lane beside it would read."""
    assert lookup(op, device, [[5, 9, 5]], 2, (1, 8)) == [[9, 5]]
    assert lookup(op, device, [[0, 9, 0, 0]], 2, (2, 8)) == [[]]
    assert lookup(op, device, [[0, 0, 9, 0, 0]], 2, (2, 8)) == [[9, 0]]
    assert lookup(op, device, [[0, 0, 0, 1], [0, 3, 1, 0]], 2, (2, 8)) == [[], []]


def test_short_matches_are_no_matches(op: Any, device: str) -> None:
    text = [1, 2, 9, 1, 2]
    assert lookup(op, device, [text], 4, (2, 8)) == [[9, 1, 2, 9]]
    assert lookup(op, device, [text], 4, (3, 8)) == [[]]
    assert lookup(op, device, [[5]], 4, (1, 8)) == [[]]
    assert lookup(op, device, [[5]], 4, (1, 8), width=1) == [[]]
    assert lookup(op, device, [[5, 5]], 1, (1, 1), width=2) == [[5]]


def test_silent_slots_draft_nothing(op: Any, device: str) -> None:
    assert lookup(op, device, [None, [1, 1], None], 2, (1, 1), junk=1) == [[], [1, 1], []]
    assert lookup(op, device, [None, None], 2, (1, 1)) == [[], []]


def test_no_drafts_are_asked_for(op: Any, device: str) -> None:
    assert lookup(op, device, [[1, 1, 1]], 0, (1, 1)) == [[]]


def test_a_long_row_walks_all_its_blocks(device: str) -> None:
    """The kernels as they are launched for a model, over more blocks than programs."""
    pytest.importorskip("triton")
    op = importlib.import_module("spd.kernels.round.ngram_lookup_triton")
    width = op.BLOCK * op.PARTS + 700
    length = width - 50
    for end in (5, op.BLOCK, op.BLOCK * op.PARTS - 1, op.BLOCK * op.PARTS, op.BLOCK * op.PARTS + 300):
        text = list(range(10, 10 + length))
        text[-5:] = text[end - 4 : end + 1]
        assert lookup(op, device, [text, [1, 1]], 4, (3, 8), width=width) == [text[end + 1 : end + 5], []]


@pytest.mark.covers(1)
@pytest.mark.parametrize("seed", range(12))
def test_a_match_takes_the_place_of_drafts(op: Any, device: str, seed: int) -> None:
    """Of every slot apart: silent ones keep all, those without a match their drafts."""
    rng = random.Random(seed)
    slots, shortest, longest = 6, rng.randint(1, 5), rng.randint(5, 9)
    over = seed % 3 > 0
    texts = [random_text(rng) for _ in range(slots)]
    active = torch.tensor([rng.random() < 0.8 for _ in range(slots)])
    tokens = torch.zeros(slots, WIDTH, dtype=torch.long)
    for s, text in enumerate(texts):
        tokens[s, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(text) for text in texts])
    for k in (0, 1, 4, WIDE):
        counts = torch.tensor([rng.choice((0, COUNT)) for _ in range(slots)])
        state = [
            tokens,
            length,
            active,
            torch.full((slots, WIDE), THERE),
            counts,
            torch.full((slots,), MATCH),
        ]
        rows = [tensor.clone().to(device) for tensor in state]
        asked = SimpleNamespace(**dict(zip(NAMES, rows, strict=True)))
        op.ngram_lookup(asked, k, shortest, longest, int(length.max()), over=over)
        for s, text in enumerate(texts):
            draft, count, matched = (rows[i][s].tolist() for i in (3, 4, 5))
            size = match_length(text, longest) if active[s] else 0
            found = size if size >= shortest else 0
            if not over or (found and active[s]):
                expected = search(text, k, shortest, longest) if found else []
                assert (draft[:k], count) == (expected + [0] * (k - len(expected)), len(expected))
            else:
                assert (draft[:k], count) == ([THERE] * k, counts[s])
            assert draft[k:] == [THERE] * (WIDE - k)
            assert matched == (found if active[s] else MATCH)
