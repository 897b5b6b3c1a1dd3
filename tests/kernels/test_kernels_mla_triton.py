"""Latent attention by kernels: as its definition says, and a row alone is the row among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.attention import paged_attention_triton as chunks
from spd.kernels.attention.paged_attention import AttentionHeads, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.latent import mla_attention as reference
from spd.kernels.latent import mla_attention_triton as twin
from spd.kernels.round.window import kv_slots
from tests.helpers import few_programs

HEADS, RANK, TURNED, PAGE = 5, 24, 8, 32
SCALE = 0.21


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 positions below 128 and of 64 from there, so that short contexts have every kind."""
    for name, value in {"SMALL_CHUNK": 32, "LARGE_CHUNK": 64, "LARGE_FROM": 128}.items():
        monkeypatch.setattr(chunks, name, value)
    few_programs(monkeypatch, 2)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_pool(device: str, dtype: torch.dtype, slots: int, pages: int) -> tuple[Tensor, Tensor]:
    """A pool with NaN in pages that nobody owns, and a table of scattered pages."""
    order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(7)) + 1
    pool = normal(slots * pages + 1, PAGE, RANK + TURNED, seed=8)
    pool[0] = float("nan")
    return pool.to(device, dtype), order.view(slots, pages).to(device)


def attend(pool: Tensor, table: Tensor, starts: list[int | None], query: Tensor, spare: int = 0) -> Tensor:
    """query [S, Q, H, L + R] from each slot's start on; a slot with None and spare rows are not valid."""
    slots, width = query.shape[:2]
    firsts = torch.tensor([start or 0 for start in starts], device=pool.device)
    positions = firsts[:, None] + torch.arange(width, device=pool.device).clamp(max=width - spare - 1)
    there = torch.tensor([start is not None for start in starts])
    valid = (torch.arange(width) < width - spare)[None] & there[:, None]
    heads = AttentionHeads(HEADS, 1, RANK + TURNED)
    windows = Windows(positions, valid.to(pool.device), table, [0] * slots, [None] * slots)
    plan = chunks.plan_attention(windows, heads, PAGE, query.dtype)
    return twin.mla_attention(query, pool, plan, RANK, SCALE)


def straight(pool: Tensor, row: Tensor, position: int, query: Tensor, dtype: torch.dtype) -> Tensor:
    """One row by the definition: [H, L]."""
    keys = pool[row].flatten(0, 1)[: position + 1].to(dtype)
    weights = (query.to(dtype) @ keys.T * SCALE).softmax(-1)
    return weights @ keys[:, :RANK]


def near(found: Tensor, right: Tensor, plain: Tensor) -> None:
    slack = 4 * torch.finfo(found.dtype).eps * (1 + right.abs().max().item())
    assert (found.double() - right).abs().max() <= 2 * (plain.double() - right).abs().max().item() + slack


