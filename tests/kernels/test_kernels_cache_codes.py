"""Keys and values in eight bits, in every form.

Codes against a model in NumPy, attention over them against float64, every row's bits against the row
alone.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.dispatch import load_kernels
from spd.kernels.native import library
from tests.helpers import limit_programs
from tests.kernels.forms import (
    COMPILED,
    ROUNDED,
    Form,
    from_native_pages,
    normal,
    parametrize_forms,
)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words} encountered:RuntimeWarning")
    for words in ("overflow", "invalid value")
]
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
            self.groups * self.kv_heads,
            self.kv_heads,
            self.size,
            sliding=(self.sliding,),
            rounded=True,
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


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's grids be those of a small device, where there is Triton."""
    if importlib.util.find_spec("triton") is not None:
        limit_programs(monkeypatch, 2)


def is_interpreted(form: Form) -> bool:
    return form.name == "triton" and form.device == "cpu"


def types_of(form: Form) -> tuple[torch.dtype, ...]:
    """Return the dtypes whose products can be trusted.

    Weights of a float16 run meet codes in bfloat16, which the interpreter gets wrong.
    """
    return (torch.float32,) if is_interpreted(form) else form.dtypes


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
    device = form.device
    rotated_size = case.size - (case.rank or 0)
    unrotated_rows = RotatedRows(
        torch.ones(1, rotated_size, dtype=keys.dtype, device=device),
        torch.zeros(1, rotated_size, dtype=keys.dtype, device=device),
        torch.zeros(count, dtype=torch.long, device=device),
        slots.to(device),
    )
    entry = (len(order), PAGE, case.kv_heads, case.size)
    scales = (len(order), PAGE, case.kv_heads)
    if case.rank:
        pages_of = torch.full((*entry[:2], case.size), 3, dtype=torch.int8, device=device)
        latent_scales = torch.ones(*entry[:2], 2, dtype=torch.float16, device=device)
        form.ops.latent_store(
            query=keys.new_zeros(count, 1, rotated_size).to(device),
            latent=keys[:, 0].to(device),
            rows=unrotated_rows,
            norm=torch.ones(case.rank, dtype=keys.dtype, device=device),
            epsilon=0.0,
            pages=pages_of,
            scales=latent_scales,
        )
        return Cache(case, keys, values, (pages_of, latent_scales), table)
    pools = tuple(torch.full(entry, 3, dtype=torch.int8, device=device) for _ in range(2))
    pools += tuple(torch.ones(scales, dtype=torch.float16, device=device) for _ in range(2))
    form.ops.rotary_store(
        qkv=torch.cat((keys, values), 1).flatten(1).to(device),
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
    return write_all(form, case, keys.to(dtype), values.to(dtype))


def write_all(form: Form, case: Case, keys: Tensor, values: Tensor) -> Cache:
    """Write many entries; in torch's form where Triton is interpreted, in the order of Triton's."""
    if not is_interpreted(form):
        return write(form, case, keys, values)
    torch_form = Form("torch", load_kernels("torch"), "cpu", (keys.dtype,))
    cache = write(torch_form, case, keys, values)
    if case.rank:
        return cache
    scales = [pool.transpose(1, 2).contiguous().view(pool.shape) for pool in cache.pools[2:]]
    return replace(cache, pools=(*cache.pools[:2], *scales))


def attend(form: Form, cache: Cache, query: Tensor, starts: list[int]) -> Tensor:
    """Return the results of query [S, Q, H, D], whose windows begin at `starts` of one text."""
    width = query.shape[1]
    positions = (torch.tensor(starts)[:, None] + torch.arange(width)).to(form.device)
    windows = Windows(
        positions,
        torch.ones_like(positions, dtype=torch.bool),
        cache.table.expand(len(starts), -1).to(form.device),
        [POSITIONS] * len(starts),
        [None] * len(starts),
    )
    return attend_planned(form, cache, query, windows)


def prefill(form: Form, cache: Cache, query: Tensor, start: int) -> Tensor:
    """Return the results [T, H, D] of a prompt's chunk of query [T, H, D]."""
    positions = torch.arange(start, start + len(query), device=form.device)[None]
    valid = torch.ones_like(positions, dtype=torch.bool)
    table = cache.table.to(form.device)
    windows = Windows(positions, valid, table, [POSITIONS], [None], start)
    return attend_planned(form, cache, query[None], windows)[0]


def attend_planned(form: Form, cache: Cache, query: Tensor, windows: Windows) -> Tensor:
    case = cache.case
    plan = form.ops.plan_attention(windows, case.heads, PAGE, query.dtype)
    query = query.to(form.device)
    if case.rank:
        pages, scales = cache.pools
        arguments: dict[str, Any] = {"rank": case.rank, "scale": 0.15, "scales": scales}
        return form.ops.mla_attention(query=query, pages=pages, plan=plan, **arguments).cpu()
    params = case.params
    if params.sinks is not None:
        params = replace(params, sinks=params.sinks.to(form.device))
    return form.ops.paged_attention(query, cache.pools, plan, params).cpu()


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


def allowed_error(cache: Cache, dtype: torch.dtype) -> float:
    largest = float(cache.numbers()[1].abs().max())
    return largest * (1e-5 if dtype == torch.float32 else 3 * ROUNDED)


@pytest.mark.parametrize("size", [24, 64])
def test_codes_and_scales_are_those_of_the_definition(form: Form, size: int) -> None:
    """Rows of zeros, of tiny and of huge numbers, of one large one: bit for bit."""
    dtype = types_of(form)[-1]
    factors = torch.tensor([1.0, 0.0, 1e-5, 3e-8, 2e6, 1e-3, 100.0])
    values = (normal(7, 2, size, seed=1) * factors[:, None, None]).to(dtype)
    values[5, :, 7] = 50.0
    keys = values.flip(0)
    case = Case(1, 2, size)
    cache = write(form, case, keys, values)
    page = int(cache.table[0, 0])
    for index, rows in enumerate((keys, values)):
        codes, scales = round_by_numpy(rows)
        pool_codes = cache.pools[index].cpu()
        pool_scales = cache.pools[2 + index].cpu()
        if form.native:
            pool_codes = from_native_pages(pool_codes, values=index == 1)
        if form.name != "torch":
            pool_scales = pool_scales.view(-1, 2, PAGE).transpose(1, 2)
        assert (pool_codes[page, :7].numpy() == codes).all()
        assert (pool_scales[page, :7].numpy() == scales).all()
        assert (pool_codes[page, 7:] == 3).all() and (pool_scales[page, 7:] == 1).all()


@pytest.mark.parametrize("form", ["triton"], indirect=True)
@pytest.mark.parametrize("name", ["rows", "latent"])
def test_entries_that_cannot_be_rounded_are_written_as_torch_writes_them(
    form: Form, name: str
) -> None:
    """A value that is not finite, or too large for a float16 scale: its key is NaN, its value 0."""
    case = CASES[name]
    dtype = types_of(form)[-1]
    keys = normal(7, 1, case.size, seed=3)
    values = normal(7, 1, case.size, seed=4)
    values[1, 0, 3] = keys[2, 0, -3] = math.inf
    values[3, 0, 7] = keys[4, 0, -1] = math.nan
    values[5, 0, 0] = keys[6, 0, -2] = -1e8
    torch_form = Form("torch", load_kernels("torch"), "cpu", (dtype,))
    result, expected = (
        write(each, case, keys.to(dtype), values.to(dtype)) for each in (form, torch_form)
    )
    for pool, right in zip(result.pools, expected.pools, strict=True):
        assert torch.equal(pool.cpu().nan_to_num(9.0), right.nan_to_num(9.0))
    scales = expected.pools[-1][..., -1] if case.rank else expected.pools[2]
    assert scales.isnan().sum() == (3 if case.rank else 6)


@pytest.mark.covers(1, count=30)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_codes_is_near_its_definition(form: Form, name: str) -> None:
    case = CASES[name]
    for dtype in types_of(form):
        cache = make_cache(form, case, dtype)
        starts = [0, 126, 250, POSITIONS - 5]
        query = normal(len(starts), 5, case.heads.num_heads, case.size, seed=5).to(dtype)
        result = attend(form, cache, query, starts)
        allowed = allowed_error(cache, dtype)
        for s, start in enumerate(starts):
            for row in (0, 4):
                right = define(cache, query[s, row], start + row)
                error = (result[s, row].double() - right).abs().max()
                assert error <= allowed, (start, row, float(error), allowed)


@pytest.mark.parametrize(
    ("form", "name"),
    parametrize_forms([(name,) for name in CASES], (5,), "triton"),
    indirect=["form"],
)
def test_a_row_by_triton_keeps_its_bits(form: Form, name: str) -> None:
    """Beside other rows and slots, in tiles; in a prompt's chunk, from any start and to any end."""
    case = CASES[name]
    for dtype in types_of(form):
        cache = make_cache(form, case, dtype)
        query = normal(1, 70, case.heads.num_heads, case.size, seed=6).to(dtype)
        start = 250
        alone = attend(form, cache, query[:, 3:4], [start + 3])[0, 0]
        for rows in (4, 33):
            together = attend(form, cache, query[:, :rows].repeat(2, 1, 1, 1), [100, start])
            assert torch.equal(together[1, 3], alone), rows
        chunk = prefill(form, cache, query[0], start)
        right = define(cache, query[0, 9], start + 9)
        assert (chunk[9].double() - right).abs().max() <= allowed_error(cache, dtype)
        for first, last in ((0, 10), (9, 10), (9, 70)):
            part = prefill(form, cache, query[0, first:last], start + first)
            assert torch.equal(part[9 - first], chunk[9]), (first, last)


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
    form: Form, name: str
) -> None:
    """A value that is not finite, or too large for a float16 scale, makes its readers NaN."""
    case = CASES[name]
    dtype = types_of(form)[-1]
    clean = make_cache(form, case, dtype)
    query = normal(1, 5, case.heads.num_heads, case.size, seed=7).to(dtype)
    start = 380
    expected = attend(form, clean, query, [start])
    for bad in (math.inf, math.nan, -1e8):
        keys = clean.keys.clone()
        values = clean.values.clone()
        (keys if case.rank else values)[start + 3, 0, case.size - 2] = bad
        result = attend(form, write_all(form, case, keys, values), query, [start])
        assert torch.equal(result[:, :3], expected[:, :3]), bad
        assert result[:, 3:, : case.groups].isnan().all(), bad
