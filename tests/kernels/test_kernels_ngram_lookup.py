"""Prompt lookup against a plain search, with blocks small enough that everything crosses them.

Alone, and over drafts that are there already; and what it says of its matches.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.kernels.forms import form_of, needs_compiled, round_state
from tests.prompt_lookup import match_length, search

WIDTH = 150
WIDE = 12
NAMES = ("tokens", "length", "active", "draft", "num_drafts", "match")
THERE = -7
COUNT = 9
MATCH = -5
"""What stands in drafts, their numbers and matches before."""
Found = tuple[list[int], int, int]
"""The first k drafts of a slot, their number, and its match."""


@pytest.fixture(
    params=["torch", pytest.param("native", marks=needs_compiled), "short", "long", "whole"]
)
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return every form; Triton's kernels with one program a slot, with several, and as they
    are."""
    one_program = {"short": 1 << 30, "long": 8, "whole": None}
    name = "triton" if request.param in one_program else request.param
    module = form_of(request, name, "round.ngram_lookup")
    if one_program.get(request.param):
        for constant, value in {
            "BLOCK": 16,
            "PARTS": 4,
            "ONE_PROGRAM": one_program[request.param],
        }.items():
            monkeypatch.setattr(module, constant, value)
    return module


def look_up(
    op: Any,
    device: str,
    texts: Sequence[Sequence[int] | None],
    k: int,
    sizes: tuple[int, int],
    junk: int = 0,
    slack: int = 0,
    width: int = WIDTH,
    over: bool = False,
) -> list[Found]:
    """Return a batch's drafts, in a state of one more slot; None is an inactive slot full of
    matches.

    junk fills the rows after the texts; slack is how far the host's bound lies above the longest.
    """
    rows = len(texts) + 1
    tokens = torch.full((rows, width), junk)
    length = torch.full((rows,), width - 3)
    active = torch.zeros(rows, dtype=torch.bool)
    for s, text in enumerate(texts):
        if text is not None:
            tokens[s, : len(text)] = torch.tensor(text)
            length[s] = len(text)
            active[s] = True
    bound = min(width, slack + max((len(text) for text in texts if text is not None), default=0))
    initial = (
        torch.full((rows, WIDE), THERE),
        torch.full((rows,), COUNT),
        torch.full((rows,), MATCH),
    )
    state = [tensor.to(device) for tensor in (tokens, length, active, *initial)]
    before = [tensor.clone() for tensor in state[:3]]
    slot_tensors = [tensor[: len(texts)] for tensor in state]
    op.ngram_lookup(
        round_state(**dict(zip(NAMES, slot_tensors, strict=True))),
        k,
        ngram_min=sizes[0],
        ngram_max=sizes[1],
        bound=bound,
        keep_drafts=over,
    )
    assert all(torch.equal(now, then) for now, then in zip(state[:3], before, strict=True))
    drafts, counts, matches = (tensor.tolist() for tensor in state[3:])
    assert (drafts.pop(), counts.pop(), matches.pop()) == ([THERE] * WIDE, COUNT, MATCH)
    assert all(row[k:] == [THERE] * (WIDE - k) for row in drafts)
    return [
        (row[:k], count, match) for row, count, match in zip(drafts, counts, matches, strict=True)
    ]


def expected(
    text: Sequence[int] | None, k: int, sizes: tuple[int, int], over: bool = False
) -> Found:
    """Return drafts by a plain search.

    Inactive slots keep their match, and drafts stay with `over`.
    """
    size = 0 if text is None else match_length(text, sizes[1])
    match = MATCH if text is None else size if size >= sizes[0] else 0
    if over and match <= 0:
        return [THERE] * k, COUNT, match
    drafts = [] if text is None else search(text, k, sizes[0], sizes[1])
    return drafts + [0] * (k - len(drafts)), len(drafts), match


def random_text(rng: random.Random, max_length: int = WIDTH - 20) -> list[int]:
    """Return tokens of a small alphabet, often with an earlier piece at the end."""
    text = [rng.randrange(rng.choice((1, 2, 3, 20))) for _ in range(rng.randint(1, max_length))]
    if rng.random() < 0.5:
        start = rng.randrange(len(text))
        text = (text + text[start : start + rng.randint(1, 40)])[:max_length]
    return text


