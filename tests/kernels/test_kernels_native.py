"""The C kernels against plain formulas, and their rows against each other: the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.native import build, library
from spd.kernels.native.build import NativeUnavailable, library_path
from spd.kernels.native.library import NativeLibrary
from spd.kernels.native.products import AmxRefused, Ending
from spd.kernels.paged_attention import AttentionHeads
from spd.kernels.rms_norm import rms_norm
from spd.kernels.rotary_store import rotary_store
from tests.kernels.native_cases import PAGE, ROUNDED, assert_rounded, needs_compiled, noise

pytestmark = needs_compiled

SHAPES = [(1, 1), (16, 32), (33, 31), (100, 50), (64, 96), (130, 320), (512, 1040)]


@pytest.mark.parametrize(("width", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 47, 70])
def test_products(native: NativeLibrary, width: int, depth: int, rows: int) -> None:
    """Every ending, with and without what may stand before and after."""
    weight, x = noise(width, depth), noise(rows, depth)
    bias, residual = noise(width).float(), noise(rows, width)
    packed = native.pack(weight)
    plain = x.double() @ weight.double().t()
    scores = native.linear(x, packed, None, Ending.FLOAT32)
    torch.testing.assert_close(scores.double(), plain, rtol=1e-5, atol=1e-4)
    assert_rounded(native.linear(x, packed, None), plain)
    assert_rounded(native.linear(x, packed, bias, residual=residual), plain + bias + residual.double())
    scales = noise(depth).float()
    normed = rms_norm(x, scales, 1e-6)
    exact = normed.double() @ weight.double().t() + bias
    torch.testing.assert_close(
        native.linear(x, packed, bias, Ending.FLOAT32, norm=scales, epsilon=1e-6).double(),
        exact,
        rtol=0.02,
        atol=0.02 * float(exact.abs().max()),
    )
    double, biases = noise(2 * width, depth, seed=1), noise(2 * width, seed=1).float()
    gate, up = (x.double() @ double.double().t() + biases).chunk(2, dim=-1)
    gated = native.pack(double, gated=True)
    for ending, act in ((Ending.SILU, F.silu(gate)), (Ending.GELU, F.gelu(gate, approximate="tanh"))):
        assert_rounded(native.linear(x, gated, biases, ending), act * up)


@pytest.mark.parametrize(("width", "depth"), [(100, 50), (96, 1040)])
def test_rows_of_a_product_in_any_company(native: NativeLibrary, width: int, depth: int) -> None:
    """The same bits for 1 to 70 rows, wherever a row stands and whatever stands beside it."""
    x, weight, norm = noise(70, depth), noise(2 * width, depth), noise(depth).float()
    for gated, ending in ((False, Ending.FLOAT32), (False, Ending.BFLOAT16), (True, Ending.SILU)):
        packed = native.pack(weight, gated=gated)

        def product(rows: Tensor, packed=packed, ending=ending) -> Tensor:  # type: ignore[no-untyped-def]
            return native.linear(rows, packed, None, ending, norm=norm, epsilon=1e-6)

        every = product(x)
        for count in (1, 2, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 49, 69):
            assert torch.equal(product(x[:count]), every[:count]), count
            assert torch.equal(product(x[70 - count :]), every[70 - count :]), count
        wild = x.clone()
        wild[::2] = float("nan")
        assert torch.equal(product(wild)[1::2], every[1::2])


@pytest.mark.parametrize("size", [8, 48, 64, 1000])
def test_norms(native: NativeLibrary, size: int) -> None:
    """Rows of any size, one or many, alone and onto a stream."""
    x, scales, residual = noise(9, size), noise(size).float(), noise(9, size)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scales.double()
    got = native.norm(x, scales, 1e-5)
    assert_rounded(got, exact)
    assert_rounded(native.norm(x, scales, 1e-5, residual), exact + residual.double())
    assert torch.equal(native.norm(x[3:4], scales, 1e-5), got[3:4])
    assert torch.equal(native.rms_norm_rows(x, None, scales.bfloat16(), 1e-5), got)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 1, 32), (2, 2, 24), (5, 1, 96)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store(
    native: NativeLibrary, heads: int, kv_heads: int, size: int, normed: bool
) -> None:
    """As torch's reference, and nothing but the rows' own places is written."""
    rows, pages = 5, 3
    qkv = noise(rows, (heads + 2 * kv_heads) * size)
    angles = torch.rand(20, size // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos().repeat(1, 2).bfloat16(), angles.sin()
    sin = torch.cat((-sin, sin), -1).bfloat16()
    positions, places = torch.tensor([3, 0, 19, 7, 7]), torch.tensor([70, 0, 191, 5, 6])
    scales = noise(heads + kv_heads, size).float() if normed else None
    pools = [noise(pages, PAGE, kv_heads, size, seed=s) for s in (1, 2)]
    wide = [by_position(pool).double() for pool in pools]
    exact = rotary_store(
        qkv.double(), cos.double(), sin.double(), positions, places,
        None if scales is None else scales.double(), 1e-6, *wide, heads,
    )  # fmt: skip
    query = native.rotary_store(qkv, cos, sin, positions, places, scales, 1e-6, *pools, heads)
    assert_rounded(query, exact)
    keys, values = (by_position(pool) for pool in pools)
    assert_rounded(keys, wide[0])
    assert torch.equal(values.double(), wide[1])


def by_position(pool: Tensor) -> Tensor:
    """Pages that the kernels wrote as [K, page, D], as [page, K, D]."""
    pages, page, heads, size = pool.shape
    return pool.view(pages, heads, page, size).transpose(1, 2).contiguous()


@dataclass
class Case:
    """One slot's cache in scattered pages, and its heads."""

    heads: int
    kv_heads: int
    size: int
    context: int

    def __post_init__(self) -> None:
        count = -(-self.context // PAGE)
        self.keys, self.values = (noise(self.context, self.kv_heads, self.size, seed=s) for s in (3, 4))
        self.table = torch.randperm(count, generator=torch.Generator().manual_seed(5)) * 2 + 1
        self.pools = [torch.full((2 * count + 1, PAGE, self.kv_heads, self.size), float("nan")).bfloat16()
                      for _ in "kv"]  # fmt: skip
        for pool, rows in zip(self.pools, (self.keys, self.values), strict=True):
            flat = pool.view(-1, self.kv_heads, self.size)
            flat[(self.table[:, None] * PAGE + torch.arange(PAGE)).flatten()] = 0
            flat[self.places(torch.arange(self.context))] = rows
            pool.copy_(pool.transpose(1, 2).reshape(pool.shape))

    def places(self, positions: Tensor) -> Tensor:
        return self.table[positions // PAGE] * PAGE + positions % PAGE

    def attend(
        self, native: NativeLibrary, query: Tensor, positions: Tensor, first_key: int = 0, **options: float
    ) -> Tensor:
        """query [S, Q, H, D] at positions [S, Q]."""
        heads = AttentionHeads(self.heads, self.kv_heads, self.size, first_key)
        table = self.table.expand(query.shape[0], -1)
        valid = torch.ones_like(positions, dtype=torch.bool)
        plan = native.plan_attention(positions, valid, table, heads, PAGE, torch.bfloat16, [], [])
        return native.paged_attention(query, *self.pools, plan, self.size**-0.5, **options)  # type: ignore[arg-type]

    def exact(
        self, query: Tensor, positions: Tensor, first_key: int = 0, sliding: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        groups = self.heads // self.kv_heads
        keys, values = (t.double().repeat_interleave(groups, 1) for t in (self.keys, self.values))
        scores = torch.einsum("sqhd,khd->sqhk", query.double(), keys) * self.size**-0.5
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        key, row = torch.arange(self.context), positions[..., None]
        hidden = (key > row) | (key < row.clamp(max=first_key))
        if sliding is not None:
            hidden |= key <= row - sliding
        weights = scores.masked_fill(hidden[:, :, None], float("-inf")).softmax(-1)
        return torch.einsum("sqhk,khd->sqhd", weights, values)


CASES = [
    Case(4, 2, 64, 300),
    Case(16, 1, 32, 129),
    Case(3, 3, 24, 70),
    Case(5, 1, 40, 33),
    Case(2, 1, 256, 500),
]
KINDS = [
    {},
    {"sliding": 17},
    {"sliding": 200},
    {"softcap": 3.0},
    {"first_key": 2},
    {"sliding": 40, "softcap": 2.0},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.heads}x{c.kv_heads}x{c.size}-{c.context}")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention(native: NativeLibrary, case: Case, kind: dict[str, float]) -> None:
    """Windows at the start, at chunks' edges and at the end; pages that no row has hold NaN."""
    last = case.context - 1
    positions = torch.tensor([[0, 1, 2], [last - 2, last - 1, last], [min(127, last), min(128, last), last]])
    query = noise(3, 3, case.heads, case.size, seed=6)
    got = case.attend(native, query, positions, **kind)  # type: ignore[arg-type]
    exact = case.exact(query, positions, **kind)  # type: ignore[arg-type]
    # Weights are rounded to bfloat16 before they meet the values.
    assert (got.double() - exact).abs().max() <= 3 * ROUNDED * float(case.values.abs().max())


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: f"{c.heads}x{c.kv_heads}x{c.size}-{c.context}")
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_rows_of_attention_in_any_company(native: NativeLibrary, case: Case, kind: dict[str, float]) -> None:
    """The same bits alone, in a window of any width, as a part of a prompt, and among slots."""
    count = min(case.context, 70)
    positions = torch.arange(case.context - count, case.context)
    query = noise(count, case.heads, case.size, seed=7)
    alone = torch.cat(
        [
            case.attend(native, query[None, i : i + 1], positions[None, i : i + 1], **kind)[0]
            for i in range(count)
        ]  # type: ignore[arg-type]
    )
    for width in (2, 5, 9, 33, count):
        for first in range(0, count - width + 1, width):
            part = slice(first, first + width)
            window = case.attend(native, query[None, part], positions[None, part], **kind)  # type: ignore[arg-type]
            assert torch.equal(window[0], alone[part]), (width, first)
    even = count // 2 * 2
    slots = case.attend(native, query[:even].unflatten(0, (-1, 2)), positions[:even].view(-1, 2), **kind)  # type: ignore[arg-type]
    assert torch.equal(slots.flatten(0, 1), alone[:even])
    whole = native.prefill_attention(
        query,
        *case.pools,
        case.table,
        int(positions[0]),
        case.size**-0.5,
        **kind,  # type: ignore[arg-type]
    )
    assert torch.equal(whole, alone)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails, none at all, a processor without the instructions, a library that is none."""
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(build, "find_compiler", lambda: str(broken))
        with pytest.raises(NativeUnavailable, match="no such luck"):
            library_path(lambda: tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())
        patched.setattr(build, "find_compiler", lambda: None)
        with pytest.raises(NativeUnavailable, match="compiler"):
            library_path(lambda: tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(build, "processor_features", lambda: frozenset({"avx2"}))
        with pytest.raises(NativeUnavailable, match="AVX512-BF16"):
            library_path(lambda: tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="cannot be compiled"):
        library_path(lambda: tmp_path / "file")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        NativeLibrary(tmp_path / "file")


def test_a_place_that_cannot_be_trusted_or_found(tmp_path: Path) -> None:
    """Others may write there, nobody has a home, a folder that is none: each is a reason, not an end."""
    library_path(lambda: tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="others"):
        library_path(lambda: tmp_path)
    tmp_path.chmod(0o700)
    made = library_path(lambda: tmp_path)
    made.chmod(0o722)
    with pytest.raises(NativeUnavailable, match="others"):
        library_path(lambda: tmp_path)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with pytest.raises(NativeUnavailable, match="home"):
        library_path(homeless)


@pytest.mark.parametrize("kept", [0, 40, 20_000])
def test_a_library_that_is_cut_off_is_made_again(tmp_path: Path, kept: int) -> None:
    """As a computer leaves it that went out; loaded, it would end the program."""
    place = library_path(lambda: tmp_path)
    whole = place.read_bytes()
    place.write_bytes(whole[:kept])
    assert NativeLibrary(library_path(lambda: tmp_path)).instructions
    assert place.stat().st_size == len(whole)


def test_where_amx_is_refused_the_other_instructions_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, honest = library_path(lambda: tmp_path), library.NativeLibrary

    def refusing(path: Path) -> NativeLibrary:
        if path == best:
            raise AmxRefused("the system does not grant AMX")
        return honest(path)

    monkeypatch.setattr(library, "NativeLibrary", refusing)
    assert library.open_library(lambda: tmp_path).instructions == "AVX512-BF16"


def test_no_rows(native: NativeLibrary) -> None:
    """Nothing of nothing."""
    packed = native.pack(noise(40, 64))
    assert native.linear(torch.empty(0, 64, dtype=torch.bfloat16), packed, None).shape == (0, 40)


@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
def test_values_that_are_not_finite_spoil_who_sees_them(native: NativeLibrary, wild: float) -> None:
    """The rows before them in the same window have their bits."""
    case = Case(4, 2, 64, 200)
    positions = torch.arange(190, 200)[None]
    query = noise(1, 10, 4, 64, seed=8)
    clean = case.attend(native, query, positions)
    flat = case.pools[1].view(-1, case.kv_heads, PAGE, case.size)
    flat[case.table[196 // PAGE], :, 196 % PAGE, 5] = wild
    got = case.attend(native, query, positions)
    assert torch.equal(got[0, :6], clean[0, :6])
    assert not got[0, 6:].isfinite().any()


def test_a_library_is_made_once(tmp_path: Path) -> None:
    """The second asking compiles nothing; other instructions make another library."""
    first = library_path(lambda: tmp_path)
    made = first.stat().st_mtime_ns
    assert library_path(lambda: tmp_path) == first and first.stat().st_mtime_ns == made
    assert library_path(lambda: tmp_path, "SPD_NO_AMX") != first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [first.name, library_path(lambda: tmp_path, "SPD_NO_AMX").name]
    )
