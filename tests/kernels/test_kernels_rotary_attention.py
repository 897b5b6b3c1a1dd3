"""Rotation, cache write and attention in one kernel: the bits of `rotary_store` and then
`paged_attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.attention import attention_chunks
from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from tests.helpers import limit_programs
from tests.kernels.forms import Form, normal, random_rotations

twin = pytest.importorskip("spd.kernels.attention.paged_attention_triton")

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
PAGE = 16
SLOT_PAGES = 16
POSITIONS = 300
"""Angles that there are; a slot has 256 positions."""
EPSILON = 0.05
TRASH_PAGE = 0
MOST_TILES = 120


@dataclass(frozen=True)
class Case:
    """A layer, and windows (first position, valid rows) of `width` rows, one a slot."""

    heads: AttentionHeads
    windows: tuple[tuple[int, int], ...]
    width: int
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False
    normed: bool = True
    rotated: bool = True
    wild: bool = False
    """True if a row's key, and another's value, are not finite."""

    @property
    def params(self) -> AttentionParams:
        """Return the layer's attention parameters."""
        sinks = torch.linspace(-3, 4, self.heads.num_heads) if self.sinks else None
        return AttentionParams(0.2, self.heads.sliding[-1], self.softcap, sinks)


MANY = ((0, 1), (30, 3), (0, 0), (62, 5), (61, 3), (125, 8), (200, 7))
"""The first key, no rows, and windows inside of a chunk, at a border and across one, small and
large."""
FEW = ((61, 3), (0, 0), (31, 5))
GROUPED = AttentionHeads(6, 2, 16)
CASES = {
    "groups": Case(GROUPED, MANY, 8),
    "one row": Case(GROUPED, ((0, 1), (63, 1), (64, 1), (130, 1)), 1, normed=False),
    "few": Case(AttentionHeads(3, 1, 16, sliding=(None, 17)), FEW, 5),
    "tiles": Case(AttentionHeads(5, 1, 8), FEW, 5, torch.float16),
    "a prompt's rows": Case(AttentionHeads(2, 2, 32), ((50, 33),), 33, torch.float16),
    "sliding": Case(replace(GROUPED, sliding=(None, 17)), MANY, 8, softcap=3.0),
    "sliding by one": Case(replace(GROUPED, sliding=(1,)), MANY, 8, normed=False),
    "sinks": Case(replace(GROUPED, sliding=(None, 40)), MANY, 8, torch.float16, sinks=True),
    "no first key": Case(replace(GROUPED, first_key=2), MANY, 8),
    "odd sizes": Case(AttentionHeads(3, 3, 34), MANY, 8, torch.float16),
    "one head": Case(AttentionHeads(1, 1, 80), MANY, 8, rotated=False),
    "not finite": Case(GROUPED, MANY, 8, wild=True),
    "few codes": Case(AttentionHeads(4, 2, 16, rounded=True), FEW, 5, normed=False),
    "codes": Case(replace(GROUPED, rounded=True), MANY, 8),
    "sliding codes": Case(
        AttentionHeads(4, 1, 96, sliding=(33,), rounded=True), MANY, 8, normed=False, wild=True
    ),
    "tiles of codes": Case(AttentionHeads(10, 1, 8, rounded=True), MANY, 8),
}
DEFAULT = ("few", "tiles", "few codes")
NAMES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@dataclass
class Layer:
    """Arguments of a call, on pools whose windows hold what nothing may read."""

    case: Case
    qkv: Tensor
    rows: RotatedRows
    weight: Tensor | None
    pools: tuple[Tensor, ...]
    windows: Windows

    def plan(self, form: Form) -> Any:
        """Return the plan of the windows."""
        return form.ops.plan_attention(self.windows, self.case.heads, PAGE, self.case.dtype)

    def tiles(self) -> int:
        """Return the most tiles of rows that there are programs for, of chunks one by one."""
        chunks = sum(
            attention_chunks.num_chunks(first + rows, rounded=self.case.heads.rounded) or 1
            for first, rows in self.case.windows
        )
        heads = self.case.heads
        rows = self.case.width * heads.num_heads // heads.num_kv_heads
        return chunks * heads.num_kv_heads * -(-rows // 16)

    def in_two(self, form: Form) -> tuple[Tensor, list[Tensor]]:
        """Return what two operations give, and the pools then."""
        pools = tuple(pool.clone() for pool in self.pools)
        heads = self.case.heads
        query = form.ops.rotary_store(
            self.qkv, self.rows, self.weight, EPSILON, pools, heads.num_heads
        )
        windows = query.unflatten(0, (len(self.case.windows), self.case.width))
        out = form.ops.paged_attention(windows, pools, self.plan(form), self.case.params)
        return out, stored(pools)

    def in_one(self, form: Form, pools: tuple[Tensor, ...]) -> Tensor:
        """Return what one operation gives, which writes to the pools."""
        windows = self.qkv.view(len(self.case.windows), self.case.width, -1)
        return form.ops.rotary_attention(
            windows, self.rows, self.weight, EPSILON, pools, self.plan(form), self.case.params
        )


def stored(pools: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the bytes of all pages but the trash page."""
    return [
        torch.cat([pool[:TRASH_PAGE], pool[TRASH_PAGE + 1 :]]).view(torch.int8) for pool in pools
    ]


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal numbers of a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(case: Case, device: str) -> Layer:
    """Return a layer of a case on a device; everything from a window on is poisoned."""
    heads = case.heads
    slots = len(case.windows)
    order = torch.randperm(slots * SLOT_PAGES, generator=torch.Generator().manual_seed(3)) + 1
    table = order.view(slots, SLOT_PAGES)
    shape = (slots * SLOT_PAGES + 1, PAGE, heads.num_kv_heads, heads.head_dim)
    if heads.rounded:
        codes = [randn(shape, seed).mul(40).to(torch.int8) for seed in (1, 2)]
        scales = [randn(shape[:3], seed).abs().mul(0.03).half() for seed in (3, 4)]
        pools = tuple(codes + scales)
    else:
        pools = tuple(randn(shape, seed).to(case.dtype) for seed in (1, 2))
    start = torch.tensor([first for first, _ in case.windows])[:, None]
    count = torch.tensor([rows for _, rows in case.windows])[:, None]
    index = torch.arange(case.width)[None, :]
    valid = index < count
    positions = start + torch.minimum(index, (count - 1).clamp(min=0))
    page = table.gather(1, positions // PAGE)
    kv_slots = torch.where(valid, page * PAGE + positions % PAGE, TRASH_PAGE * PAGE)
    is_later = torch.arange(SLOT_PAGES * PAGE)[None, :] >= start
    for pool in pools:
        poison = 77 if pool.dtype == torch.int8 else float("nan")
        if heads.rounded and pool is pools[3]:
            poison = 900.0  # the scale of a value is finite always
        # Of a page these kernels keep scales head by head.
        page_rows = pool if pool.dim() == 4 else pool.view(len(pool), -1, PAGE).mT
        entries = page_rows[table].flatten(1, 2)
        entries[is_later] = poison
        page_rows[table] = entries.unflatten(1, (SLOT_PAGES, PAGE))
    rows = slots * case.width
    wide = normal(rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, seed=5)
    if case.wild:
        wide[case.width + 1, -1] = float("inf")
        wide[3 * case.width + 2, heads.num_heads * heads.head_dim + 1] = float("nan")
    cos, sin = random_rotations(POSITIONS, heads.head_dim, device, torch.float32)
    angles = positions.flatten()
    if not case.rotated:
        cos = torch.ones_like(cos[:1])
        sin = torch.zeros_like(sin[:1])
        angles = torch.zeros_like(angles)
    weight = None
    if case.normed:
        weight = 0.5 + normal(heads.num_heads + heads.num_kv_heads, heads.head_dim, seed=6).abs()
    return Layer(
        case,
        wide.to(device, case.dtype),
        RotatedRows(cos, sin, angles.to(device), kv_slots.flatten().to(device)),
        None if weight is None else weight.to(device, case.dtype),
        tuple(pool.to(device) for pool in pools),
        Windows(positions.to(device), valid.to(device), table.to(device), (), ()),
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set chunks of 32 positions below 64, of 64 below 128 and of 128 from there, tiles of 16 rows,
    and 8 heads that are rotated at a time."""
    sizes = {"SMALL_CHUNK": 32, "TWICE_FROM": 64, "LARGE_FROM": 128, "KEY_BLOCK": 32}
    for name, value in {**sizes, "HEADS_A_PROGRAM": 1, "PLANNED_CHUNKS": 4}.items():
        monkeypatch.setattr(twin, name, value, raising=False)
        monkeypatch.setattr(attention_chunks, name, value, raising=False)
    monkeypatch.setattr(twin, "tile_shape", lambda *_, **__: (16, 16, 1))


def equal(ours: Tensor, theirs: Tensor) -> bool:
    """True if both have the same bits."""
    return torch.equal(ours.contiguous().view(torch.int8), theirs.contiguous().view(torch.int8))


@pytest.mark.parametrize("form", ["triton"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_has_the_bits_of_two(
    form: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and entries; and results where each program finds what was there before the pass."""
    case = CASES[name]
    layer = make_layer(case, form.device)
    assert layer.tiles() <= MOST_TILES
    limit_programs(monkeypatch, 2)
    out, entries = layer.in_two(form)
    assert case.wild or out.isfinite().all()
    pools = tuple(pool.clone() for pool in layer.pools)
    assert equal(layer.in_one(form, pools), out)
    for ours, theirs in zip(stored(pools), entries, strict=True):
        assert torch.equal(ours, theirs)
    if form.device == "cpu":
        limit_programs(monkeypatch, MOST_TILES)
        assert equal(_alone(layer, form, monkeypatch), out), "a program reads what it did not write"


def _alone(layer: Layer, form: Form, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the result where pools and queries are as before each program, which has one tile."""
    from triton.runtime.interpreter import interpreter_builder

    pools = tuple(pool.clone() for pool in layer.pools)
    queries: list[Tensor] = []
    attend = twin._attend_windows
    begin = interpreter_builder.set_grid_idx

    def attend_noting(query: Tensor, *arguments: Any) -> Tensor:
        queries.append(query)
        return attend(query, *arguments)

    def begin_anew(x: int, y: int, z: int) -> None:
        for pool, before in zip(pools, layer.pools, strict=True):
            pool.copy_(before)
        for query in queries:
            query.fill_(float("nan"))
        begin(x, y, z)

    with monkeypatch.context() as patch:
        patch.setattr(twin, "_attend_windows", attend_noting)
        patch.setattr(interpreter_builder, "set_grid_idx", begin_anew)
        out = layer.in_one(form, pools)
    assert queries
    return out
