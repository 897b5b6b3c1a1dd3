"""Attention of prompt chunks: against float64, and independent of where the pages lie."""

from __future__ import annotations

import pytest
import torch

from spd.kernels.attention import paged_attention as reference
from spd.kernels.attention.paged_attention import Scores
from spd.kernels.launch import Device, power_of_two
from tests.kernels.compile_ahead import DEVICES

twin = pytest.importorskip("spd.kernels.attention.paged_attention_triton")


def paged(
    whole: torch.Tensor, page: int, seed: int, dead: float = float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool whose shuffled pages hold whole [positions, K, D], `dead` beyond; and the pages in order."""
    count = -(-whole.shape[0] // page) + 2
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))
    row = order[:count].to(whole.device)
    pool = whole.new_full((len(order), page, *whole.shape[1:]), dead)
    at = torch.arange(whole.shape[0], device=whole.device)
    pool[row[at // page], at % page] = whole
    return pool, row


def straight(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    dtype: torch.dtype,
    sliding: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition in `dtype`."""
    rows, heads, size = query.shape
    groups = heads // keys.shape[1]
    keys, values = (t.to(dtype).repeat_interleave(groups, 1) for t in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query.to(dtype), keys) * size**-0.5
    at = torch.arange(start, start + rows, device=query.device)[:, None]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    seen = torch.arange(keys.shape[0], device=query.device)[None]
    hidden = (seen > at) | (seen <= at - (sliding or keys.shape[0]))
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def make(
    device: str, dtype: torch.dtype, rows: int, start: int, heads: tuple[int, int], size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    query = torch.randn(rows, heads[0], size).to(device, dtype)
    keys, values = (torch.randn(start + rows, heads[1], size).to(device, dtype) for _ in range(2))
    return query, keys, values


@pytest.mark.parametrize(
    ("rows", "start", "heads", "size", "page"),
    [
        (1, 0, (2, 2), 16, 64),
        (130, 0, (3, 1), 16, 64),
        (5, 63, (4, 2), 80, 64),
        (33, 64, (7, 1), 96, 32),
        (70, 190, (2, 1), 32, 16),
        (140, 65, (4, 1), 16, 128),
        (1, 0, (1, 1), 1, 16),
        (3, 5, (3, 3), 33, 7),
    ],
)
def test_against_its_definition(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    rows: int,
    start: int,
    heads: tuple[int, int],
    size: int,
    page: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models of four heads count as large ones here, and take the wide tiles."""
    monkeypatch.setattr(twin, "FEW_HEADS", 4)
    for dtype in dtypes:
        query, keys, values = make(device, dtype, rows, start, heads, size)
        key_pages, page_row = paged(keys, page, 5)
        value_pages, _ = paged(values, page, 5)
        out = twin.prefill_attention(query, (key_pages, value_pages), page_row, start, Scores(size**-0.5))
        right = straight(query, keys, values, start, torch.float64)
        plain = straight(query, keys, values, start, dtype)
        assert out.dtype == dtype and out.shape == query.shape
        assert (out - right).abs().max() <= 2 * (plain - right).abs().max() + 1e-6


@pytest.mark.parametrize(("sliding", "softcap"), [(1, None), (64, 2.0), (130, None), (None, 2.0)])
def test_sliding_and_capped_against_the_definition(
    device: str, dtypes: tuple[torch.dtype, ...], sliding: int | None, softcap: float | None
) -> None:
    """Rows of three tiles, windows shorter than a tile and longer than two; blocks left behind hold NaN."""
    dtype = dtypes[(sliding or 0) % len(dtypes)]
    for rows, start in ((150, 70), (7, 190), (70, 0)):
        query, keys, values = make(device, dtype, rows, start, (2, 1), 16)
        right = straight(query, keys, values, start, torch.float64, sliding, softcap)
        plain = straight(query, keys, values, start, dtype, sliding, softcap)
        for whole in (keys, values):
            whole[: max(0, start + 1 - (sliding or start + 1)) // 64 * 64] = float("nan")
        key_pages, page_row = paged(keys, 64, 5)
        value_pages, _ = paged(values, 64, 5)
        out = twin.prefill_attention(
            query, (key_pages, value_pages), page_row, start, Scores(0.25, sliding, softcap)
        )
        assert (out - right).abs().max() <= 2 * (plain - right).abs().max() + 2e-6


def test_a_window_longer_than_the_context_changes_no_bit(
    device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        query, keys, values = make(device, dtype, 150, 70, (2, 1), 16)
        key_pages, page_row = paged(keys, 64, 5)
        value_pages, _ = paged(values, 64, 5)
        whole, wide, cut = (
            twin.prefill_attention(query, (key_pages, value_pages), page_row, 70, Scores(0.25, sliding))
            for sliding in (None, 220, 219)
        )
        assert torch.equal(wide, whole)
        assert torch.equal(cut[:-1], whole[:-1]) and not torch.equal(cut[-1], whole[-1])


@pytest.mark.parametrize(("sliding", "softcap"), [(None, None), (30, 2.0)])
def test_a_row_alone_is_the_row_among_others(device: str, sliding: int | None, softcap: float | None) -> None:
    """In a chunk of its own, and as the last row of a shorter one; in any tile."""
    query, keys, values = make(device, torch.float32, 70, 60, (2, 1), 16)
    key_pages, page_row = paged(keys, 64, 5)
    value_pages, _ = paged(values, 64, 5)

    def run(rows: slice) -> torch.Tensor:
        case = (query[rows], (key_pages, value_pages), page_row, 60 + rows.start)
        out: torch.Tensor = twin.prefill_attention(*case, Scores(0.25, sliding, softcap))
        return out

    whole = run(slice(0, 70))
    for row in (0, 3, 15, 16, 40, 69):
        assert torch.equal(run(slice(row, row + 1))[0], whole[row]), row
        assert torch.equal(run(slice(0, row + 1))[row], whole[row]), row


def test_pages_and_dead_positions_change_nothing(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        query, keys, values = make(device, dtype, 40, 90, (3, 1), 16)
        results = []
        for seed, dead in ((1, float("nan")), (2, 3.0), (3, float("inf"))):
            key_pages, page_row = paged(keys, 64, seed, dead)
            value_pages, _ = paged(values, 64, seed, dead)
            results.append(
                twin.prefill_attention(query, (key_pages, value_pages), page_row, 90, Scores(0.25))
            )
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("rows", "start", "sliding", "softcap"),
    [(1, 0, None, None), (7, 509, None, None), (20, 520, None, 2.0), (7, 509, 30, None), (20, 600, 40, 2.0)],
)
def test_the_torch_form(rows: int, start: int, sliding: int | None, softcap: float | None) -> None:
    """Pages beyond the positions are read masked, so they must be finite; there may be none."""
    query, keys, values = make("cpu", torch.float32, rows, start, (4, 2), 16)
    key_pages, page_row = paged(keys, 64, 4, dead=0.0)
    value_pages, _ = paged(values, 64, 4, dead=0.0)
    out = reference.prefill_attention(
        query, (key_pages, value_pages), page_row, start, Scores(0.25, sliding, softcap)
    )
    right = straight(query, keys, values, start, torch.float64, sliding, softcap)
    assert (out - right).abs().max() < 1e-5


@pytest.mark.parametrize("facts", [*DEVICES.values(), Device()], ids=lambda facts: str(facts.capability))
def test_tiles_fit_every_devices_shared_memory(facts: Device) -> None:
    """Both kernels hold the rows of a tile and its stages of keys and values at once."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (16, 64, 80, 128, 256):
            width = max(16, power_of_two(head_dim)) * dtype.itemsize
            rows, keys, stages = twin.tile_shape(dtype, head_dim, facts)
            tile = twin.tile_of(dtype, head_dim, 32, facts)
            for shape in ((rows, keys, stages), (tile["TILE"], tile["BLOCK"], tile["num_stages"])):
                assert shape[2] >= 1
                assert (shape[0] + 2 * shape[1] * shape[2]) * width < facts.shared
    assert twin.tile_shape(torch.bfloat16, 128, DEVICES[90]) == (64, 64, 3)
    assert twin.tile_of(torch.bfloat16, 128, 32, DEVICES[90]) == {
        "TILE": 128, "BLOCK": 64, "num_stages": 3, "num_warps": 8,
    }  # fmt: skip
