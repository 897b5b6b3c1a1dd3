"""Split-KV attention: against float64, and every row's bits against the row computed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from spd.kernels.attention.paged_attention import AttentionHeads, Scores, Windows
from tests.helpers import few_programs

twin = pytest.importorskip("spd.kernels.attention.paged_attention_triton")


@dataclass(frozen=True)
class Window:
    """`rows` valid positions from `start` in a slot; no rows is an inactive slot."""

    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows if self.rows else 0


@dataclass
class Cache:
    """Positions' keys and values [slots, positions, K, D], and how they are scattered over pages."""

    keys: torch.Tensor
    values: torch.Tensor
    heads: AttentionHeads
    page: int
    softcap: float | None = None

    @property
    def sliding(self) -> int | None:
        return self.heads.sliding[-1]

    def like(self, sliding: int | None, softcap: float | None = None) -> Cache:
        """The same in a layer that slides or caps; the plan is one for plain layers too."""
        heads = replace(self.heads, sliding=(None, sliding))
        return replace(self, heads=heads, softcap=softcap)

    def paged(self, windows: Sequence[Window], slots: Sequence[int], seed: int, spare: int = 0) -> tuple:  # type: ignore[type-arg]
        """Pools and a table for windows on the given slots; whatever lies beyond a window is NaN."""
        capacity = -(-self.keys.shape[1] // self.page) + spare
        order = torch.randperm(capacity * len(slots) + 3, generator=torch.Generator().manual_seed(seed))
        table = order[: capacity * len(slots)].view(len(slots), capacity).to(self.keys.device)
        pools = []
        for whole in (self.keys, self.values):
            pool = whole.new_full((len(order), self.page, *whole.shape[2:]), float("nan"))
            for s, (slot, window) in enumerate(zip(slots, windows, strict=True)):
                at = torch.arange(window.end, device=whole.device)
                pool[table[s][at // self.page], at % self.page] = whole[slot, : window.end]
            pools.append(pool)
        return (*pools, table)


def make_cache(
    device: str, dtype: torch.dtype, slots: int, length: int, groups: int, kv_heads: int, size: int, page: int
) -> Cache:
    torch.manual_seed(1)
    shape = (slots, length, kv_heads, size)
    keys, values = (torch.randn(shape).to(device, dtype) for _ in range(2))
    return Cache(keys, values, AttentionHeads(groups * kv_heads, kv_heads, size), page)


def attend(
    cache: Cache,
    windows: Sequence[Window],
    query: torch.Tensor,
    slots: Sequence[int] | None = None,
    seed: int = 0,
    spare: int = 0,
) -> torch.Tensor:
    """The twin's result for query [S, Q, H, D]; rows beyond a window are invalid and repeat its last."""
    slots = list(range(len(windows))) if slots is None else slots
    keys, values, table = cache.paged(windows, slots, seed, spare)
    width = query.shape[1]
    positions = torch.tensor([[w.start + min(i, max(w.rows - 1, 0)) for i in range(width)] for w in windows])
    valid = torch.tensor([[i < w.rows for i in range(width)] for w in windows])
    rows = Windows(positions.to(query.device), valid.to(query.device), table, (), ())
    plan = twin.plan_attention(rows, cache.heads, cache.page, query.dtype)
    scores = Scores(cache.heads.head_dim**-0.5, cache.sliding, cache.softcap)
    out: torch.Tensor = twin.paged_attention(query, (keys, values), plan, scores)
    return out


def straight(cache: Cache, slot: int, position: int, query: torch.Tensor) -> torch.Tensor:
    """One row's definition, query [H, D], in query's dtype."""
    groups = cache.heads.num_heads // cache.heads.num_kv_heads
    seen = slice(max(0, position + 1 - (cache.sliding or position + 1)), position + 1)
    keys = cache.keys[slot, seen].to(query.dtype).repeat_interleave(groups, 1)
    values = cache.values[slot, seen].to(query.dtype).repeat_interleave(groups, 1)
    scores = torch.einsum("hd,thd->ht", query, keys) * cache.heads.head_dim**-0.5
    if cache.softcap is not None:
        scores = cache.softcap * (scores / cache.softcap).tanh()
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def check(cache: Cache, windows: Sequence[Window], width: int) -> None:
    heads = cache.heads
    query = torch.randn(len(windows), width, heads.num_heads, heads.head_dim)
    query = query.to(cache.keys.device, cache.keys.dtype)
    out = attend(cache, windows, query)
    assert out.dtype == query.dtype and out.shape == query.shape and out.isfinite().all()
    error = allowed = 0.0
    for s, window in enumerate(windows):
        for i in range(window.rows):
            right = straight(cache, s, window.start + i, query[s, i].double())
            plain = straight(cache, s, window.start + i, query[s, i])
            error = max(error, float((out[s, i] - right).abs().max()))
            allowed = max(allowed, float((plain - right).abs().max()))
        if not window.rows:
            assert out[s].count_nonzero() == 0
    assert error <= 2 * allowed + (2e-6 if cache.softcap else 1e-6)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 positions below 128 and of 64 from there, so that short contexts have every kind."""
    for name, value in {
        "SMALL_CHUNK": 32,
        "LARGE_CHUNK": 64,
        "LARGE_FROM": 128,
        "KEY_BLOCK": 32,
        "COMBINED_CHUNKS": 4,
        "PLANNED_CHUNKS": 4,
    }.items():
        monkeypatch.setattr(twin, name, value)
    few_programs(monkeypatch, 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("groups", "kv_heads", "size", "page"),
    [(1, 3, 16, 64), (4, 2, 16, 32), (3, 1, 80, 64), (7, 2, 96, 64), (16, 1, 32, 16), (2, 1, 24, 128)],
)
def test_against_its_definition(
    device: str, dtypes: tuple[torch.dtype, ...], groups: int, kv_heads: int, size: int, page: int
) -> None:
    """Context ends in the first key, inside and at the edge of both kinds of chunks, and across them."""
    windows = [Window(0, 1), Window(30, 4), Window(0, 0), Window(124, 5), Window(189, 3), Window(250, 5)]
    for dtype in dtypes:
        cache = make_cache(device, dtype, len(windows), 256, groups, kv_heads, size, page)
        check(cache, windows, 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("groups", "kv_heads", "size", "page"), [(1, 1, 1, 16), (3, 3, 33, 16), (5, 1, 3, 64)]
)
def test_smallest_and_odd_sizes(
    device: str, dtypes: tuple[torch.dtype, ...], groups: int, kv_heads: int, size: int, page: int
) -> None:
    """One row at the first position and behind it, alone and beside an odd window."""
    for dtype in dtypes:
        cache = make_cache(device, dtype, 2, 40, groups, kv_heads, size, page)
        for start in (0, 33):
            check(cache, [Window(start, 1)], 1)
        check(cache, [Window(2, 1), Window(31, 3)], 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("sliding", "softcap"), [(1, None), (33, 3.0), (100, None), (None, 3.0)])
def test_sliding_and_capped_against_the_definition(
    device: str, dtypes: tuple[torch.dtype, ...], sliding: int | None, softcap: float | None
) -> None:
    """Windows that end in a tile, at its edge, chunks back, and before the first position."""
    windows = [Window(30, 4), Window(0, 0), Window(124, 5), Window(250, 5)]
    dtype = dtypes[(sliding or 0) % len(dtypes)]
    cache = make_cache(device, dtype, len(windows), 256, 3, 1, 16, 32)
    check(cache.like(sliding, softcap), windows, 5)


@pytest.mark.usefixtures("small")
def test_a_window_longer_than_the_context_changes_no_bit(
    device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    windows = [Window(0, 5), Window(60, 5), Window(195, 5)]
    for dtype in dtypes:
        cache = make_cache(device, dtype, 3, 200, 3, 1, 16, 32)
        query = torch.randn(3, 5, 3, 16).to(device, dtype)
        whole = attend(cache, windows, query)
        assert torch.equal(attend(cache.like(200), windows, query), whole)
        shorter = attend(cache.like(199), windows, query)
        assert torch.equal(shorter[:2], whole[:2]) and torch.equal(shorter[2, :4], whole[2, :4])
        assert not torch.equal(shorter[2, 4], whole[2, 4])


@pytest.mark.usefixtures("small")
def test_what_a_window_has_left_behind_is_not_read(device: str) -> None:
    """Whole blocks of keys before every row's window hold NaN, and their chunks are not listed."""
    cache = make_cache(device, torch.float32, 2, 256, 2, 1, 16, 32).like(40)
    windows = [Window(230, 4), Window(100, 3)]
    query = torch.randn(2, 4, 2, 16, device=device)
    before = attend(cache, windows, query)
    for slot, window in enumerate(windows):
        for whole in (cache.keys, cache.values):
            whole[slot, : (window.start - 39) // 16 * 16] = float("nan")
    assert torch.equal(attend(cache, windows, query)[0], before[0])
    positions = torch.tensor([[230, 231, 232, 233], [100, 101, 102, 250]], device=device)
    valid = torch.tensor([[True] * 4, [True, True, True, False]], device=device)
    table = torch.zeros(2, 8, dtype=torch.long, device=device)
    plan = twin.plan_attention(Windows(positions, valid, table, (), ()), cache.heads, 32, torch.float32)
    chunks = plan.lists[40]
    items = [divmod(item, 1 << 16) for item in chunks.items[: int(chunks.count)].tolist()]
    # 191 to 233 lie in the large chunks from 128 and from 192 on, 61 to 102 in the small ones from 32 on.
    assert items == [(0, 4), (0, 5), (1, 1), (1, 2), (1, 3)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("start", "sliding", "softcap"),
    [(0, None, None), (28, None, None), (122, None, None), (188, None, None), (188, 62, 2.0)],
)
def test_a_row_alone_is_the_row_among_others(
    device: str, dtypes: tuple[torch.dtype, ...], start: int, sliding: int | None, softcap: float | None
) -> None:
    """Windows of every width, padded or not, in any slot, beside any others, over any pages."""
    for dtype in dtypes:
        cache = make_cache(device, dtype, 3, 208, 3, 1, 16, 32).like(sliding, softcap)
        query = torch.randn(9, 3, 16).to(device, dtype)
        noise = torch.randn(3, 10, 3, 16).to(device, dtype)
        alone = [attend(cache, [Window(start + i, 1)], query[i][None, None])[0, 0] for i in range(9)]
        for width in range(1, 10):
            others = [Window(200, 1), Window(0, 0)] if width % 2 else [Window(5, width), Window(90, 2)]
            place = width % 3
            windows = [*others[:place], Window(start, width), *others[place:]]
            slots = [*[1, 2][:place], 0, *[1, 2][place:]]
            rows = noise[:, : width + width % 2].clone()
            rows[place, :width] = query[:width]
            among = attend(cache, windows, rows, slots, seed=width, spare=width)
            for i in range(width):
                assert torch.equal(among[place, i], alone[i]), (dtype, width, i)


@pytest.mark.usefixtures("small")
def test_more_rows_than_a_tile(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """A prompt's tail: rows of several tiles, of which the first see fewer keys than the last."""
    for dtype in dtypes:
        cache = make_cache(device, dtype, 1, 140, 4, 1, 16, 64)
        query = torch.randn(1, 20, 4, 16).to(device, dtype)
        whole = attend(cache, [Window(118, 20)], query)
        for first in (0, 15, 16, 19):
            part = attend(cache, [Window(118 + first, 1)], query[:, first : first + 1])
            assert torch.equal(part[:, 0], whole[:, first])
        check(cache, [Window(118, 20)], 20)


@pytest.mark.parametrize("page", [1, 8, 24, 48])
def test_pages_that_no_tile_fits_are_refused(device: str, page: int) -> None:
    cache = make_cache(device, torch.float32, 1, 48, 1, 1, 16, page)
    with pytest.raises(ValueError, match=f"pages of {page} positions"):
        attend(cache, [Window(3, 1)], torch.zeros(1, 1, 1, 16, device=device))


def test_at_the_real_chunk_sizes(device: str) -> None:
    cache = make_cache(device, torch.float32, 4, 5160, 2, 1, 16, 64)
    windows = [Window(125, 5), Window(4093, 5), Window(4604, 5), Window(5119, 3)]
    check(cache, windows, 5)


def test_key_chunks_are_fixed_by_position(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk up to the last valid position once, large ones first, and nothing of an inactive slot."""
    monkeypatch.setattr(twin, "PLANNED_CHUNKS", 8)
    heads = AttentionHeads(2, 1, 16)
    ends = [0, 1, 128, 129, 4096, 4097, 4608, 4609]
    positions = torch.tensor([[max(end - 2, 0), max(end - 1, 0), 4700] for end in ends], device=device)
    valid = torch.tensor([[end > 1, end > 0, False] for end in ends], device=device)
    table = torch.zeros(len(ends), 80, dtype=torch.long, device=device)
    plan = twin.plan_attention(Windows(positions, valid, table, (), ()), heads, 64, torch.float32)
    counts = [0, 1, 1, 2, 32, 33, 33, 34]
    chunks = plan.lists[None]
    assert plan.max_chunks == 34 and chunks.last.tolist() == [end - 1 for end in ends]
    items = [divmod(item, 1 << 16) for item in chunks.items[: int(chunks.count)].tolist()]
    assert sorted(items) == [(s, c) for s, count in enumerate(counts) for c in range(count)]
    assert all(chunk >= 32 for _, chunk in items[:4]) and all(chunk < 32 for _, chunk in items[4:])


def test_one_key_takes_all_the_weight(device: str) -> None:
    """A score far above the rest in an early chunk: later chunks weigh nothing, and nothing overflows."""
    cache = make_cache(device, torch.float32, 1, 300, 1, 1, 16, 64)
    cache.keys[0, 3] = 400.0
    query = torch.ones(1, 2, 1, 16, device=device)
    out = attend(cache, [Window(298, 2)], query)
    assert torch.equal(out[0], cache.values[0, 3].expand(2, 1, 16))
    cache.keys[0, 3], cache.keys[0, :3], cache.keys[0, 4:] = 0.0, -400.0, -400.0
    assert torch.equal(attend(cache, [Window(298, 2)], query)[0], cache.values[0, 3].expand(2, 1, 16))


def test_a_captured_graph_follows_the_device(device: str) -> None:
    """Lengths and rows that change after capture: the replay is what a fresh call gives."""
    if device == "cpu":
        pytest.skip("graphs need CUDA")
    cache = make_cache(device, torch.bfloat16, 2, 700, 4, 2, 64, 64)
    whole = [Window(0, 700), Window(0, 700)]
    keys, values, table = cache.paged(whole, [0, 1], seed=3)
    positions = torch.zeros(2, 3, dtype=torch.long, device=device)
    valid = torch.ones(2, 3, dtype=torch.bool, device=device)
    query = torch.randn(2, 3, 8, 64, device=device).bfloat16()

    def run() -> torch.Tensor:
        windows = Windows(positions, valid, table, (), ())
        plan = twin.plan_attention(windows, cache.heads, 64, torch.bfloat16)
        out: torch.Tensor = twin.paged_attention(query, (keys, values), plan, Scores(0.125))
        return out

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for starts, active in (((5, 600), (True, True)), ((127, 30), (True, False)), ((511, 380), (True, True))):
        positions.copy_(torch.tensor([[start + i for i in range(3)] for start in starts]))
        valid.copy_(torch.tensor(active)[:, None].expand(2, 3))
        graph.replay()
        assert torch.equal(out, run())
