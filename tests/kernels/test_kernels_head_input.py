"""What an MTP module reads and keeps, in all forms: against float64, and written out with
loops."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spd.kernels.linear.head_input import PairNorms
from spd.kernels.round.window import Rows

PAGE = 4
PAGES = 9
DEPTH = 7
SIZE = 24
VOCAB = 11
EPSILON = 0.05
STEM = "linear.head_input"


@pytest.mark.covers(2)
@pytest.mark.parametrize("op", ["torch", "triton"], indirect=True)
@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("masked", [-1, 0, 5])
@pytest.mark.parametrize(
    ("slots", "width", "extra", "size"),
    [(1, 1, 3, SIZE), (3, 4, 0, SIZE), (2, 3, 2, SIZE), (1, 1, 0, 1), (2, 1, 1, 2), (1, 3, 0, 33)],
)
def test_pairs_equal_their_definition(
    op: Any,
    device: str,
    slots: int,
    width: int,
    extra: int,
    size: int,
    masked: int,
    hidden_first: bool,
) -> None:
    """A row alone, with a ring of its own slot's, has the same bits, though what others read is
    NaN."""
    torch.manual_seed(slots)
    for depth, dtype in ((DEPTH, torch.float32), (1, torch.float32), (DEPTH, torch.float16)):
        table = torch.randn(VOCAB, size)
        states = torch.randn(slots, depth + 1, size)
        norms = torch.rand(2, size) + 0.5
        positions = torch.randint(0, 30, (slots * width + extra,))
        positions[: slots * width : 2] = 5
        tokens = torch.randint(VOCAB, positions.shape)
        table, states, norms = (t.to(device, dtype) for t in (table, states, norms))
        rings = SimpleNamespace(rings=states, depth=depth)
        rows = SimpleNamespace(positions=positions.to(device), width=width, states=rings)
        tokens = tokens.to(device)
        norm = PairNorms(norms[0], norms[1], EPSILON, masked=masked, hidden_first=hidden_first)
        out, nothing = op.head_input(tokens, table, rows, norm)
        assert nothing is None
        again, stored_states = op.head_input(tokens, table, rows, norm, keeps_state=True)
        assert (
            torch.equal(again, out)
            and stored_states.shape == (len(tokens), size)
            and stored_states.dtype == dtype
        )
        assert out.dtype == dtype and out.isfinite().all() and out.shape == (len(tokens), 2 * size)
        for row in range(slots * width):
            position = int(positions[row])
            token = table[tokens[row]].double() * (position != masked)
            state = states[row // width, (position - 1) % depth]
            assert torch.equal(stored_states[row], state)
            lonely = table.new_full(table.shape, math.nan)
            ring = states.new_full(states.shape, math.nan)[:1]
            lonely[tokens[row]] = table[tokens[row]]
            ring[0, (position - 1) % depth] = state
            row_position = rows.positions[row : row + 1]
            head_states = SimpleNamespace(rings=ring, depth=depth)
            alone = SimpleNamespace(positions=row_position, width=1, states=head_states)
            assert torch.equal(
                op.head_input(tokens[row : row + 1], lonely, alone, norm)[0][0], out[row]
            )
            state = state.double()
            halves = [
                x / (x.square().mean() + EPSILON).sqrt() * norm.double()
                for x, norm in zip((token, state), norms, strict=True)
            ]
            expected = torch.cat(halves[::-1] if hidden_first else halves)
            assert (out[row].double() - expected).abs().max() < (
                1e-5 if dtype == torch.float32 else 5e-3
            )


@pytest.mark.parametrize(("slots", "size"), [(1, SIZE), (4, SIZE), (1, 1), (2, 33)])
def test_states_are_kept_where_they_belong(op: Any, device: str, slots: int, size: int) -> None:
    source = random.Random(slots)
    ends = 0
    for _ in range(4):
        width = source.randint(1, 5)
        begin = [source.randint(0, 20) for _ in range(slots)]
        positions = torch.tensor([[b + i for i in range(width)] for b in begin])
        valid = torch.tensor([[source.random() < 0.7 for _ in range(width)] for _ in range(slots)])
        # Rows that are not valid may stand at a valid row's place.
        positions = torch.where(valid, positions, positions[:, :1])
        pages = torch.tensor([source.sample(range(1, PAGES), 7) for _ in range(slots)])
        kv_slots = pages.gather(1, positions // PAGE) * PAGE + positions % PAGE
        kv_slots = torch.where(valid, kv_slots, 0)
        tensor = torch.randn(slots, width + 2, size)
        rows = tensor[:, 1 : width + 1]  # windows with gaps between them
        states = torch.randn(slots, DEPTH + 1, size)
        page_states = torch.randn(PAGES, size)
        expected = states.clone()
        expected_pages = page_states.clone()
        for s in range(slots):
            for i in range(width):
                if valid[s, i]:
                    expected[s, int(positions[s, i]) % DEPTH] = rows[s, i]
                    if kv_slots[s, i] % PAGE == PAGE - 1:
                        ends += 1
                        if (kv_slots == kv_slots[s, i]).sum() == 1:
                            expected_pages[int(kv_slots[s, i]) // PAGE] = rows[s, i]
        if len({int(k) for k in kv_slots.flatten() if k}) < int((kv_slots > 0).sum()):
            continue  # two slots share a page here, which no round does while it writes
        states = states.to(device)
        page_states = page_states.to(device)
        window = Rows(
            token_ids=positions.to(device),
            positions=positions.to(device),
            valid=valid.to(device),
            kv_slots=kv_slots.to(device),
        )
        hidden = rows.to(device) if device != "cpu" else rows
        op.keep_states(
            hidden=hidden, rows=window, rings=states, page_states=page_states, page_size=PAGE
        )
        assert torch.equal(states[:, :DEPTH].cpu(), expected[:, :DEPTH])
        assert torch.equal(page_states[1:].cpu(), expected_pages[1:])
    assert ends, "no page ended: the test saw nothing"
