"""Keys and values in eight bits, in torch's and C's forms.

Codes against a model in NumPy, attention over them against float64, every row's bits against the row
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.dispatch import load_kernels
from spd.kernels.native import library
from tests.kernels.forms import COMPILED, ROUNDED, Form, from_native_pages, normal

PAGE = 64
POSITIONS = 700
"""They end inside of a page, a chunk of keys and a section."""
SPARE_PAGES = 5


@dataclass(frozen=True)
class Case:
    """Shapes of attention, and what a layer has. With a rank entries are latents."""

    groups: int
    kv_heads: int
    size: int
    sliding: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rank: int | None = None

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(
            self.groups * self.kv_heads, self.kv_heads, self.size, sliding=(self.sliding,)
        )

    @property
    def params(self) -> AttentionParams:
        sinks = torch.linspace(-3, 4, self.heads.num_heads) if self.sinks else None
        return AttentionParams(0.15, self.sliding, self.softcap, sinks)


CASES = {
    "tiles": Case(2, 2, 64),
    "rows": Case(3, 1, 24, sliding=200),
    "wide": Case(1, 1, 288, softcap=5.0),
    "sinks": Case(4, 2, 96, sinks=True),
    "latent": Case(5, 1, 32, rank=24),
    "latent tiles": Case(3, 1, 96, rank=64),
}


@pytest.fixture(params=["torch", *COMPILED])
def rounding(request: pytest.FixtureRequest) -> Form:
    """Return a form that rounds entries."""
    if request.param == "torch":
        return Form("torch", load_kernels("torch"), "cpu", (torch.float32, torch.bfloat16))
    kernels = request.getfixturevalue("native_with")(request.param)
    return Form(request.param, kernels, "cpu", (kernels.dtype,))


def round_by_numpy(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of rows [..., D] by their definition."""
    wide = rows.float().numpy()
    scales = (np.abs(wide).max(-1) / np.float32(127)).astype(np.float16)
    divisors = np.where(scales > 0, scales, np.inf).astype(np.float32)[..., None]
    return np.clip(np.rint(wide / divisors), -127, 127), scales


def numbers_of(rows: Tensor) -> Tensor:
    """Return the float64 numbers of rounded rows."""
    codes, scales = round_by_numpy(rows)
    return torch.from_numpy(codes.astype(np.float64) * scales.astype(np.float64)[..., None])


