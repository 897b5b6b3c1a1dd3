"""Windows of rounds and of draft models against a plain walk over each slot.

And when the clock is marked.
"""

from __future__ import annotations

import importlib
import random
import time
from typing import Any

import pytest
import torch

from spd.kernels.round.window import BEGAN, ENDED, NUM_TIMES, Paging, RoundWindow, Rows
from tests.kernels.forms import round_state

STEM = "round.window"
PAGE = 4
PAGES = 7
MAX_LEN = 30
VOCAB = 50
TRASH = 3
WIDE = 9
BAD = (-1, VOCAB, VOCAB + 9, -(2**40), 2**40)
"""Drafts that no head knows."""
State = dict[str, torch.Tensor]


def make_state(seed: int, slots: int, k: int, device: str) -> State:
    """Return tensors of more slots than are run, wider than is read, with every kind of slot."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = slots + 2

    def draft() -> int:
        return rng.choice(BAD) if rng.random() < 0.1 else rng.randrange(VOCAB)

    length = [rng.randint(1, MAX_LEN) for _ in range(rows)]
    beyond = (-2, 0, 1, 2, 3, k, k + 1, k + 2, 40)
    state = {
        "tokens": torch.randint(VOCAB, (rows, MAX_LEN + k + 5), generator=generator),
        "length": length,
        "draft": [[draft() for _ in range(k + 2)] for _ in range(rows)],
        "num_drafts": [rng.choice((-1, 0, k, k + 3, rng.randint(0, k))) for _ in range(rows)],
        "draft_cap": [rng.choice((0, k // 2, 2**40, 2**40)) for _ in range(rows)],
        "active": [rng.random() < 0.8 for _ in range(rows)],
        "length_limit": [min(MAX_LEN, max(1, n + rng.choice(beyond))) for n in length],
        "draft_limit": [rng.choice((n - 3, n - 1, n, n + 1, n + 3, MAX_LEN, 0)) for n in length],
        "page_table": torch.randint(2, 2**33, (rows, PAGES + 5), generator=generator),
    }
    return {name: torch.as_tensor(values).to(device) for name, values in state.items()}


def first_slots(state: State, slots: int, k: int, **extra: torch.Tensor) -> Any:
    """Return views whose strides are not their widths."""
    widths = {"tokens": MAX_LEN + k + 1, "draft": max(1, k), "page_table": PAGES}
    return round_state(
        **{name: t[:slots][..., : widths.get(name)] for name, t in state.items()}, **extra
    )


def lists_of(state: State) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


def placed(table: list[int], positions: list[int], valid: list[bool]) -> list[int]:
    """Return KV slots; a position beyond the table is in its last page."""
    pages = [table[min(p // PAGE, PAGES - 1)] for p in positions]
    return [
        page * PAGE + p % PAGE if fed else TRASH
        for page, p, fed in zip(pages, positions, valid, strict=True)
    ]


def expected_window(lists: dict[str, Any], s: int, k: int) -> tuple[Any, ...]:
    """Return one slot's fields of a `RoundWindow`, row by row."""
    draft = lists["draft"][s][:k]
    n = lists["length"][s]
    is_usable = [0 <= token < VOCAB for token in draft]
    leading = is_usable.index(False) if False in is_usable else k
    count = max(0, min(lists["num_drafts"][s], lists["draft_cap"][s], k))
    count = min(count, leading, max(0, lists["length_limit"][s] - n - 1))
    draft = [token if usable else 0 for token, usable in zip(draft, is_usable, strict=True)]
    positions = [min(n - 1 + i, MAX_LEN - 1) for i in range(k + 1)]
    valid = [lists["active"][s] and i <= count for i in range(k + 1)]
    slots = placed(lists["page_table"][s], positions, valid)
    return [lists["tokens"][s][n - 1], *draft], positions, valid, slots, draft, count


def assert_window(window: Rows, expected: list[tuple[Any, ...]]) -> None:
    names = list(type(window).__dataclass_fields__)
    assert len(names) == len(expected[0])
    for i, name in enumerate(names):
        tensor = getattr(window, name)
        assert tensor.dtype == (torch.bool if name == "valid" else torch.int64)
        assert tensor.tolist() == [row[i] for row in expected], name


@pytest.mark.covers(2)
@pytest.mark.parametrize("k", [0, 1, 2, 4, 7, 31])
@pytest.mark.parametrize("slots", [1, 7, 19])
def test_window_equals_its_definition(op: Any, device: str, slots: int, k: int) -> None:
    """Nothing that it reads is written; the beginning is marked in the round's row."""
    for seed in range(4 if slots < 19 else 2):
        state = make_state(seed, slots, k, device)
        lists = lists_of(state)
        times = torch.full((3, NUM_TIMES), -5, device=device)
        slot_state = first_slots(
            state, slots, k, times=times, counter=torch.tensor([4], device=device)
        )
        window: RoundWindow = op.round_window(slot_state, k, Paging(PAGE, MAX_LEN, TRASH), VOCAB)
        assert_window(window, [expected_window(lists, s, k) for s in range(slots)])
        assert all(getattr(window, name).is_contiguous() for name in vars(window))
        assert (times != -5).nonzero().tolist() == [[1, BEGAN]] and slot_state.counter.tolist() == [
            4
        ]
        assert lists_of(state) == lists


