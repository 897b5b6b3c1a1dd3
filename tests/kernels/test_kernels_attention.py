"""Attention over pages in every form: against float64, and every row's bits against the row
alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.attention import attention_chunks
from spd.kernels.attention import paged_attention as plain
from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.launch import Device, power_of_two
from spd.kernels.native import library
from tests.helpers import limit_programs
from tests.kernels.compile_ahead import DEVICES
from tests.kernels.forms import COMPILED, ROUNDED, Form, parametrize_forms, to_native_pages

twin = pytest.importorskip("spd.kernels.attention.paged_attention_triton")

NAN = float("nan")


@dataclass(frozen=True)
class Window:
    """`rows` valid positions from `start` in a slot; no rows is an inactive slot."""

    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows if self.rows else 0


WINDOWS = [
    Window(0, 1),
    Window(30, 4),
    Window(0, 0),
    Window(124, 5),
    Window(189, 3),
    Window(250, 5),
]
"""They end in the first key, inside and at the edge of both kinds of chunks, and across them."""


@dataclass
class Cache:
    """Positions' keys and values [slots, positions, K, D], and how they are scattered over pages.

    With a rank the keys are latents of one head, and the values their first `rank` numbers.
    """

    keys: Tensor
    values: Tensor
    heads: AttentionHeads
    page: int
    softcap: float | None = None
    rank: int | None = None
    sinks: Tensor | None = None

    @property
    def scores(self) -> AttentionParams:
        scale = 0.21 if self.rank else self.heads.head_dim**-0.5
        return AttentionParams(scale, self.heads.sliding[-1], self.softcap, self.sinks)

    def like(
        self,
        sliding: int | None = None,
        cap: float | None = None,
        first_key: int = 0,
        sinks: bool = False,
    ) -> Cache:
        """Return the cache of a layer with a window, a cap or sinks.

        The plan is for plain layers, too.
        """
        heads = replace(self.heads, sliding=(None, sliding), first_key=first_key)
        low = torch.linspace(-3, 4, heads.num_heads, device=self.keys.device)
        return replace(self, heads=heads, softcap=cap, sinks=low if sinks else None)

    def paged(
        self,
        form: Form,
        windows: Sequence[Window],
        slots: Sequence[int],
        seed: int = 0,
        spare: int = 0,
    ) -> tuple[list[Tensor], Tensor]:
        """Return pools and a table for windows on the given slots.

        Pages that no slot has hold NaN; so does what lies beyond a window for Triton, which never
        reads it.
        """
        dead = NAN if form.name == "triton" else 0.0
        capacity = -(-self.keys.shape[1] // self.page) + spare
        order = torch.randperm(
            capacity * len(slots) + 3, generator=torch.Generator().manual_seed(seed)
        )
        table = order[: capacity * len(slots)].view(len(slots), capacity).to(self.keys.device)
        pools = []
        for tensor in (self.keys, self.values)[: 1 if self.rank else 2]:
            pool = tensor.new_full((len(order), self.page, *tensor.shape[2:]), NAN)
            pool[table.flatten()] = dead
            for s, (slot, window) in enumerate(zip(slots, windows, strict=True)):
                at = torch.arange(window.end, device=tensor.device)
                pool[table[s][at // self.page], at % self.page] = tensor[slot, : window.end]
            if form.native and not self.rank:
                pool = to_native_pages(pool, values=tensor is self.values)
            pools.append(pool.squeeze(2) if self.rank else pool)
        return pools, table

    def straight(self, slot: int, position: int, query: Tensor, last: int | None = None) -> Tensor:
        """Compute one row by definition, of query [H, D], in its dtype.

        last: the row's last key, by default its position.
        """
        end = 1 + (position if last is None else last)
        groups = self.heads.num_heads // self.heads.num_kv_heads
        heads = self.heads
        first = max(
            min(heads.first_key, position), position + 1 - (heads.sliding[-1] or position + 1)
        )
        visible = (tensor[slot, first:end].to(query.dtype) for tensor in (self.keys, self.values))
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in visible)
        scores = torch.einsum("hd,thd->ht", query, keys) * self.scores.scale
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.to(scores.dtype).unsqueeze(-1)), -1)
        weights = scores.softmax(-1)[:, : len(values)]
        return torch.einsum("ht,thd->hd", weights, values)


def make_cache(
    form: Form,
    dtype: torch.dtype,
    slots: int,
    length: int,
    groups: int,
    kv_heads: int,
    size: int,
    page: int,
) -> Cache:
    if form.native and size % 8:
        pytest.skip("heads of the C kernels are multiples of 8")
    torch.manual_seed(1)
    keys, values = (
        torch.randn(slots, length, kv_heads, size).to(form.device, dtype) for _ in range(2)
    )
    heads = AttentionHeads(groups * kv_heads, kv_heads, size)
    return Cache(keys, values, heads, 64 if form.native else page)


def make_latents(
    form: Form,
    dtype: torch.dtype,
    slots: int,
    length: int,
    heads: int = 5,
    rank: int = 24,
    rope_dim: int = 8,
) -> Cache:
    if form.native and (rank + rope_dim) % 8:
        pytest.skip("heads of the C kernels are multiples of 8")
    torch.manual_seed(8)
    latents = torch.randn(slots, length, 1, rank + rope_dim).to(form.device, dtype)
    page = 64 if form.native else 32
    return Cache(
        latents, latents[..., :rank], AttentionHeads(heads, 1, rank + rope_dim), page, rank=rank
    )


def random_query(cache: Cache, *rows: int) -> Tensor:
    shape = cache.heads.num_heads, cache.heads.head_dim
    return torch.randn((*rows, *shape)).to(cache.keys.device, cache.keys.dtype)


def attend(
    form: Form,
    cache: Cache,
    windows: Sequence[Window],
    query: Tensor,
    slots: Any = None,
    **scattered: int,
) -> Tensor:
    """Return the form's result for query [S, Q, H, D]; rows beyond a window are invalid."""
    slots = list(range(len(windows))) if slots is None else slots
    pools, table = cache.paged(form, windows, slots, **scattered)
    width = query.shape[1]
    positions = torch.tensor(
        [[w.start + min(i, max(w.rows - 1, 0)) for i in range(width)] for w in windows]
    )
    valid = torch.tensor([[i < w.rows for i in range(width)] for w in windows])
    bounds = [w.end for w in windows]
    runs = [None] * len(windows)
    rows = Windows(positions.to(query.device), valid.to(query.device), table, bounds, runs)
    return attend_planned(form=form, cache=cache, rows=rows, query=query, pools=pools)


