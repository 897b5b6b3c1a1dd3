"""Windows of rounds and of draft models against a plain walk over each slot; and when the clock is marked."""

from __future__ import annotations

import importlib
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spd.kernels.round.window import BEGAN, ENDED, NUM_TIMES, Places, RoundWindow, Rows
from tests.kernels.forms import needs_compiled, round_form

PAGE, PAGES, MAX_LEN, VOCAB, TRASH = 4, 9, 30, 50, 3


@pytest.fixture(params=["torch", "triton", pytest.param("native", marks=needs_compiled)])
def op(request: pytest.FixtureRequest) -> Any:
    """Each form."""
    return round_form(request, "round.window")


def make_state(seed: int, slots: int, k: int, device: str) -> dict[str, torch.Tensor]:
    """Rows of larger tensors, with strides that are not their widths; every kind of slot among them."""
    rng = random.Random(seed)
    length = [rng.randint(1, MAX_LEN) for _ in range(slots)]
    limit = [min(MAX_LEN, max(1, n + rng.choice((-2, 0, 1, 2, 3, k, k + 1, k + 2, 40)))) for n in length]
    bad = (-1, VOCAB, VOCAB + 9, -(2**40), 2**40)
    draft = [
        [rng.choice(bad) if rng.random() < 0.1 else rng.randrange(VOCAB) for _ in range(k + 2)]
        for _ in range(slots)
    ]
    proposed = [rng.choice((-1, 0, k, k + 3, rng.randint(0, k))) for _ in range(slots)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (slots + 3, MAX_LEN + k + 5), generator=generator)
    table = torch.randint(2, 2**33, (slots + 2, PAGES + 3), generator=generator)
    padding = torch.zeros(3, k + 2, dtype=torch.int64)
    state = {
        "tokens": tokens[:slots, : MAX_LEN + k + 1],
        "length": torch.tensor(length),
        "draft": torch.cat((torch.tensor(draft), padding))[:slots, : max(1, k)],
        "num_drafts": torch.tensor(proposed),
        "active": torch.tensor([rng.random() < 0.8 for _ in range(slots)]),
        "length_limit": torch.tensor(limit),
        "page_table": table[:slots, : PAGES - 2],
    }
    return {name: moved(tensor, device) for name, tensor in state.items()}


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On the device with its strides."""
    if device == "cpu":
        return tensor
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor)


def expected_window(state: dict[str, torch.Tensor], k: int, table_limit: bool = True) -> dict[str, Any]:
    """The definition, one slot and one row after another."""
    lists = {name: tensor.tolist() for name, tensor in state.items()}
    found: dict[str, Any] = {name: [] for name in RoundWindow.__dataclass_fields__}
    for s, n in enumerate(lists["length"]):
        draft = lists["draft"][s][:k]
        known = [0 <= token < VOCAB for token in draft]
        leading = known.index(False) if False in known else k
        count = max(0, min(lists["num_drafts"][s], k))
        count = min(count, leading, max(0, lists["length_limit"][s] - n - 1))
        draft = [token if fine else 0 for token, fine in zip(draft, known, strict=True)]
        positions = [min(n - 1 + i, MAX_LEN - 1) for i in range(k + 1)]
        valid = [bool(lists["active"][s]) and i <= count for i in range(k + 1)]
        table = lists["page_table"][s]
        slots = [table[min(p // PAGE, len(table) - 1)] * PAGE + p % PAGE for p in positions]
        found["token_ids"].append([lists["tokens"][s][n - 1], *draft])
        found["positions"].append(positions)
        found["valid"].append(valid)
        found["kv_slots"].append([p if fed else TRASH for p, fed in zip(slots, valid, strict=True)])
        found["draft"].append(draft)
        found["num_drafts"].append(count)
    return found


def run(op: Any, state: dict[str, torch.Tensor], k: int) -> RoundWindow:
    """The window, and that nothing it read was written; the beginning is marked in the round's row."""
    before = {name: tensor.clone() for name, tensor in state.items()}
    device = state["length"].device
    times, counter = torch.full((3, NUM_TIMES), -5, device=device), torch.tensor([4], device=device)
    cap = torch.full_like(state["length"], 2**40)
    given = SimpleNamespace(**state, draft_cap=cap, times=times, counter=counter)
    window: RoundWindow = op.round_window(given, k, Places(PAGE, MAX_LEN, TRASH), VOCAB)
    assert (times != -5).nonzero().tolist() == [[1, BEGAN]] and counter.tolist() == [4]
    for name, tensor in before.items():
        assert torch.equal(tensor, state[name]), name
    return window


@pytest.mark.covers(2)
@pytest.mark.parametrize("k", [0, 1, 2, 4, 7, 31])
@pytest.mark.parametrize("slots", [1, 7, 19])
def test_window_equals_its_definition(op: Any, device: str, slots: int, k: int) -> None:
    for seed in range(4 if slots < 19 else 2):
        state = make_state(seed, slots, k, device)
        window, expected = run(op, state, k), expected_window(state, k)
        for name, values in expected.items():
            tensor = getattr(window, name)
            assert tensor.dtype == (torch.bool if name == "valid" else torch.int64)
            assert tensor.is_contiguous(), name
            assert tensor.tolist() == values, name