@pytest.mark.covers(1)
@pytest.mark.parametrize("seed", range(16))
def test_drafts_equal_a_plain_search(op: Any, device: str, seed: int) -> None:
    rng = random.Random(seed)
    texts = [None if rng.random() < 0.2 else random_text(rng) for _ in range(5 if seed % 4 else 1)]
    for k in (0, 1, 4, WIDE):
        shortest = rng.randint(1, 4)
        over = rng.random() < 0.5
        sizes = (shortest, min(64, shortest + rng.choice((0, 1, 4, 5, 8, 60))))
        expected_drafts = [expected(text, k, sizes, over) for text in texts]
        width = rng.choice((WIDTH, max([4, *(len(text) for text in texts if text)])))
        drafts = look_up(
            op=op,
            device=device,
            texts=texts,
            k=k,
            sizes=sizes,
            junk=rng.randrange(3),
            slack=rng.randrange(20),
            width=width,
            over=over,
        )
        assert drafts == expected_drafts


def test_a_long_row_walks_all_its_blocks(device: str) -> None:
    """The kernels as they are launched for a model, over more blocks than programs."""
    pytest.importorskip("triton")
    op = importlib.import_module("spd.kernels.round.ngram_lookup_triton")
    width = op.BLOCK * op.PARTS + 700
    for end in (5, op.BLOCK, op.BLOCK * op.PARTS - 1, op.BLOCK * op.PARTS + 300):
        text = list(range(10, width - 40))
        text[-5:] = text[end - 4 : end + 1]
        (drafts, count, _), other = look_up(
            op=op, device=device, texts=[text, [1, 1]], k=4, sizes=(3, 8), width=width
        )
        assert drafts == text[end + 1 : end + 5] and count == 4 and other[1] == 0


def look_up_behind(
    op: Any,
    device: str,
    texts: Sequence[Sequence[int] | None],
    drafts: Sequence[Sequence[int]],
    k: int,
) -> list[Found]:
    """Return a batch's drafts after a search behind the first of them; None is an inactive slot."""
    behind = len(drafts[0])
    count = len(texts)
    tokens = torch.full((count, WIDTH), 1)
    length = torch.full((count,), WIDTH - WIDE)
    active = torch.tensor([text is not None for text in texts])
    draft = torch.full((count, WIDE), THERE)
    for s, text in enumerate(texts):
        draft[s, :behind] = torch.tensor(drafts[s])
        if text is not None:
            tokens[s, : len(text)] = torch.tensor(text)
            length[s] = len(text)
    # The slot before the last has a match already, the last one fewer drafts.
    num_drafts = torch.full((count,), behind)
    num_drafts[-1] = behind - 1
    match = torch.zeros(count, dtype=torch.long)
    match[-2] = 6
    state = [t.to(device) for t in (tokens, length, active, draft, num_drafts, match)]
    slots = round_state(**dict(zip(NAMES, state, strict=True)))
    bound = max(len(text) for text in texts if text is not None)
    op.ngram_lookup(slots, k, 2, 8, bound, True, behind)
    for s, text in enumerate(texts):
        assert text is None or state[0][s, : len(text)].tolist() == text, "the text stays"
    rows = zip(*(tensor.tolist() for tensor in state[3:]), strict=True)
    return [(row[:k], number, size) for row, number, size in rows]


@pytest.mark.parametrize("seed", range(4))
def test_lookup_continues_the_drafts_of_a_model(op: Any, device: str, seed: int) -> None:
    """The suffix is that of text and drafts; a slot with a match or fewer drafts stays as it is."""
    rng = random.Random(seed)
    texts = [None if rng.random() < 0.2 else random_text(rng) for _ in range(8)]
    texts[-2:] = [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]
    behind = rng.randint(1, 4)
    drafts = [[rng.randrange(3) for _ in range(behind)] for _ in texts]
    continued = 0
    for k in (behind, WIDE):
        results = look_up_behind(op, device, texts, drafts, k)
        for s, (text, model_drafts, result) in enumerate(zip(texts, drafts, results, strict=True)):
            tokens_behind = None
            if text is not None and s < len(texts) - 2:
                size = match_length([*text, *model_drafts], 8)
                tokens_behind = (
                    search([*text, *model_drafts], k - behind, 2, 8) if size >= 2 else None
                )
            expected_row = model_drafts + (
                tokens_behind if tokens_behind is not None else [THERE] * (k - behind)
            )
            number = behind - (s == len(texts) - 1) if tokens_behind is None else k
            size = -behind if tokens_behind is not None else 6 * (s == len(texts) - 2)
            assert result == (expected_row, number, size)
            continued += tokens_behind is not None
    assert continued