def prefill(
    form: Form, cache: Cache, start: int, query: Tensor, end: int | None = None, **scattered: Any
) -> Tensor:
    """Return rows [T, H, D] of a chunk of the first slot's prompt, whose positions up to `end` are
    stored."""
    end = start + len(query) if end is None else end
    pools, table = cache.paged(form, [Window(0, end)], [0], **{"seed": 5, "spare": 2, **scattered})
    positions = torch.arange(start, start + len(query), device=query.device)[None]
    bound = min(
        -(-end // attention_chunks.KV_BLOCK) * attention_chunks.KV_BLOCK,
        table.shape[1] * cache.page,
    )
    rows = Windows(
        positions, torch.ones_like(positions, dtype=torch.bool), table, [bound], [None], start
    )
    return attend_planned(form=form, cache=cache, rows=rows, query=query[None], pools=pools)[0]


def attend_planned(form: Form, cache: Cache, rows: Windows, query: Tensor, pools: Any) -> Tensor:
    plan = form.ops.plan_attention(rows, cache.heads, cache.page, query.dtype)
    if cache.rank:
        return form.ops.mla_attention(
            query=query, pages=pools[0], plan=plan, rank=cache.rank, scale=cache.scores.scale
        )
    return form.ops.paged_attention(query, pools, plan, cache.scores)


DEFINED: dict[bytes, tuple[Tensor, Tensor]] = {}


def define_rows(cache: Cache, rows: Sequence[tuple[int, int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return rows [N, H, D] by the definition in float64 and in the cache's dtype.

    Each is computed once: the forms of one dtype ask for the same rows.
    """
    digest = hashlib.sha256()
    tensors = [cache.keys, cache.values, *(query for _, _, query in rows)]
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    places = [(slot, position) for slot, position, _ in rows]
    digest.update(repr((places, cache.keys.dtype, cache.scores, cache.heads)).encode())
    key = digest.digest()
    if key not in DEFINED:
        expected, plain = (
            torch.stack([cache.straight(slot, at, query.to(dtype)) for slot, at, query in rows])
            for dtype in (torch.float64, cache.keys.dtype)
        )
        DEFINED[key] = (expected, plain)
    return DEFINED[key]


def assert_right(
    form: Form, cache: Cache, result: Tensor, rows: Sequence[tuple[int, int, Tensor]]
) -> None:
    """Assert rows [N, H, D] near the definition of each (slot, position, query)."""
    assert result.isfinite().all() and result.dtype == cache.keys.dtype
    expected, plain = define_rows(cache, rows)
    little = 2e-6 if cache.softcap else 1e-6
    if cache.rank:
        little = 6 * torch.finfo(result.dtype).eps * (1 + expected.abs().max().item())
    allowed = 2 * float((plain.double() - expected).abs().max()) + little
    if result.dtype == torch.bfloat16 and form.name != "triton":
        # Weights are rounded to bfloat16 before they meet the values.
        allowed = 3 * ROUNDED * float(cache.values.nan_to_num().abs().max())
    assert (result.double() - expected).abs().max() <= allowed


def check(form: Form, cache: Cache, windows: Sequence[Window], width: int) -> None:
    query = random_query(cache, len(windows), width)
    out = attend(form, cache, windows, query)
    assert out.dtype == query.dtype and out.shape == (*query.shape[:3], cache.values.shape[-1])
    places = [(s, i) for s, window in enumerate(windows) for i in range(window.rows)]
    rows = [(s, windows[s].start + i, query[s, i]) for s, i in places]
    slots = [s for s, _ in places]
    assert_right(form, cache, out[slots, [i for _, i in places]], rows)
    idle = [s for s, window in enumerate(windows) if not window.rows]
    assert form.native or not out[idle].any()


def check_prompt(form: Form, cache: Cache, start: int, rows: int) -> None:
    query = random_query(cache, rows)
    out = prefill(form, cache, start, query)
    assert out.shape == (*query.shape[:2], cache.values.shape[-1])
    assert_right(form, cache, out, [(0, start + i, query[i]) for i in range(rows)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set chunks of 32 positions below 64, of 64 below 128 and of 128 from there, so that short
    contexts have every kind."""
    sizes = {"SMALL_CHUNK": 32, "TWICE_FROM": 64, "LARGE_FROM": 128, "KEY_BLOCK": 32}
    for name, value in {**sizes, "COMBINED_CHUNKS": (4, 4), "PLANNED_CHUNKS": 4}.items():
        monkeypatch.setattr(twin, name, value, raising=False)
        monkeypatch.setattr(attention_chunks, name, value, raising=False)
    limit_programs(monkeypatch, 2)


batch_invariant = pytest.mark.parametrize("form", ["triton", *COMPILED], indirect=True)
"""Of forms whose rows have the same bits whatever stands beside them."""
triton = pytest.mark.parametrize("form", ["triton"], indirect=True)
torch_form = pytest.mark.parametrize("form", ["torch"], indirect=True)
KINDS: list[dict[str, Any]] = [
    {"sliding": 1},
    {"sliding": 17},
    {"sliding": 33, "cap": 3.0},
    {"sliding": 100},
    {"cap": 3.0},
    {"first_key": 1},
    {"first_key": 3},
    {"sinks": True},
    {"sliding": 17, "cap": 3.0, "sinks": True},
]
"""Layers that slide, cap and have sinks, and models in whose caches the first positions hold
nothing."""


# -- the definition ------------------------------------------------------------------------------------


HEAD_SIZES = [
    (1, 3, 16, 64),
    (4, 2, 16, 32),
    (3, 1, 80, 64),
    (7, 2, 96, 64),
    (16, 1, 32, 16),
    (2, 1, 256, 128),
    (1, 1, 1, 16),
    (3, 3, 33, 16),
    (5, 1, 3, 64),
    (3, 1, 512, 64),
]


@pytest.mark.covers(1, count=46)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("form", "groups", "kv_heads", "size", "page"),
    parametrize_forms(HEAD_SIZES, (0, 2, 7)),
    indirect=["form"],
)
def test_windows_equal_their_definition(
    form: Form, groups: int, kv_heads: int, size: int, page: int
) -> None:
    for dtype in form.types(groups):
        check(
            form,
            make_cache(
                form=form,
                dtype=dtype,
                slots=6,
                length=256,
                groups=groups,
                kv_heads=kv_heads,
                size=size,
                page=page,
            ),
            WINDOWS,
            5,
        )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("form", "sliding", "shift"),
    parametrize_forms([(None, 0), (5, 0), (33, 0), (33, 7), (100, 1)], (0, 3)),
    indirect=["form"],
)
def test_rows_may_attend_to_the_end_of_their_block(
    form: Form, sliding: int | None, shift: int
) -> None:
    """Every row of a window attends to its last position; a sliding window ends `shift` before it."""
    windows = [Window(0, 5), Window(0, 0), Window(30, 4), Window(124, 5), Window(189, 3)]
    cache = make_cache(form, form.dtypes[0], len(windows), 256, 2, 2, 32, 32).like(sliding)
    query = random_query(cache, len(windows), 5)
    pools, table = cache.paged(form, windows, range(len(windows)))
    row = torch.arange(5)
    starts = torch.tensor([window.start for window in windows])[:, None]
    valid = row < torch.tensor([window.rows for window in windows])[:, None]
    ends = torch.tensor([max(window.end - 1, 0) for window in windows])[:, None]
    last = torch.where(valid, ends, 0).to(query.device)
    positions = (starts + row - shift).clamp(min=0).minimum(ends).to(query.device)
    rows = Windows(
        positions=positions,
        valid=valid.to(query.device),
        page_table=table,
        bounds=[window.end for window in windows],
        first_pages=[None] * len(windows),
        last=last,
    )
    out = attend_planned(form=form, cache=cache, rows=rows, query=query, pools=pools)
    allowed = 2e-5 if query.dtype == torch.float32 else 3 * ROUNDED * float(cache.values.max())
    for slot, window in enumerate(windows):
        for i in range(window.rows):
            at = int(positions[slot, i])
            expected = cache.straight(slot, at, query[slot, i].double(), window.end - 1)
            assert (out[slot, i].double() - expected).abs().max() < allowed


@pytest.mark.covers(1, count=43)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("form", "kind"),
    parametrize_forms([(kind,) for kind in KINDS], (1, 2, 6, 8)),
    indirect=["form"],
    ids=str,
)
def test_layers_slide_and_cap_by_their_definition(form: Form, kind: dict[str, Any]) -> None:
    """Windows that end in a tile, at its edge, chunks back, and before the first position; three
    tiles too.

    Blocks that windows and prompts have left behind hold NaN.
    """
    dtype = form.dtypes[len(str(kind)) % len(form.dtypes)]
    sliding = kind.get("sliding")

    def forget(cache: Cache, block: int, *starts: int) -> Cache:
        for slot, start in enumerate(starts if form.name == "triton" and sliding else ()):
            for tensor in (cache.keys, cache.values):
                tensor[slot, : max(0, start + 1 - sliding) // block * block] = NAN
        return cache

    cache = forget(
        make_cache(
            form=form, dtype=dtype, slots=4, length=256, groups=3, kv_heads=1, size=16, page=32
        ).like(**kind),
        32,
        30,
        0,
        124,
        250,
    )
    check(form, cache, [Window(30, 4), Window(0, 5), Window(124, 5), Window(250, 5)], 5)
    for rows, start in (
        ((7, 190), (70, 0)) if form.name == "triton" else ((150, 70), (7, 190), (70, 0))
    ):
        cache = make_cache(
            form=form,
            dtype=dtype,
            slots=1,
            length=start + rows,
            groups=2,
            kv_heads=1,
            size=16,
            page=64,
        ).like(**kind)
        check_prompt(form, forget(cache, 64, start), start, rows)


PROMPTS = [
    (1, 0, (2, 2), 16, 64),
    (130, 0, (3, 1), 16, 64),
    (5, 63, (4, 2), 80, 64),
    (33, 64, (7, 1), 96, 32),
    (70, 190, (2, 1), 32, 16),
    (140, 65, (4, 1), 16, 128),
    (20, 520, (4, 2), 16, 64),
    (3, 5, (3, 3), 33, 7),
    (9, 70, (2, 1), 512, 64),
]


@pytest.mark.parametrize(
    ("form", "rows", "start", "heads", "size", "page"),
    parametrize_forms(PROMPTS, (0, 3, 7)),
    indirect=["form"],
)
def test_prompt_chunks_equal_their_definition(
    form: Form, rows: int, start: int, heads: tuple[int, int], size: int, page: int
) -> None:
    for dtype in form.types(rows):
        cache = make_cache(
            form=form,
            dtype=dtype,
            slots=1,
            length=start + rows,
            groups=heads[0] // heads[1],
            kv_heads=heads[1],
            size=size,
            page=page,
        )
        check_prompt(form, cache, start, rows)


LATENTS = [(5, 24, 8), (4, 128, 32), (16, 512, 64), (3, 33, 6)]


@pytest.mark.covers(1, count=20)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), LATENTS)
def test_latents_equal_their_definition(form: Form, heads: int, rank: int, rope_dim: int) -> None:
    if form.name == "triton" and rank > 100:
        pytest.skip("the interpreter is slow")
    for dtype in form.types(heads):
        check(
            form,
            make_latents(
                form=form,
                dtype=dtype,
                slots=6,
                length=256,
                heads=heads,
                rank=rank,
                rope_dim=rope_dim,
            ),
            WINDOWS,
            5,
        )
        for start, rows in (
            ((64, 37), (160, 5)) if form.name == "triton" else ((0, 20), (64, 37), (160, 5))
        ):
            check_prompt(
                form,
                make_latents(
                    form=form,
                    dtype=dtype,
                    slots=1,
                    length=start + rows,
                    heads=heads,
                    rank=rank,
                    rope_dim=rope_dim,
                ),
                start,
                rows,
            )