@dataclass
class Cache:
    """Entries as they were written, the pools that a form keeps of them, and the slot's pages."""

    case: Case
    keys: Tensor
    values: Tensor
    pools: tuple[Tensor, ...]
    table: Tensor

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return keys and values float64 [positions, K, D] as they were rounded."""
        rank = self.case.rank
        if rank is None:
            return numbers_of(self.keys), numbers_of(self.values)
        parts = numbers_of(self.keys[..., :rank]), numbers_of(self.keys[..., rank:])
        return torch.cat(parts, -1), parts[0]


def write(form: Form, case: Case, keys: Tensor, values: Tensor) -> Cache:
    """Let a form write entries [positions, K, D], which are not rotated, to pages out of order."""
    count = len(keys)
    pages = -(-count // PAGE)
    order = torch.randperm(pages + SPARE_PAGES, generator=torch.Generator().manual_seed(2))
    table = order[None, :pages]
    at = torch.arange(count)
    slots = table[0, at // PAGE] * PAGE + at % PAGE
    rotated_size = case.size - (case.rank or 0)
    unrotated_rows = RotatedRows(
        torch.ones(1, rotated_size, dtype=keys.dtype),
        torch.zeros(1, rotated_size, dtype=keys.dtype),
        torch.zeros(count, dtype=torch.long),
        slots,
    )
    entry = (len(order), PAGE, case.kv_heads, case.size)
    scales = (len(order), PAGE, case.kv_heads)
    if case.rank:
        pages_of = torch.full((*entry[:2], case.size), 3, dtype=torch.int8)
        latent_scales = torch.ones(*entry[:2], 2, dtype=torch.float16)
        form.ops.latent_store(
            query=keys.new_zeros(count, 1, rotated_size),
            latent=keys[:, 0],
            rows=unrotated_rows,
            norm=torch.ones(case.rank, dtype=keys.dtype),
            epsilon=0.0,
            pages=pages_of,
            scales=latent_scales,
        )
        return Cache(case, keys, values, (pages_of, latent_scales), table)
    pools = tuple(torch.full(entry, 3, dtype=torch.int8) for _ in range(2))
    pools += tuple(torch.ones(scales, dtype=torch.float16) for _ in range(2))
    form.ops.rotary_store(
        qkv=torch.cat((keys, values), 1).flatten(1),
        rows=unrotated_rows,
        qk_weight=None,
        epsilon=0.0,
        pools=pools,
        num_heads=0,
    )
    return Cache(case, keys, values, pools, table)


def make_cache(form: Form, case: Case, dtype: torch.dtype) -> Cache:
    keys = normal(POSITIONS, case.kv_heads, case.size, seed=3)
    if case.rank:  # of a mean square of one, which the norm before the store leaves as it is
        latent = keys[..., : case.rank]
        keys[..., : case.rank] = latent.sign() * torch.where(latent.abs() > 1, 1.0, 1.0)
    values = normal(POSITIONS, case.kv_heads, case.size, seed=4)
    return write(form, case, keys.to(dtype), values.to(dtype))


def attend(form: Form, cache: Cache, query: Tensor, starts: list[int]) -> Tensor:
    """Return the results of query [S, Q, H, D], whose windows begin at `starts` of one text."""
    case = cache.case
    width = query.shape[1]
    positions = torch.tensor(starts)[:, None] + torch.arange(width)
    windows = Windows(
        positions,
        torch.ones_like(positions, dtype=torch.bool),
        cache.table.expand(len(starts), -1),
        [POSITIONS] * len(starts),
        [None] * len(starts),
    )
    plan = form.ops.plan_attention(windows, case.heads, PAGE, query.dtype)
    if case.rank:
        pages, scales = cache.pools
        arguments: dict[str, Any] = {"rank": case.rank, "scale": 0.15, "scales": scales}
        return form.ops.mla_attention(query=query, pages=pages, plan=plan, **arguments)
    return form.ops.paged_attention(query, cache.pools, plan, case.params)


def define(cache: Cache, query: Tensor, position: int) -> Tensor:
    """Return the result of query [H, D] at a position, by definition in float64."""
    case = cache.case
    first = max(0, position + 1 - (case.sliding or position + 1))
    keys, values = (
        numbers[first : position + 1].repeat_interleave(case.groups, 1)
        for numbers in cache.numbers()
    )
    scores = torch.einsum("hd,thd->ht", query.double(), keys) * 0.15
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    sinks = case.params.sinks
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), -1)
    return torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(values)], values)


@pytest.mark.parametrize("size", [24, 64])
def test_codes_and_scales_are_those_of_the_definition(rounding: Form, size: int) -> None:
    """Rows of zeros, of tiny and of huge numbers, of one large one: bit for bit."""
    dtype = rounding.dtypes[-1]
    factors = torch.tensor([1.0, 0.0, 1e-5, 3e-8, 2e6, 1e-3, 100.0])
    values = (normal(7, 2, size, seed=1) * factors[:, None, None]).to(dtype)
    values[5, :, 7] = 50.0
    keys = values.flip(0)
    case = Case(1, 2, size)
    cache = write(rounding, case, keys, values)
    page = int(cache.table[0, 0])
    for index, rows in enumerate((keys, values)):
        codes, scales = round_by_numpy(rows)
        pool_codes = cache.pools[index]
        pool_scales = cache.pools[2 + index]
        if rounding.native:
            in_pairs = rounding.name.startswith(("AVX512-BF16 bfloat16", "AMX"))
            layout = torch.bfloat16 if in_pairs else torch.float32
            pool_codes = from_native_pages(pool_codes, values=index == 1, dtype=layout)
            pool_scales = pool_scales.view(-1, 2, PAGE).transpose(1, 2)
        assert (pool_codes[page, :7].numpy() == codes).all()
        assert (pool_scales[page, :7].numpy() == scales).all()
        assert (pool_codes[page, 7:] == 3).all() and (pool_scales[page, 7:] == 1).all()


@pytest.mark.parametrize("name", CASES)
def test_attention_over_codes_is_near_its_definition(rounding: Form, name: str) -> None:
    case = CASES[name]
    for dtype in rounding.dtypes:
        cache = make_cache(rounding, case, dtype)
        starts = [0, 126, 250, POSITIONS - 5]
        query = normal(len(starts), 5, case.heads.num_heads, case.size, seed=5).to(dtype)
        result = attend(rounding, cache, query, starts)
        largest = float(cache.numbers()[1].abs().max())
        allowed = largest * (3 * ROUNDED if dtype == torch.bfloat16 else 1e-5)
        for s, start in enumerate(starts):
            for row in (0, 4):
                right = define(cache, query[s, row], start + row)
                error = (result[s, row].double() - right).abs().max()
                assert error <= allowed, (start, row, float(error), allowed)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("name_of_form", COMPILED)
def test_a_row_over_codes_keeps_its_bits(
    name_of_form: str, name: str, native_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other rows and slots, by several threads, sections shared or not."""
    kernels = native_with(name_of_form)
    form = Form(name_of_form, kernels, "cpu", (kernels.dtype,))
    case = CASES[name]
    cache = make_cache(form, case, kernels.dtype)
    query = normal(1, 16, case.heads.num_heads, case.size, seed=6).to(kernels.dtype)
    start = POSITIONS - 16
    alone = torch.cat([attend(form, cache, query[:, i : i + 1], [start + i]) for i in range(16)], 1)
    for rows, threads, blocks in ((4, 2, 8), (7, 5, 0), (16, 3, 8)):
        monkeypatch.setattr(kernels, "threads", threads)
        monkeypatch.setattr(library, "MOST_BLOCKS", blocks)
        together = attend(form, cache, query[:, :rows].repeat(2, 1, 1, 1), [start, 100])
        assert torch.equal(together[0], alone[0, :rows]), (rows, threads, blocks)


@pytest.mark.parametrize("name", ["tiles", "rows", "latent"])
def test_entries_that_cannot_be_rounded_reach_only_those_who_see_them(
    rounding: Form, name: str
) -> None:
    """A value that is not finite, or too large for a float16 scale, makes its readers NaN."""
    case = CASES[name]
    dtype = rounding.dtypes[-1]
    clean = make_cache(rounding, case, dtype)
    query = normal(1, 5, case.heads.num_heads, case.size, seed=7).to(dtype)
    start = 380
    expected = attend(rounding, clean, query, [start])
    for bad in (math.inf, math.nan, -1e8):
        keys = clean.keys.clone()
        values = clean.values.clone()
        (keys if case.rank else values)[start + 3, 0, case.size - 2] = bad
        result = attend(rounding, write(rounding, case, keys, values), query, [start])
        assert torch.equal(result[:, :3], expected[:, :3]), bad
        assert result[:, 3:, : case.groups].isnan().all(), bad
