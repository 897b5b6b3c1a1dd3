"""Recurrent layers' kernels: each form against its contract, and rows that do not depend on how
passes cut.

A text is walked twice: token by token, and in windows whose last rows are rejected and written
again. Outputs, states and what the rings keep of committed tokens must be the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.recurrent.delta_rule import CHUNK, DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
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
    depth: int = 24
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
            values=nothing(s.depth, s.heads, s.size),
            gates=nothing(s.depth, s.heads, 2),
        )
        self.applied = torch.zeros(slots, dtype=torch.long, device=device)

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        """Return a projection's rows [rows, channels + heads * size + gates]."""
        width = self.shape.channels + self.shape.heads * self.shape.size + self.shape.gates
        drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)

    def rows(self, runs: Sequence[tuple[int, int, int, int, int]]) -> Segments:
        """Return segments of (slot, first, count, start, keep)."""
        return Segments(torch.tensor(runs, device=self.device).T.contiguous(), self.applied)

    def run(self, x: Tensor, *runs: tuple[int, int, int, int, int]) -> Tensor:
        """Return the output [T, heads * size] of rows x [T, ...] in (slot, first, count, start,
        keep)."""
        rows = self.rows(runs)
        s = self.shape
        values = s.heads * s.size
        mixed = self.kernels.short_conv(
            x=x[:, : s.channels], weight=self.weight, bias=self.bias, ring=self.ring, rows=rows
        )
        gates = x[:, s.channels + values :]
        out = self.kernels.delta_rule(mixed, gates, self.rule, self.memory, rows)
        for slot, _, count, _, keep in runs:
            if count:
                self.applied[slot] = keep
        opening = x[:, s.channels : s.channels + values]
        out = out if s.corrects else out.view((len(out), *self.norm.shape))
        return self.kernels.gated_norm(
            x=out, gate=opening, weight=self.norm, epsilon=1e-6, gate_first=not s.corrects
        )


ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def walked(layer: Layer, x: Tensor, slot: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of rows run one by one, each committed at once, and the states after
    each."""
    outputs = []
    states = []
    for t in range(len(x)):
        outputs.append(layer.run(x[t : t + 1], (slot, 0, 1, t, t + 1)))
        states.append(layer.memory.state[slot].clone())
    return torch.cat(outputs), states


def check_windows(form: Form, dtype: torch.dtype, shape: Shape, length: int) -> None:
    """Check windows of 1 to 9 rows, some of which are rejected, against single steps."""
    single, layer = (Layer(shape, form, dtype, 2) for _ in range(2))
    x = layer.inputs(length)
    expected, states = walked(single, x)
    chance = random.Random(3)
    position = 0
    seen = []
    while position < len(x):
        rows = chance.randint(1, min(9, len(x) - position))
        accepted = chance.choice([1, rows, chance.randint(1, rows)])
        window = x[position : position + rows].clone()
        window[accepted:] = layer.inputs(rows, seed=position + 1)[
            accepted:
        ]  # drafts that are rejected
        results = layer.run(window, (1, 0, rows, position, position))
        if position:
            assert torch.equal(layer.memory.state[1], states[position - 1]), position
        seen.append(results[:accepted])
        position += accepted
    assert torch.equal(torch.cat(seen), expected)
    assert layer.memory.state[0].isnan().all(), "no run named this slot"


def check_passes(form: Form, dtype: torch.dtype, shape: Shape) -> None:
    """Check one pass of a prompt, another slot's window, a run without rows.

    Rows between them are zeros.
    """
    layer, single = (Layer(shape, form, dtype, 4, bias=True) for _ in range(2))
    first = layer.inputs(33, seed=1)
    second = layer.inputs(17, seed=2)
    expected, states = walked(single, first)
    other_expected, _ = walked(single, second, 3)
    results = [layer.run(first[:5], (2, 0, 5, 0, 5))]
    layer.run(second[:12], (0, 0, 12, 0, 10))
    x = torch.cat((layer.inputs(2, seed=9), first[5:33], layer.inputs(1, seed=9), second[12:17]))
    together = layer.run(x, (2, 2, 28, 5, 33), (1, 30, 0, 4, 4), (0, 31, 5, 12, 12))
    results.append(together[2:30])
    assert torch.equal(torch.cat(results), expected) and torch.equal(
        together[31:], other_expected[12:17]
    )
    assert torch.equal(layer.memory.state[2], states[32])
    assert not together[:2].any() and not together[30].any()
    assert layer.memory.state[1].isnan().all() and layer.ring[1].isnan().all()


PASSED = parametrize_forms([(shape,) for shape in SHAPES], (), "torch", *COMPILED)
PASSED += [
    ("triton", Shape(2, 1, 8, 40, depth=20)),
    ("triton", Shape(2, 2, 5, 7, depth=20, corrects=False)),
]


@pytest.mark.parametrize(("form", "shape"), PASSED, indirect=["form"], ids=str)
def test_passes_are_single_steps(form: Form, shape: Shape) -> None:
    check_windows(form, form.dtypes[0], shape, 12 if form.name == "triton" else 40)
    check_passes(form, form.dtypes[0], shape)


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

    def run(self, operation: str, *cuts: int, slot: int = 1) -> tuple[Tensor, Tensor]:
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
            layer.applied[slot] = end
        return torch.cat(results), layer.memory.state[slot].clone()


def check_chunks(form: Form, shape: Shape, count: int, regime: str) -> None:
    """Check full chunks against a step a token; the NaN in the initial state is not read."""
    read, state = Prompt.of(shape, count, form, regime).run("delta_chunks", count // CHUNK * CHUNK)
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


@FORMS
@pytest.mark.parametrize("shape", CHUNKED[1:], ids=str)
def test_how_many_chunks_a_call_holds_changes_no_bit(shape: Shape, form: Form) -> None:
    """Nor what stands beside them.

    A run without rows changes nothing, and rows of no run are zeros.
    """
    prompt = Prompt.of(shape, 3 * CHUNK - 5, form)
    expected, state = prompt.run("delta_chunks")
    for cuts in ((CHUNK,), (2 * CHUNK,), (CHUNK, 2 * CHUNK)):
        results, final = prompt.run("delta_chunks", *cuts, slot=0)
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
    assert layer.memory.state[1].isnan().all() and all(
        ring.isnan().all() for ring in layer.memory[1:]
    )