# -- rows apart ----------------------------------------------------------------------------------------


ROWS: list[tuple[int, dict[str, Any]]] = [
    *((start, {}) for start in (0, 28, 122, 188)),
    (188, {"sliding": 62, "cap": 2.0}),
    (60, {"sliding": 30, "cap": 2.0, "sinks": True}),
    *((start, {"latent": True}) for start in (28, 122, 188)),
]


def case_of(form: Form, dtype: torch.dtype, slots: int, length: int, kind: dict[str, Any]) -> Cache:
    if "latent" in kind:
        return make_latents(form, dtype, slots, length)
    size = 32 if form.native else 16  # of latents the C kernels copy what they read
    return make_cache(
        form=form, dtype=dtype, slots=slots, length=length, groups=3, kv_heads=1, size=size, page=32
    ).like(**kind)


ALONE = [
    *parametrize_forms([(*row, (1, 2, 5, 9)) for row in ROWS], (), "triton", *COMPILED),
    *parametrize_forms([(*row, (2, 5)) for row in ROWS[1::3]], (0, 1, 2), "triton"),
    *parametrize_forms([(118, {}, (20,))], (0,), "triton", *COMPILED),
    *parametrize_forms([(68, {}, (33, 70))], (), *COMPILED),
]
"""Windows of few rows, and of more rows than a tile, of which the first see fewer keys than the
last."""


