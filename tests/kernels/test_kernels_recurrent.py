"""Recurrent layers' kernels: each form against its contract, and rows that do not depend on how passes cut.

A text is walked twice: token by token, and in windows whose last rows are rejected and written again.
Outputs, states and what the rings keep of committed tokens must be the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.dispatch import load_kernels
from spd.kernels.native.library import NativeLibrary
from spd.kernels.recurrent import delta_rule as torch_form
from spd.kernels.recurrent.delta_rule import DeltaMemory
from spd.kernels.recurrent.short_conv import Segments, short_conv

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

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.width + self.heads * self.size


SHAPES = [Shape(4, 2, 16, 16), Shape(3, 1, 24, 40, taps=2), Shape(6, 2, 64, 32), Shape(1, 1, 5, 7, taps=3)]


class Layer:
    """What a layer keeps of some slots, and a pass over it in one form of the kernels."""

    def __init__(
        self, shape: Shape, kernels: Any, dtype: torch.dtype, slots: int, *, bias: bool = False
    ) -> None:
        s = self.shape = shape
        generator = torch.Generator().manual_seed(7)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        self.kernels, self.dtype, nan = kernels, dtype, float("nan")
        self.weight, self.norm = draw(s.taps, s.channels), draw(s.size)
        self.bias = draw(s.channels) if bias else None
        self.rate, self.step_bias = draw(s.heads), draw(s.heads)
        self.ring = torch.full((slots, s.depth, s.channels), nan, dtype=dtype)
        self.memory = DeltaMemory(
            torch.full((slots, s.heads, s.width, s.size), nan),
            torch.full((slots, s.depth, s.key_heads, s.width), nan),
            torch.full((slots, s.depth, s.heads, s.size), nan),
            torch.full((slots, s.depth, s.heads, 2), nan),
        )
        self.applied = torch.zeros(slots, dtype=torch.long)

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        """A projection's rows [rows, channels + heads * size + 2 * heads]."""
        width = self.shape.channels + self.shape.heads * (self.shape.size + 2)
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def run(self, x: Tensor, *runs: tuple[int, int, int, int, int]) -> Tensor:
        """The layer's output [T, heads * size] of rows x [T, ...] in (slot, first, count, start, keep)."""
        rows, s = Segments(torch.tensor(runs).T.contiguous(), self.applied), self.shape
        values = s.heads * s.size
        mixed = self.kernels.short_conv(x[:, : s.channels], self.weight, self.bias, self.ring, rows)
        gates = x[:, s.channels + values :]
        out = self.kernels.delta_rule(mixed, gates, self.rate, self.step_bias, self.memory, rows)
        for slot, _, count, _, keep in runs:
            if count:
                self.applied[slot] = keep
        return self.kernels.gated_norm(out, x[:, s.channels : s.channels + values], self.norm, 1e-6)


ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def walked(layer: Layer, x: Tensor, slot: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The outputs of rows fed one by one, each kept at once, and the states behind it."""
    outputs, states = [], []
    for t in range(len(x)):
        outputs.append(layer.run(x[t : t + 1], (slot, 0, 1, t, t + 1)))
        states.append(layer.memory.state[slot].clone())
    return torch.cat(outputs), states


def check_windows(kernels: Any, dtype: torch.dtype, shape: Shape, length: int = 40) -> None:
    """Windows of 1 to 9 rows, some of which are rejected, against single steps."""
    single, layer = Layer(shape, kernels, dtype, 2), Layer(shape, kernels, dtype, 2)
    x = layer.inputs(length)
    wanted, states = walked(single, x)
    chance, position, seen = random.Random(3), 0, []
    while position < len(x):
        rows = chance.randint(1, min(9, len(x) - position))
        accepted = chance.choice([1, rows, chance.randint(1, rows)])
        window = x[position : position + rows].clone()
        window[accepted:] = layer.inputs(rows, seed=position + 1)[accepted:]  # drafts that are rejected
        made = layer.run(window, (1, 0, rows, position, position))
        if position:
            assert torch.equal(layer.memory.state[1], states[position - 1]), position
        seen.append(made[:accepted])
        position += accepted
    assert torch.equal(torch.cat(seen), wanted)
    assert layer.memory.state[0].isnan().all(), "no run named this slot"


def check_passes(kernels: Any, dtype: torch.dtype, shape: Shape) -> None:
    """One pass: a prompt that is kept, another's window, a run without rows; rows between them are zeros."""
    layer, single = Layer(shape, kernels, dtype, 4, bias=True), Layer(shape, kernels, dtype, 4, bias=True)
    first, second = layer.inputs(33, seed=1), layer.inputs(17, seed=2)
    wanted, states = walked(single, first)
    others, _ = walked(single, second, 3)
    made = [layer.run(first[:5], (2, 0, 5, 0, 5))]
    layer.run(second[:12], (0, 0, 12, 0, 10))
    x = torch.cat((layer.inputs(2, seed=9), first[5:33], layer.inputs(1, seed=9), second[12:17]))
    together = layer.run(x, (2, 2, 28, 5, 33), (1, 0, 0, 4, 4), (0, 31, 5, 12, 12))
    made.append(together[2:30])
    assert torch.equal(torch.cat(made), wanted) and torch.equal(together[31:], others[12:17])
    assert torch.equal(layer.memory.state[2], states[32])
    assert not together[:2].any() and not together[30].any()
    assert layer.memory.state[1].isnan().all() and layer.ring[1].isnan().all()


@ALL_SHAPES
def test_passes_of_the_torch_form_are_single_steps(shape: Shape) -> None:
    check_windows(load_kernels("torch"), torch.float32, shape)
    check_passes(load_kernels("torch"), torch.float32, shape)


@pytest.mark.parametrize(
    "shape", [Shape(2, 1, 8, 40, depth=20), Shape(1, 1, 5, 7, taps=3, depth=20)], ids=str
)
def test_passes_of_the_triton_form_are_single_steps(shape: Shape) -> None:
    check_windows(load_kernels("triton"), torch.float32, shape, 12)
    check_passes(load_kernels("triton"), torch.float32, shape)


@ALL_SHAPES
def test_passes_of_the_native_form_are_single_steps(native: NativeLibrary, shape: Shape) -> None:
    check_windows(native, BFLOAT16, shape)
    check_passes(native, BFLOAT16, shape)


@ALL_SHAPES
def test_forms_meet_their_contract(
    shape: Shape, native: NativeLibrary, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Against the torch form in float32, of the same rounded inputs."""
    if shape.heads * shape.size > 100:
        dtypes = ()  # the interpreter is slow

    def error(kernels: Any, dtype: torch.dtype) -> float:
        layer = Layer(shape, kernels, dtype, 1)
        x = layer.inputs(33)
        exact = Layer(shape, load_kernels("torch"), torch.float32, 1)
        wanted = torch.cat(
            [exact.run(x[:20].float(), (0, 0, 20, 0, 18)), exact.run(x[20:].float(), (0, 0, 13, 20, 20))]
        )
        made = torch.cat([layer.run(x[:20], (0, 0, 20, 0, 18)), layer.run(x[20:], (0, 0, 13, 20, 20))])
        return float((made.float() - wanted).abs().max() / wanted.abs().max())

    assert error(native, BFLOAT16) < 2**-8
    for dtype in dtypes:
        assert error(load_kernels("triton"), dtype) < (1e-5 if dtype == torch.float32 else 2**-10)


def naive(x: Tensor, layer: Layer) -> Tensor:
    """The published recurrence of a whole text at once, in float64."""
    s, x = layer.shape, x.double()
    before = torch.cat((x.new_zeros(s.taps - 1, s.channels), x[:, : s.channels]))
    mixed = sum(before[t : t + len(x)] * layer.weight[t].double() for t in range(s.taps))
    mixed = mixed * mixed.sigmoid()
    query, key, value = mixed.split([s.key_heads * s.width] * 2 + [s.heads * s.size], -1)
    query, key = (
        (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(s.heads // s.key_heads, 1)
        for a in (query.view(-1, s.key_heads, s.width), key.view(-1, s.key_heads, s.width))
    )
    value, (gate, raw) = (
        value.view(-1, s.heads, s.size),
        x[:, s.channels :].split([s.heads * s.size, 2 * s.heads], -1),
    )
    correct, step = raw.chunk(2, -1)
    decay = (-layer.rate.double().exp() * torch.nn.functional.softplus(step + layer.step_bias.double())).exp()
    state, out = x.new_zeros(s.heads, s.width, s.size), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = value[t] - torch.einsum("hij,hi->hj", state, key[t])
        state = state + torch.einsum("hi,hj->hij", key[t], error * correct[t].sigmoid()[:, None])
        out.append(torch.einsum("hij,hi->hj", state, query[t]) * s.width**-0.5)
    normed = torch.stack(out)
    normed = normed / (normed.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.double()
    gate = gate.reshape(normed.shape)
    return (normed * gate * gate.sigmoid()).flatten(1)


@ALL_SHAPES
def test_the_torch_form_is_the_published_recurrence(shape: Shape) -> None:
    layer = Layer(shape, load_kernels("torch"), torch.float32, 1)
    x = layer.inputs(25)
    assert (layer.run(x, (0, 0, 25, 0, 25)).double() - naive(x, layer)).abs().max() < 1e-4


def test_threads_change_no_bit(native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, made = Shape(6, 2, 64, 64), []
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "threads", threads)
        layer = Layer(shape, native, BFLOAT16, 2)
        x = layer.inputs(80)
        made.append(layer.run(x, (0, 0, 50, 0, 50), (1, 50, 30, 0, 20)))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


FAULTS: dict[str, Callable[[Layer], None]] = {
    "a state of the slot's former owner is read": lambda layer: layer.applied.fill_(1),
    "a committed token is applied never": lambda layer: layer.applied.add_(1),
    "a committed token is applied twice": lambda layer: layer.applied.sub_(1),
    "the convolution's history is another's": lambda layer: layer.ring.copy_(layer.ring.roll(1, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str) -> None:
    """So the comparisons above can fail: what follows differs where positions are applied wrongly."""
    shape = SHAPES[0]
    layer, single = (Layer(shape, load_kernels("torch"), torch.float32, 1) for _ in range(2))
    x = layer.inputs(12)
    wanted, _ = walked(single, x)
    begin = 0 if "former owner" in fault else 6
    if begin:
        layer.run(x[:6], (0, 0, 6, 0, 4))
    FAULTS[fault](layer)
    made = layer.run(x[begin:], (0, 0, 12 - begin, begin, begin))
    assert not torch.equal(made, wanted[begin:])


def test_the_references_are_those_named() -> None:
    kernels = load_kernels("torch")
    assert kernels.short_conv is short_conv and kernels.delta_rule is torch_form.delta_rule
