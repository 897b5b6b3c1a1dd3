"""Recurrent layers' kernels: each form against its contract, and rows that do not depend on how
passes cut.

A text is walked twice: token by token, and in windows whose last rows are rejected and written
again. Outputs, written states and what the rings hold of committed tokens must be the same bits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.recurrent.delta_rule import CHUNK, DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.state_blocks import BLOCK
from tests.helpers import INTERPRETER_REASON
from tests.kernels.forms import COMPILED, Form, parametrize_forms

pytest.importorskip("triton")
BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Of one layer's heads and rings."""

    heads: int
    key_heads: int
    width: int
    size: int
    taps: int = 4
    depth: int = 48
    corrects: bool = True

    @property
    def gates(self) -> int:
        """Return the columns of raw gates: corrections and steps, or steps alone."""
        return (1 + self.corrects) * self.heads

    @property
    def channels(self) -> int:
        """Return the convolution's channels: queries, keys, values."""
        return 2 * self.key_heads * self.width + self.heads * self.size


SHAPES = [
    Shape(4, 2, 16, 16),
    Shape(3, 1, 24, 40, taps=2),
    Shape(6, 2, 64, 32),
    Shape(1, 1, 5, 7, taps=3),
]
SHAPES += [Shape(4, 2, 24, 16, corrects=False), Shape(3, 1, 5, 7, taps=3, corrects=False)]
"""The last two are Mamba-2's."""