@pytest.mark.covers(1, count=46)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("form", "start", "kind", "widths"), ALONE, indirect=["form"], ids=str)
def test_a_row_alone_is_the_row_among_others(
    form: Form, start: int, kind: dict[str, Any], widths: tuple[int, ...]
) -> None:
    """Windows of every width, padded or not, in any slot, beside any others, over any pages."""
    for dtype in form.dtypes if len(widths) > 2 else form.types(start):
        cache = case_of(form, dtype, 3, 208, kind)
        max_width = max(widths)
        query = random_query(cache, max_width)
        noise = random_query(cache, 3, max_width + 1)
        alone = {
            i: attend(form, cache, [Window(start + i, 1)], query[i][None, None])[0, 0]
            for i in range(max_width)
            if i < 5 or i % 4 == 0 or i == max_width - 1
        }
        for width in widths:
            other_windows = (
                [Window(200, 1), Window(0, 0)] if width % 2 else [Window(5, width), Window(90, 2)]
            )
            place = width % 3
            windows = [*other_windows[:place], Window(start, width), *other_windows[place:]]
            slots = [*[1, 2][:place], 0, *[1, 2][place:]]
            rows = noise[:, : width + width % 2].clone()
            rows[place, :width] = query[:width]
            among = attend(form, cache, windows, rows, slots, seed=width, spare=width)
            for i in (i for i in alone if i < width):
                assert torch.equal(among[place, i], alone[i]), (dtype, width, i)
        if form.native:  # whose prompts run the same program
            assert torch.equal(
                prefill(form, cache, start, query)[[*alone]], torch.stack([*alone.values()])
            )