# -- the clock


@pytest.mark.covers(1)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("column", [BEGAN, ENDED])
@pytest.mark.parametrize("advance", [False, True])
def test_one_cell_is_marked(op: Any, device: str, depth: int, column: int, advance: bool) -> None:
    for count in range(2 * depth + 1):
        times = torch.full((depth, NUM_TIMES), -5, device=device)
        counter = torch.tensor([count], device=device)
        op.mark_time(times, counter, column, advance)
        rows = times.tolist()
        marked = rows[count % depth][column]
        rows[count % depth][column] = -5
        assert rows == [[-5] * NUM_TIMES] * depth
        # On a GPU the torch form has no clock that a captured graph could read.
        assert marked >= 0 and (marked > 0 or (device == "cuda" and op.__name__.endswith("window")))
        assert counter.tolist() == [count + advance]


@pytest.mark.gpu
def test_the_device_timer_runs_in_nanoseconds() -> None:
    """Between two marks around a sleeping host lies what the host slept."""
    op = importlib.import_module("spd.kernels.round.window_triton")
    times = torch.zeros(1, NUM_TIMES, dtype=torch.int64, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    op.mark_time(times, counter, BEGAN, False)
    torch.cuda.synchronize()
    time.sleep(0.05)
    op.mark_time(times, counter, ENDED, True)
    took = int(times[0, ENDED] - times[0, BEGAN])
    assert 45e6 < took < 5e9


# -- a draft model's


def expected_rows(
    lists: dict[str, Any], s: int, at: list[int], limit: int, first: int = 0
) -> tuple[list[int], list[bool], list[int]]:
    """Return positions, validity and KV slots of one slot's rows."""
    valid = [lists["active"][s] and first <= p < lists["draft_limit"][s] and p >= 0 for p in at]
    clamped = [min(max(p, 0), limit - 1) for p in at]
    return clamped, valid, placed(lists["page_table"][s], clamped, valid)


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 3, 8, 17])
def test_drafts_follow_the_committed_tokens_from_a_first_position_on(
    op: Any, device: str, width: int, ahead: int
) -> None:
    seen = 0
    for seed in range(4):
        state = make_state(seed, 5, WIDE, device)
        lists = lists_of(state)
        rows = first_slots(state, 5, WIDE)
        places = Paging(PAGE, MAX_LEN - 2, TRASH)
        first = (
            (rows.length - 3 + torch.arange(5, device=device) % 4).clamp(min=0) if seed else None
        )
        window = op.committed_window(
            state=rows, width=width, chosen=rows.active, paging=places, first=first, ahead=ahead
        )
        expected = []
        for s, length in enumerate(lists["length"][:5]):
            at = [length - width + i for i in range(width + ahead)]
            tokens = [*lists["tokens"][s][:length], *lists["draft"][s]]
            begin = 0 if first is None else int(first[s])
            where = expected_rows(lists=lists, s=s, at=at, limit=MAX_LEN - 2, first=begin)
            seen += where[1].count(True)
            expected.append(([tokens[max(0, p)] for p in at], *where))
        assert_window(window, expected)
    assert seen


@pytest.mark.covers(2)
@pytest.mark.parametrize("k", [1, 5, WIDE])
@pytest.mark.parametrize("slots", [1, 7])
def test_steps_equal_their_definition(op: Any, device: str, slots: int, k: int) -> None:
    for seed in range(4):
        limit = (MAX_LEN, MAX_LEN - 4, 40)[seed % 3]
        state = make_state(seed, slots, WIDE, device)
        lists = lists_of(state)
        # A column of something wider: its row stride is not 1.
        drawn = torch.randint(99, (slots, 3), generator=torch.Generator().manual_seed(seed)).to(
            device
        )
        for step in range(k):
            sampled = (drawn + step)[:, :1]
            expected = []
            slot_state = first_slots(state, slots, WIDE)
            window = op.draft_step(
                state=slot_state, sampled=sampled, step=step, k=k, paging=Paging(PAGE, limit, TRASH)
            )
            for s, (token,) in enumerate(sampled.tolist()):
                length = lists["length"][s]
                lists["draft"][s][step] = token
                if step == k - 1:
                    room = min(max(lists["draft_limit"][s] - length + 1, 0), k)
                    lists["num_drafts"][s] = room if lists["active"][s] else 0
                expected.append(([token], *expected_rows(lists, s, [length + step], limit)))
            assert_window(window, expected)
            assert lists_of(state) == lists