class Layer:
    """What a layer keeps of some slots, and a pass over it in one form of the kernels."""

    def __init__(
        self, shape: Shape, form: Form, dtype: torch.dtype, slots: int, bias: bool = False
    ) -> None:
        s = shape
        device = form.device
        generator = torch.Generator().manual_seed(7)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(device)

        def nothing(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((slots, *sizes), float("nan"), dtype=dtype, device=device)

        self.shape = shape
        self.kernels = form.ops
        self.dtype = dtype
        self.device = device
        self.weight = draw(s.taps, s.channels)
        self.norm = draw(s.size)
        if not s.corrects:
            self.norm = draw(s.key_heads, s.heads // s.key_heads * s.size)
        self.bias = draw(s.channels) if bias else None
        self.rule = DeltaRule(draw(s.heads), draw(s.heads), s.corrects)
        self.ring = nothing(s.depth, s.channels, dtype=dtype)
        self.memory = DeltaMemory(
            state=nothing(s.heads, s.width, s.size),
            keys=nothing(s.depth, s.key_heads, s.width),
            updates=nothing(s.depth, s.heads, s.size),
            gates=nothing(s.depth, s.heads, 2),
        )
        self.applied = torch.zeros(slots, dtype=torch.long, device=device)

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        """Return a projection's rows [rows, channels + heads * size + gates]."""
        width = self.shape.channels + self.shape.heads * self.shape.size + self.shape.gates
        drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)

    def rows(self, runs: Sequence[tuple[int, int, int, int, int]]) -> Segments:
        """Return segments of (slot, first, count, start, committed): all tokens before that one
        are."""
        table = torch.tensor(runs, device=self.device).T.contiguous()
        table[4] = table[4] // BLOCK * BLOCK
        return Segments(table, self.applied)

    def ring_rows(self, slot: int, end: int) -> list[Tensor]:
        """Return the rows of a slot's rings since the last border before `end`."""
        begin = end // BLOCK * BLOCK
        place = begin % self.shape.depth
        return [ring[slot, place : place + end - begin].clone() for ring in self.memory[1:]]

    def run(self, x: Tensor, *runs: tuple[int, int, int, int, int]) -> Tensor:
        """Return the output [T, heads * size] of rows x [T, ...] in (slot, first, count, start,
        committed)."""
        rows = self.rows(runs)
        s = self.shape
        values = s.heads * s.size
        mixed = self.kernels.short_conv(
            x=x[:, : s.channels], weight=self.weight, bias=self.bias, ring=self.ring, rows=rows
        )
        gates = x[:, s.channels + values :]
        out = self.kernels.delta_rule(mixed, gates, self.rule, self.memory, rows)
        for slot, _, count, _, committed in runs:
            if count:
                self.applied[slot] = committed // BLOCK * BLOCK
        opening = x[:, s.channels : s.channels + values]
        out = out if s.corrects else out.view((len(out), *self.norm.shape))
        return self.kernels.gated_norm(
            x=out, gate=opening, weight=self.norm, epsilon=1e-6, gate_first=not s.corrects
        )


ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


@dataclass
class Walk:
    """What rows give that are run one by one, each committed by the next."""

    outputs: Tensor
    states: list[Tensor]
    """The state of a slot after each row."""
    rings: list[list[Tensor]]
    """The rows of the rings since the last border, after each row."""

    @classmethod
    def through(cls, layer: Layer, x: Tensor, slot: int = 0) -> Walk:
        walk = cls(torch.empty(0), [], [])
        outputs = []
        for t in range(len(x)):
            outputs.append(layer.run(x[t : t + 1], (slot, 0, 1, t, t)))
            walk.states.append(layer.memory.state[slot].clone())
            walk.rings.append(layer.ring_rows(slot, t + 1))
        walk.outputs = torch.cat(outputs)
        return walk

    def check_memory(self, layer: Layer, slot: int, end: int) -> None:
        """Assert that a slot's rings are those after row `end` - 1, and its state that of the last
        border, where it is written."""
        for ring, expected in zip(layer.ring_rows(slot, end), self.rings[end - 1], strict=True):
            assert torch.equal(ring, expected), end
        border = int(layer.applied[slot])
        if border:
            assert torch.equal(layer.memory.state[slot], self.states[border]), end


def check_windows(
    form: Form, dtype: torch.dtype, shape: Shape, length: int, widest: int = 9, seed: int = 3
) -> None:
    """Check windows of 1 to `widest` rows, some of which are rejected, against single steps."""
    single, layer = (Layer(shape, form, dtype, 2) for _ in range(2))
    x = layer.inputs(length)
    walk = Walk.through(single, x)
    chance = random.Random(seed)
    position = 0
    seen = []
    while position < len(x):
        rows = chance.randint(1, min(widest, len(x) - position))
        accepted = chance.choice([1, rows, chance.randint(1, rows)])
        window = x[position : position + rows].clone()
        window[accepted:] = layer.inputs(rows, seed=position + 1)[
            accepted:
        ]  # drafts that are rejected
        results = layer.run(window, (1, 0, rows, position, position))
        seen.append(results[:accepted])
        position += accepted
        walk.check_memory(layer, 1, position)
    assert torch.equal(torch.cat(seen), walk.outputs)
    assert layer.memory.state[0].isnan().all(), "no run named this slot"


def check_passes(form: Form, dtype: torch.dtype, shape: Shape) -> None:
    """Check one pass of a prompt, another slot's window, a run without rows.

    Rows between them are zeros.
    """
    layer, single = (Layer(shape, form, dtype, 4, bias=True) for _ in range(2))
    first = layer.inputs(35, seed=1)
    second = layer.inputs(17, seed=2)
    walk = Walk.through(single, first)
    other = Walk.through(single, second, 3)
    results = [layer.run(first[:5], (2, 0, 5, 0, 5))]
    layer.run(second[:12], (0, 0, 12, 0, 10))
    x = torch.cat((layer.inputs(2, seed=9), first[5:34], layer.inputs(1, seed=9), second[12:17]))
    together = layer.run(x, (2, 2, 29, 5, 34), (1, 31, 0, 4, 4), (0, 32, 5, 12, 12))
    results += [together[2:31], layer.run(first[34:], (2, 0, 1, 34, 34))]
    assert torch.equal(torch.cat(results), walk.outputs)
    assert torch.equal(together[32:], other.outputs[12:17])
    walk.check_memory(layer, 2, 35)
    other.check_memory(layer, 0, 17)
    assert layer.applied.tolist() == [0, 0, 32, 0], "the second text's border is not committed"
    assert not together[:2].any() and not together[31].any()
    assert layer.memory.state[1].isnan().all() and layer.ring[1].isnan().all()


PASSED = parametrize_forms([(shape,) for shape in SHAPES], (), "torch", *COMPILED)
PASSED += [
    ("triton", Shape(2, 1, 8, 20)),
    pytest.param("triton", Shape(2, 2, 5, 7, corrects=False), marks=pytest.mark.slow),
]


@pytest.mark.covers(count=28)
@pytest.mark.parametrize(("form", "shape"), PASSED, indirect=["form"], ids=str)
def test_passes_are_single_steps(form: Form, shape: Shape) -> None:
    if form.name == "triton":
        check_windows(form, form.dtypes[0], shape, 20, 8)
    else:
        check_windows(form, form.dtypes[0], shape, 70)
    check_passes(form, form.dtypes[0], shape)


@pytest.mark.parametrize("form", ["torch", "triton", *COMPILED], indirect=True)
def test_a_long_prompt_s_rows_do_not_overtake_those_that_are_read(form: Form) -> None:
    """Its last block has the place of the block that its first rows continue; heads share keys."""
    shape = Shape(2, 1, 16, 16, depth=32)
    single, layer = (Layer(shape, form, form.dtypes[0], 1) for _ in range(2))
    x = layer.inputs(40)
    walk = Walk.through(single, x)
    results = [layer.run(x[:3], (0, 0, 3, 0, 3)), layer.run(x[3:37], (0, 0, 34, 3, 37))]
    walk.check_memory(layer, 0, 37)
    results.append(layer.run(x[37:], (0, 0, 3, 37, 37)))
    assert torch.equal(torch.cat(results), walk.outputs)


@pytest.mark.parametrize("k", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 4)), 8])
def test_a_state_is_read_once_a_round_and_written_once_in_a_block(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that Triton's programs move, counted by the interpreter; every draft is accepted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(INTERPRETER_REASON)
    from triton.runtime.interpreter import InterpreterBuilder

    form = Form("triton", load_kernels("triton"), "cpu", (torch.float32,))
    layer = Layer(Shape(2, 1, 16, 16), form, torch.float32, 1)
    state = layer.memory.state
    state_traffic = dict.fromkeys(("load", "store"), 0)

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def count(access: str, pointers: Any, mask: Any) -> None:
        offset = pointers.data.astype(np.int64) - state.data_ptr()
        state_traffic[access] += 4 * int(
            ((offset >= 0) & (offset < state.nbytes) & mask.data).sum()
        )

    def counted_load(
        self: Any, pointers: Any, mask: Any, other: Any, policy: Any, is_volatile: Any
    ) -> Any:
        count("load", pointers, mask)
        return load(self, pointers, mask, other, policy, is_volatile)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        count("store", pointers, mask)
        return store(self, pointers, value, mask, policy)

    begin = BLOCK
    x = layer.inputs(begin + 40 + k)
    layer.run(x[:begin], (0, 0, begin, 0, begin))
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    starts = range(begin, begin + 40, k + 1)
    for start in starts:
        layer.run(x[start : start + k + 1], (0, 0, k + 1, start, start))
    blocks = (starts[-1] - begin) // BLOCK
    assert blocks == 2
    assert state_traffic == {"load": len(starts) * state.nbytes, "store": blocks * state.nbytes}


def naive(x: Tensor, layer: Layer) -> Tensor:
    """Compute the published recurrence of a full text, in float64."""
    s = layer.shape
    x = x.double()
    before = torch.cat((x.new_zeros(s.taps - 1, s.channels), x[:, : s.channels]))
    taps = (before[t : t + len(x)] * layer.weight[t].double() for t in range(s.taps))
    mixed = sum(taps, x.new_zeros(()))
    mixed = mixed * mixed.sigmoid()
    *both, value = mixed.split([s.key_heads * s.width] * 2 + [s.heads * s.size], -1)
    query, key = (a.view(-1, s.key_heads, s.width) for a in both)
    if s.corrects:
        query, key = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (query, key))
    query, key = (a.repeat_interleave(s.heads // s.key_heads, 1) for a in (query, key))
    gate, raw = x[:, s.channels :].split([s.heads * s.size, s.gates], -1)
    value = value.view(-1, s.heads, s.size)
    step = raw[:, -s.heads :] + layer.rule.bias.double()
    step = torch.nn.functional.softplus(step)
    decay = (-layer.rule.rate.double().exp() * step).exp()
    correct = raw[:, : s.heads].sigmoid() if s.corrects else step
    state = x.new_zeros(s.heads, s.width, s.size)
    out = []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = value[t] - torch.einsum("hij,hi->hj", state, key[t]) * s.corrects
        state = state + torch.einsum("hi,hj->hij", key[t], error * correct[t][:, None])
        out.append(
            torch.einsum("hij,hi->hj", state, query[t]) * (s.width**-0.5 if s.corrects else 1)
        )
    normed = torch.stack(out)
    opened = (gate * gate.sigmoid()).view(len(x), s.heads, s.size)
    if not s.corrects:  # Mamba-2 gates before the norm, which is a group's
        normed = (normed * opened).view((len(x), *layer.norm.shape))
    normed = normed / (normed.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.double()
    return (normed * opened if s.corrects else normed).flatten(1)


@pytest.mark.covers(1, count=30)
@ALL_SHAPES
def test_forms_are_the_published_recurrence(shape: Shape, form: Form) -> None:
    """Against float64, of the same rounded inputs, in two passes of which the second applies rows
    again."""
    if form.name == "triton" and form.device == "cpu" and shape.heads * shape.size > 100:
        pytest.skip("the interpreter is slow")
    allowed = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}
    for dtype in form.dtypes[:1] if form.name == "torch" else form.types(shape.heads):
        layer = Layer(shape, form, dtype, 1)
        x = layer.inputs(33)
        results = torch.cat(
            [layer.run(x[:20], (0, 0, 20, 0, 18)), layer.run(x[20:], (0, 0, 13, 20, 20))]
        )
        expected = naive(x, layer)
        assert (results.double() - expected).abs().max() < allowed[dtype] * expected.abs().max()


def test_a_convolution_may_stand_alone(form: Form) -> None:
    """Without its silu, as LFM2's; a row of no run is zeros."""
    layer = Layer(Shape(1, 1, 5, 7, taps=3, depth=20), form, form.dtypes[0], 1, True)
    x = layer.inputs(9)[:, : layer.shape.channels]
    rows = layer.rows([(0, 1, 8, 0, 0)])
    result = form.ops.short_conv(
        x=x, weight=layer.weight, bias=layer.bias, ring=layer.ring, rows=rows, silu=False
    )
    before = torch.cat((x.new_zeros(2, x.shape[1]), x[1:])).double()
    expected = layer.bias + sum(before[t : t + 8] * layer.weight[t] for t in range(3))
    assert (result[1:] - expected).abs().max() < 1e-5 and not result[0].any()


@pytest.mark.parametrize("form", COMPILED, indirect=True)
def test_threads_change_no_bit(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(6, 2, 64, 64)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(form.ops, "threads", threads)
        layer = Layer(shape, form, form.dtypes[0], 2)
        x = layer.inputs(80)
        results.append(layer.run(x, (0, 0, 50, 0, 50), (1, 50, 30, 0, 20)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# -- whole chunks of a prompt ----------------------------------------------------------------------

CHUNKED = [
    Shape(2, 1, 128, 64),
    Shape(3, 1, 24, 40),
    Shape(2, 2, 5, 7),
    Shape(4, 2, 24, 16, corrects=False),
]
FORMS = pytest.mark.parametrize("form", ["torch", "triton"], indirect=True)


@dataclass
class Prompt:
    """Convolved rows and gates of one layer, and what they make of a slot's state."""

    layer: Layer
    mixed: Tensor
    gates: Tensor

    @classmethod
    def of(cls, shape: Shape, rows: int, form: Form, regime: str = "usual") -> Prompt:
        """usual: as projections say; slow: next to no decay and keys much alike, so that a row's
        correction rests on all before it; mixed: some rows forget nearly everything.
        """
        layer = Layer(shape, form, torch.float32, 3)
        device = form.device
        x = layer.inputs(rows)
        mixed = torch.randn(rows, shape.channels, generator=torch.Generator()).to(device)
        gates = x[:, -shape.gates :].clone()
        keys = mixed[:, shape.key_heads * shape.width : 2 * shape.key_heads * shape.width]
        if regime == "slow":
            slow = torch.tensor([3.0, -9.0], device=device).repeat_interleave(shape.heads)
            gates += slow[-shape.gates :]
            keys *= 0.3
            keys += 1
        if regime == "mixed":
            layer.rule.rate.add_(2)
            forgets = torch.arange(rows, device=device)[:, None] % 7 == 0
            gates[:, -shape.heads :] += torch.where(forgets, 4.0, -8.0)
        return cls(layer, mixed, gates)

    def run(
        self, operation: str, cuts: tuple[int, ...] = (), slot: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the results of rows from cut to cut, and the state after them, by several
        calls."""
        results = []
        layer = self.layer
        layer.applied[slot] = 0
        for begin, end in zip((0, *cuts), (*cuts, len(self.mixed)), strict=True):
            rows = layer.rows([(slot, 0, end - begin, begin, end)])
            mixed = self.mixed[begin:end]
            gates = self.gates[begin:end]
            step = getattr(layer.kernels, operation)
            results.append(step(mixed, gates, layer.rule, layer.memory, rows))
            layer.applied[slot] = end // BLOCK * BLOCK
        return torch.cat(results), layer.memory.state[slot].clone()


def check_chunks(form: Form, shape: Shape, count: int, regime: str) -> None:
    """Check full chunks against a step a token; the NaN in the initial state is not read."""
    read, state = Prompt.of(shape, count, form, regime).run(
        "delta_chunks", (count // CHUNK * CHUNK,)
    )
    plain = replace(form, ops=load_kernels("torch"))
    expected, final = Prompt.of(shape, count, plain, regime).run("delta_rule")
    assert (read - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (state - final).abs().max() < 1e-4 * final.abs().max()


@pytest.mark.covers(2)
@FORMS
@pytest.mark.parametrize("regime", ["usual", "slow", "mixed"])
@pytest.mark.parametrize("shape", CHUNKED, ids=str)
def test_chunks_are_the_recurrence_up_to_rounding(shape: Shape, regime: str, form: Form) -> None:
    check_chunks(form, shape, 330 if form.name == "torch" else CHUNK + 9, regime)


@pytest.mark.parametrize(
    ("form", "shape"),
    parametrize_forms([(shape,) for shape in CHUNKED[2:]], (1,), "torch", "triton"),
    indirect=["form"],
    ids=str,
)
def test_chunks_begin_and_end_within_blocks(shape: Shape, form: Form) -> None:
    """Rows before the first border are those of windows; later rows read what those behind the last
    one left in the rings."""
    prompt = Prompt.of(shape, 74, form)
    expected, state = prompt.run("delta_rule")
    for cuts in ((5,), (5, 12), (16, 23, 70)):
        results, final = prompt.run("delta_chunks", cuts, slot=0)
        assert torch.equal(results[cuts[0] : BLOCK], expected[cuts[0] : BLOCK])
        assert (results - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (final - state).abs().max() < 1e-4 * state.abs().max()


@pytest.mark.parametrize(
    ("form", "shape"),
    parametrize_forms([(shape,) for shape in CHUNKED[1:]], (1,), "torch", "triton"),
    indirect=["form"],
    ids=str,
)
def test_how_many_chunks_a_call_holds_changes_no_bit(shape: Shape, form: Form) -> None:
    """Nor what stands beside them.

    A run without rows changes nothing, and rows of no run are zeros.
    """
    prompt = Prompt.of(shape, 3 * CHUNK - 5, form)
    expected, state = prompt.run("delta_chunks")
    for cuts in ((CHUNK,), (2 * CHUNK,), (CHUNK, 2 * CHUNK)):
        results, final = prompt.run("delta_chunks", cuts, slot=0)
        assert torch.equal(results, expected) and torch.equal(final, state)
    other = Prompt.of(shape, CHUNK + 3, form, "slow")
    layer = Prompt.of(shape, 1, form).layer
    other_expected, behind = other.run("delta_chunks")
    count = len(other.mixed)
    runs = (2, 1, count, 0, count), (1, count + 1, 0, 7, 7), (0, count + 2, 40, 0, 40)
    mixed, gates = (
        torch.cat((b[:1], a, b[:1], b[:40]))
        for a, b in ((other.mixed, prompt.mixed), (other.gates, prompt.gates))
    )
    rows = layer.rows(runs)
    results = layer.kernels.delta_chunks(
        mixed=mixed, raw_gates=gates, rule=layer.rule, memory=layer.memory, rows=rows
    )
    assert torch.equal(results[1 : count + 1], other_expected) and torch.equal(
        layer.memory.state[2], behind
    )
    assert (
        torch.equal(results[-40:-8], expected[:32])
        and not results[0].any()
        and not results[count + 1].any()
    )
    assert all(memory[1].isnan().all() for memory in layer.memory)