@batch_invariant
@pytest.mark.parametrize(
    "kind", [{}, {"sliding": 30, "cap": 2.0, "sinks": True}, {"latent": True}], ids=str
)
def test_a_row_of_a_prompt_alone_is_the_row_in_its_chunk(form: Form, kind: dict[str, Any]) -> None:
    """In a chunk of its own, and as the last row of a shorter one; in any tile, masked or not."""
    interpreted = form.name == "triton" and form.device == "cpu"
    for dtype in form.types(0):
        cache = case_of(form, dtype, 1, 130, kind)
        query = random_query(cache, 70)
        in_chunk = prefill(form, cache, 60, query)
        for row in (3, 16, 69) if interpreted else (0, 3, 15, 16, 40, 69):
            alone = prefill(form, cache, 60 + row, query[row : row + 1], end=130)
            assert torch.equal(alone[0], in_chunk[row]), row
            assert torch.equal(
                prefill(form, cache, 60, query[: row + 1], end=130)[row], in_chunk[row]
            ), row


def test_one_key_takes_all_the_weight(form: Form) -> None:
    """A score far above the rest in an early chunk: later chunks weigh nothing, and nothing
    overflows."""
    cache = make_cache(
        form=form, dtype=form.dtypes[0], slots=1, length=300, groups=1, kv_heads=1, size=16, page=64
    )
    query = torch.ones(1, 2, 1, 16, device=form.device, dtype=form.dtypes[0])
    for large, fill in ((400.0, None), (0.0, -400.0)):
        if fill is not None:
            cache.keys.fill_(fill)
        cache.keys[0, 3] = large
        out = attend(form, cache, [Window(298, 2)], query)
        assert torch.equal(out[0], cache.values[0, 3].expand(2, 1, 16))