def test_windows_by_their_definition(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    starts, width = [0, 30, None, 124, 189, 250], 3
    for dtype in dtypes:
        pool, table = make_pool(device, dtype, len(starts), 8)
        query = normal(len(starts), width, HEADS, RANK + TURNED, seed=1).to(device, dtype)
        out = attend(pool, table, starts, query)
        assert out.dtype == dtype and out.isfinite().all()
        for slot, start in enumerate(starts):
            if start is None:
                assert not out[slot].any()
                continue
            for i in range(width):
                case = (pool, table[slot], start + i, query[slot, i])
                near(out[slot, i], straight(*case, torch.float64), straight(*case, dtype))


@pytest.mark.parametrize("start", [28, 122, 188])
def test_a_row_alone_is_the_row_among_others(
    start: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        pool, table = make_pool(device, dtype, 2, 7)
        query = normal(9, HEADS, RANK + TURNED, seed=2).to(device, dtype)
        some = (0, 1, 8)
        alone = {i: attend(pool, table[:1], [start + i], query[i][None, None])[0, 0] for i in some}
        for width in (2, 9):
            rows = normal(2, width + 1, HEADS, RANK + TURNED, seed=3).to(device, dtype)
            rows[0, :width] = query[:width]
            among = attend(pool, table, [start, 200 - width], rows, spare=1)
            for i in some[: 2 if width == 2 else 3]:
                assert torch.equal(among[0, i], alone[i]), (dtype, width, i)


@pytest.mark.parametrize(("start", "rows"), [(0, 20), (64, 37), (160, 5)])
def test_prompt_chunks(start: int, rows: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        pool, table = make_pool(device, dtype, 1, 8)
        query = normal(rows, HEADS, RANK + TURNED, seed=4).to(device, dtype)
        out = twin.mla_prefill(query, pool, table[0], start, RANK, SCALE)
        plain = reference.mla_prefill(query, pool, table[0], start, RANK, SCALE)
        right = torch.stack(
            [straight(pool, table[0], start + i, query[i], torch.float64) for i in range(rows)]
        )
        near(out, right, plain)
        near(plain, right, plain)
        for row in {0, rows // 2, rows - 1}:
            case = (pool, table[0], start + row, RANK, SCALE)
            assert torch.equal(twin.mla_prefill(query[row : row + 1], *case)[0], out[row])
            assert torch.equal(
                twin.mla_prefill(query[: row + 1], pool, table[0], start, RANK, SCALE)[row], out[row]
            )


def test_what_is_kept_of_a_row(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    rows, table = 6, torch.tensor([[2, 1]], device=device)
    positions = torch.arange(30, 30 + rows, device=device)
    slots = kv_slots(table, positions[None], torch.ones(1, rows, dtype=torch.bool, device=device), PAGE, 0)[0]
    angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])[: TURNED // 2]
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(device)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(device)
    for dtype in dtypes:
        wide = normal(rows, 3 + HEADS * (7 + TURNED) + RANK + TURNED, seed=5).to(device, dtype)
        query = wide[:, 3 : 3 + HEADS * (7 + TURNED)].unflatten(1, (HEADS, 7 + TURNED))[..., 7:]
        latent, norm = wide[:, -(RANK + TURNED) :], 1 + normal(RANK, seed=6).to(device, dtype)
        pools = [torch.zeros(3, PAGE, RANK + TURNED, device=device, dtype=dtype) for _ in range(3)]
        case = (latent, RotatedRows(cos, sin, positions, slots), norm, 1e-6)
        turned = twin.latent_store(query, *case, pools[0])
        plain = reference.latent_store(query, *case, pools[1])
        exact = RotatedRows(cos.double(), sin.double(), positions, slots)
        exact_pool = pools[2].double()
        right = reference.latent_store(
            query.double(), latent.double(), exact, norm.double(), 1e-6, exact_pool
        )
        near(turned, right, plain)
        near(pools[0], exact_pool, pools[1])
        assert pools[0].count_nonzero() == rows * (RANK + TURNED)
        for row in range(rows):
            one, alone = slice(row, row + 1), torch.zeros_like(pools[0])
            at = (latent[one], RotatedRows(cos, sin, positions[one], slots[one]), norm, 1e-6)
            assert torch.equal(twin.latent_store(query[one], *at, alone)[0], turned[row])
            assert torch.equal(alone.flatten(0, 1)[slots[row]], pools[0].flatten(0, 1)[slots[row]])


@pytest.mark.parametrize(("heads", "rank", "turned"), [(1, 1, 2), (3, 33, 6)])
def test_smallest_and_odd_sizes(
    heads: int, rank: int, turned: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HEADS": heads, "RANK": rank, "TURNED": turned}.items():
        monkeypatch.setitem(globals(), name, value)
    plain = (torch.float32,)
    test_what_is_kept_of_a_row(device, plain)
    test_prompt_chunks(3, 1, device, plain)
    test_prompt_chunks(0, 5, device, plain)
    pool, table = make_pool(device, torch.float32, 1, 2)
    for start in (0, 40):
        query = normal(1, 1, heads, rank + turned, seed=1).to(device)
        case = (pool, table[0], start, query[0, 0])
        found = attend(pool, table, [start], query)[0, 0]
        near(found, straight(*case, torch.float64), straight(*case, torch.float32))


def test_an_odd_number_to_rotate_is_refused(device: str) -> None:
    rows = torch.zeros(1, 4, device=device)
    query, pages = torch.zeros(1, 2, 3, device=device), torch.zeros(1, 8, 4, device=device)
    number = torch.zeros(1, dtype=torch.long, device=device)
    turning = RotatedRows(rows, rows, number, number)
    for form in (twin, reference):
        with pytest.raises(ValueError, match="3 values of a head cannot be rotated in pairs"):
            form.latent_store(query, rows, turning, rows[0, :1], 1e-6, pages)


@pytest.mark.parametrize(("a", "b", "rows"), [(24, 16, 1), (72, 100, 19), (1, 1, 1), (67, 33, 2)])
def test_each_head_has_its_own_product(
    a: int, b: int, rows: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        x = normal(rows, HEADS, a + 3, seed=1).to(device, dtype)[..., 3:]
        weight = normal(HEADS, a, b, seed=2).to(device, dtype)
        found, right = twin.head_linear(x, weight), reference.head_linear(x.double(), weight.double())
        near(found, right, reference.head_linear(x, weight))
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(twin.head_linear(x[row : row + 1], weight)[0], found[row])
