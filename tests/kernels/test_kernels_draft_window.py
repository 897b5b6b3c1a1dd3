"""The draft model's windows against a plain walk over each slot."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spd.kernels.round.window import Places, Rows

PAGE, PAGES, MAX_LEN, TRASH, WIDE = 4, 7, 30, 2, 9


FORMS = "round.window"


def make_state(seed: int, slots: int, device: str) -> dict[str, torch.Tensor]:
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
        "page_table": torch.randint(2, 2**33, (rows, PAGES), generator=generator),
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
        state = make_state(seed, 5, device)
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
        state = make_state(seed, slots, device)
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