# -- C's -----------------------------------------------------------------------------------------------


compiled = pytest.mark.parametrize("form", COMPILED, indirect=True)
LONG = 5500
"""A context of small sections and of large ones."""


def long_case(form: Form, groups: int, kv_heads: int, kind: dict[str, Any]) -> Cache:
    """Return two slots of `LONG` positions; heads of a size that is kept in tiles."""
    return make_cache(
        form=form,
        dtype=form.dtypes[0],
        slots=2,
        length=LONG,
        groups=groups,
        kv_heads=kv_heads,
        size=64,
        page=64,
    ).like(**kind)


LONG_KINDS: list[dict[str, Any]] = [{}, {"sliding": 700}, {"sliding": 300, "sinks": True}]


@compiled
@pytest.mark.parametrize("kind", LONG_KINDS, ids=str)
def test_long_windows_equal_their_definition(form: Form, kind: dict[str, Any]) -> None:
    cache = long_case(form, groups=3, kv_heads=1, kind=kind)
    check(form, cache, [Window(LONG - 3, 3), Window(4094, 4)], 4)


@pytest.mark.covers(1, count=8)
@compiled
@pytest.mark.parametrize("kind", LONG_KINDS[:2], ids=str)
def test_who_shares_a_long_context_changes_no_bit(
    form: Form, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 1 to 16 rows beside another slot, by several threads, sections shared or not."""
    cache = long_case(form, groups=3, kv_heads=2, kind=kind)
    query = random_query(cache, 2, 16)
    start = LONG - 16
    alone = torch.stack(
        [attend(form, cache, [Window(start + i, 1)], query[:1, i : i + 1])[0, 0] for i in range(16)]
    )
    for rows, threads, blocks in ((1, 1, 0), (4, 2, 8), (8, 5, 8), (16, 3, 8), (16, 1, 0)):
        monkeypatch.setattr(form.ops, "threads", threads)
        monkeypatch.setattr(library, "MOST_BLOCKS", blocks)
        windows = [Window(start, rows), Window(300, rows)]
        among = attend(form, cache, windows, query[:, :rows].contiguous())
        assert torch.equal(among[0], alone[:rows]), (rows, threads, blocks)


# -- Triton's ------------------------------------------------------------------------------------------


BEGINS = [*range(0, 1024, 128), *range(1024, 4096, 256), *range(4096, 6000, 512)]
"""Where chunks begin."""


@triton
@pytest.mark.parametrize("processors", [1, 500])
def test_key_chunks_are_fixed_by_position(
    form: Form, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk that a row sees, up to the last valid one, is in one run, large ones first; an
    inactive slot has a run of nothing.

    The fewer programs there are for the chunks, the more chunks a run has.
    """
    monkeypatch.setattr(twin, "PLANNED_CHUNKS", 8)
    limit_programs(monkeypatch, processors)
    ends = [0, 1, 128, 129, 1024, 1025, 4096, 4097, 4608, 4609]
    positions = torch.tensor(
        [[max(end - 2, 0), max(end - 1, 0), 4700] for end in ends], device=form.device
    )
    valid = torch.tensor([[end > 1, end > 0, False] for end in ends], device=form.device)
    table = torch.zeros(len(ends), 80, dtype=torch.long, device=form.device)
    windows = Windows(positions, valid, table, (), ())
    heads = AttentionHeads(2, 1, 16, sliding=(None, 300))
    plan = twin.plan_attention(windows, heads, 64, torch.float32)
    assert plan.max_chunks == sum(begin < 80 * 64 for begin in BEGINS)
    assert set(plan.lists) == {None, 300} and not plan.arrived.any()
    for sliding, chunks in plan.lists.items():
        assert chunks.last.tolist() == [end - 1 for end in ends]
        count, run, turns = chunks.counts.tolist()
        assert sliding or (run > 1) == (processors == 1), run
        assert turns == 0
        items = [divmod(item, 1 << 16) for item in chunks.items[:count].tolist()]
        assert all(first % run == 0 for _, first in items) and len(set(items)) == count
        sizes = [BEGINS[first + 1] - BEGINS[first] for _, first in items]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
        for slot, end in enumerate(ends):
            seen = max(0, end - 1 - (sliding or end))
            firsts = sorted(first for s, first in items if s == slot)
            expected = {
                chunk // run * run
                for chunk, begin in enumerate(BEGINS)
                if begin < end and BEGINS[chunk + 1] > seen
            }
            assert firsts == sorted(expected or {0}) and len(firsts) == int(chunks.runs[slot])


@triton
@pytest.mark.slow
def test_windows_equal_their_definition_at_the_real_chunk_sizes(form: Form) -> None:
    cache = make_cache(
        form=form, dtype=torch.float32, slots=4, length=5160, groups=2, kv_heads=1, size=16, page=64
    )
    check(form, cache, [Window(125, 5), Window(4093, 5), Window(4604, 5), Window(5119, 3)], 5)


@pytest.mark.parametrize(
    "facts", [*DEVICES.values(), Device()], ids=lambda facts: str(facts.capability)
)
def test_tiles_fit_every_devices_shared_memory(facts: Device) -> None:
    """Kernels hold the rows of a tile and its stages of keys and values at once."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (16, 64, 80, 128, 256, 512):
            width = max(16, power_of_two(head_dim)) * dtype.itemsize
            rows, keys, stages = twin.tile_shape(dtype, head_dim, facts)
            assert stages >= 1 and (rows + 2 * keys * stages) * width < facts.shared
    assert twin.tile_shape(torch.bfloat16, 128, DEVICES[90]) == (64, 64, 3)
    assert twin.programs_that_fit(DEVICES[90], 112 * 1024) == 264, "with what each takes besides"
    assert twin.programs_that_fit(DEVICES[90], 184_320) == 132


# -- torch's -------------------------------------------------------------------------------------------


@torch_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sliding", [None, 700, 40])
def test_which_blocks_are_read_changes_no_bit(
    form: Form, sliding: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Against the definition; the same bits in fours, by any bound, from pages that follow each
    other or not.

    Also where blocks that were left behind are read.
    """
    start = 2 * attention_chunks.KV_BLOCK + 36
    cache = make_cache(
        form=form, dtype=dtype, slots=1, length=2048, groups=2, kv_heads=2, size=16, page=64
    ).like(sliding, softcap)
    query = random_query(cache, 1, 32)
    positions = torch.arange(start, start + 32)[None]
    pools, table = cache.paged(form, [Window(0, 2048)], [0])
    ordered_pools = [torch.cat((pool[:2], pool[table[0]])) for pool in pools]
    ordered_table = torch.arange(2, 34)[None]

    def run(
        first: int,
        rows: int,
        bound: int,
        *,
        in_order: bool = False,
        begin: int | None = None,
        read_all: bool = False,
    ) -> Tensor:
        pages = ordered_pools if in_order else pools
        page_table = ordered_table if in_order else table
        part = positions[:, first : first + rows]
        valid = torch.ones(1, rows, dtype=torch.bool)
        windows = Windows(part, valid, page_table, [bound], [begin])
        plan = form.ops.plan_attention(windows, cache.heads, 64, dtype)
        assert isinstance(plan, plain.MaskPlan)
        if read_all:
            bias = plain.causal_bias(
                positions=part[0],
                context=bound,
                groups=2,
                dtype=dtype,
                first_key=0,
                sliding=sliding,
            )
            plan = replace(plan, masks={sliding: (plain.SlotMask(bias),)})
        return form.ops.paged_attention(query[:, first : first + rows], pages, plan, cache.scores)[
            0
        ]

    together = run(0, 32, start + 32)
    assert torch.equal(together, run(0, 32, 1536, read_all=True))
    for bound in (1536, 1537, 2048):
        assert torch.equal(run(0, 32, bound), together)
        for begin in (None, 2):
            assert torch.equal(run(0, 32, bound, in_order=True, begin=begin), together)
    for first in range(0, 32, 4):
        assert torch.equal(run(first, 4, 1536 if first % 8 else 2048), together[first : first + 4])
    assert_right(form, cache, together, [(0, start + i, query[0, i]) for i in range(32)])


@torch_form
def test_invalid_rows_are_finite_under_a_window(form: Form) -> None:
    """Rows that are not valid may stand behind the pages that are read, where a window shows them
    nothing."""
    pool = torch.randn(10, 64, 1, 8)
    table = torch.arange(8)[None]
    valid = torch.tensor([[True, False]])
    for softcap in (None, 2.0):
        windows = Windows(torch.tensor([[3, 400]]), valid, table, [64], [None])
        heads = AttentionHeads(2, 1, 8, sliding=(16,))
        plan = form.ops.plan_attention(windows, heads, 64, torch.float32)
        query = torch.randn(1, 2, 2, 8)
        assert (
            form.ops.paged_attention(query, (pool, pool), plan, AttentionParams(1.0, 16, softcap))
            .isfinite()
            .all()
        )