def test_pages_beyond_32_bits_keep_their_place(op: Any, device: str) -> None:
    state = make_state(1, 2, 2, device)
    state["page_table"].fill_(2**31 - 1)
    state["active"].fill_(True)
    window = run(op, state, 2)
    offset = (window.positions[:, 0] % PAGE).tolist()
    assert window.kv_slots[:, 0].tolist() == [(2**31 - 1) * PAGE + n for n in offset]


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


WIDE = 9
"""The most drafts."""


def make_drafting(seed: int, slots: int, device: str) -> dict[str, torch.Tensor]:
    """Whole state tensors, two slots more than are run."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = slots + 2
    length = [rng.randint(1, MAX_LEN) for _ in range(rows)]
    limits = [rng.choice((n - 3, n - 1, n, n + 1, n + 3, MAX_LEN, 0)) for n in length]
    state = {
        "tokens": torch.randint(99, (rows, MAX_LEN + WIDE + 1), generator=generator),
        "length": torch.tensor(length),
        "active": torch.tensor([rng.random() < 0.8 for _ in range(rows)]),
        "draft_limit": torch.tensor(limits),
        "page_table": torch.randint(2, 2**33, (rows, PAGES - 2), generator=generator),
        "draft": torch.full((rows, WIDE), -7),
        "num_drafts": torch.full((rows,), 11),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


def expected_rows(
    lists: dict[str, Any], s: int, positions: list[int], limit: int
) -> tuple[list[int], list[bool], list[int]]:
    """Positions, validity and KV slots of one slot's rows."""
    found: tuple[list[int], list[bool], list[int]] = ([], [], [])
    table = lists["page_table"][s]
    for position in positions:
        valid = bool(lists["active"][s]) and 0 <= position < lists["draft_limit"][s]
        clamped = min(max(position, 0), limit - 1)
        found[0].append(clamped)
        found[1].append(valid)
        slot = table[min(clamped // PAGE, len(table) - 1)] * PAGE + clamped % PAGE
        found[2].append(slot if valid else TRASH)
    return found


def assert_window(window: Rows, expected: list[tuple[Any, ...]]) -> None:
    for i, name in enumerate(("token_ids", "positions", "valid", "kv_slots")):
        tensor = getattr(window, name)
        assert tensor.dtype == (torch.bool if name == "valid" else torch.int64)
        assert tensor.tolist() == [row[i] for row in expected], name


def first_slots(state: dict[str, torch.Tensor], slots: int) -> Any:
    return SimpleNamespace(**{name: tensor[:slots] for name, tensor in state.items()})


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 3, 8, 17])
def test_drafts_follow_the_committed_tokens_from_a_first_position_on(
    op: Any, device: str, width: int, ahead: int
) -> None:
    seen = 0
    for seed in range(4):
        state = make_drafting(seed, 5, device)
        first = (state["length"] - 3 + torch.arange(7, device=device) % 4).clamp(min=0)
        lists = {name: tensor.tolist() for name, tensor in {**state, "first": first}.items()}
        state["draft"].random_(99)
        rows, places = first_slots(state, 5), Places(PAGE, MAX_LEN - 2, TRASH)
        window = op.committed_window(rows, width, rows.active, places, first[:5] if seed else None, ahead)
        expected = []
        for s in range(5):
            length = lists["length"][s]
            at = [length - width + i for i in range(width + ahead)]
            drafts = state["draft"][s].tolist()
            tokens = [lists["tokens"][s][max(0, p)] if p < length else drafts[p - length] for p in at]
            where, valid, slots = expected_rows(lists, s, at, MAX_LEN - 2)
            valid = [v and (not seed or p >= lists["first"][s]) for v, p in zip(valid, at, strict=True)]
            seen += valid.count(True)
            slots = [slot if v else TRASH for slot, v in zip(slots, valid, strict=True)]
            expected.append((tokens, where, valid, slots))
        assert_window(window, expected)
    assert seen


@pytest.mark.covers(2)
@pytest.mark.parametrize("k", [1, 5, WIDE])
@pytest.mark.parametrize("slots", [1, 7])
def test_steps_equal_their_definition(op: Any, device: str, slots: int, k: int) -> None:
    for seed in range(4):
        limit = (MAX_LEN, MAX_LEN - 4, 40)[seed % 3]
        state = make_drafting(seed, slots, device)
        lists = {name: tensor.tolist() for name, tensor in state.items()}
        # A column of something wider: its row stride is not 1.
        drawn = torch.randint(99, (slots, 3), generator=torch.Generator().manual_seed(seed)).to(device)
        for step in range(k):
            sampled = (drawn + step)[:, :1]
            window = op.draft_step(first_slots(state, slots), sampled, step, k, Places(PAGE, limit, TRASH))
            expected = []
            for s in range(slots):
                token, length = int(drawn[s, 0]) + step, lists["length"][s]
                lists["draft"][s][step] = token
                if step == k - 1:
                    room = min(max(lists["draft_limit"][s] - length + 1, 0), k)
                    lists["num_drafts"][s] = room if lists["active"][s] else 0
                expected.append(([token], *expected_rows(lists, s, [length + step], limit)))
            assert_window(window, expected)
            assert {name: tensor.tolist() for name, tensor in state.items()} == lists
