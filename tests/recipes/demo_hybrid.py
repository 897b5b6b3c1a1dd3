"""The hybrid demo's architecture in plain torch: Qwen3.5's gated DeltaNet and gated attention layers.

Imports nothing from `spd`, so that what comes out is evidence independent of the program that reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recipes.demo_model import (
    MLP,
    Decoder,
    HybridShape,
    Layer,
    Memory,
    MtpLayer,
    Sizes,
    attend_own,
    linear,
    rotate_halves,
)


class CentredNorm(nn.Module):
    """Root-mean-square norm whose learned scale is kept as its distance from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, 1e-6)


class GatedAttention(nn.Module):
    """Grouped heads, normed before a part of each is turned; gates beside the queries scale the output."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.q_proj = linear(s.hidden, 2 * s.heads * s.head_dim)
        self.k_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.o_proj = linear(s.heads * s.head_dim, s.hidden)
        self.q_norm, self.k_norm = CentredNorm(s.head_dim), CentredNorm(s.head_dim)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, memory: Memory | None = None) -> Tensor:
        """The attention's output; appends its keys and values to the `memory` it attends to, where given."""
        s, (batch, length, _) = self.shape, h.shape
        q, gate = self.q_proj(h).view(batch, length, s.heads, -1).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(h).view(batch, length, s.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, s.kv_heads, -1).transpose(1, 2)
        q = self._turn(self.q_norm(q).transpose(1, 2), cos, sin)
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, dim=1) for x in (self._turn(k, cos, sin), v))
        memory = [] if memory is None else memory
        memory.append((k, v))
        return self.o_proj((attend_own(q, memory).transpose(1, 2) * gate.sigmoid()).flatten(2))

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rope = self.shape.rope
        return torch.cat([rotate_halves(x[..., :rope], cos, sin), x[..., rope:]], dim=-1)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ of strictly lower triangular A [..., C, C]."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return (-(turned @ grad @ turned)).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The gated delta rule from an empty state in float32, by chunks of positions (Yang et al., 2024).

    q and k [B, Hk, T, dk], normed, q scaled; v [B, Hv, T, dv]; g, the decay's logarithm, and beta [B, Hv, T].
    Returns [B, Hv, T, dv]. Value head j reads key head j // (Hv / Hk).
    """
    (batch, heads, length, width), groups = k.shape, v.shape[1] // k.shape[1]
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (g, beta))
    q, k = q[:, :, None], k[:, :, None]
    v, g, beta = (x.unflatten(1, (heads, groups)) for x in (v, g, beta))
    past = g.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    between = (past[..., :, None] - past[..., None, :]).masked_fill(later, float("-inf")).exp()
    lower = ((k @ k.transpose(-1, -2)) * between * beta[..., None]).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    values = inverse @ (v * beta[..., None])
    reads = inverse @ (k * (beta * past.exp())[..., None])
    writes = (k * (past[..., -1:] - past).exp()[..., None]).transpose(-1, -2)
    kept = past[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, groups, width, v.shape[-1])
    states, written = [], []
    for value, read, write, keep in zip(*(x.unbind(3) for x in (values, reads, writes, kept)), strict=True):
        states.append(state)
        written.append(value - read @ state)
        state = state * keep + write @ written[-1]
    out = (q * past.exp()[..., None]) @ torch.stack(states, 3)
    out = out + ((q @ k.transpose(-1, -2)) * between) @ torch.stack(written, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :, :length]


class DeltaNet(nn.Module):
    """Qwen3.5's gated DeltaNet: a short convolution, the gated delta rule, a gated norm."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.keys, self.values = s.key_heads * s.key_dim, s.value_heads * s.value_dim
        wide = 2 * self.keys + self.values
        self.in_proj_qkv, self.in_proj_z = linear(s.hidden, wide), linear(s.hidden, self.values)
        self.in_proj_a, self.in_proj_b = linear(s.hidden, s.value_heads), linear(s.hidden, s.value_heads)
        self.conv1d = nn.Conv1d(wide, wide, s.kernel, groups=wide, bias=False)
        # Time constants of some tokens up to a thousand, as Mamba starts.
        steps = torch.empty(s.value_heads).uniform_(-6.9, -2.3).exp()
        self.A_log = nn.Parameter(torch.empty(s.value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(s.value_dim))
        self.out_proj = linear(self.values, s.hidden)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, length = self.shape, h.shape[1]
        before, weight = F.pad(self.in_proj_qkv(h), (0, 0, s.kernel - 1, 0)), self.conv1d.weight
        mixed = F.silu(sum(before[:, i : i + length] * weight[:, 0, i] for i in range(s.kernel)))
        parts = mixed.split([self.keys, self.keys, self.values], dim=-1)
        heads = (s.key_heads, s.key_heads, s.value_heads)
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, heads, strict=True))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(h) + self.dt_bias)
        beta = self.in_proj_b(h).sigmoid()
        with torch.autocast("cpu", enabled=False):
            operands = (q * s.key_dim**-0.5, k, v, g.transpose(1, 2), beta.transpose(1, 2))
            out = delta_rule(*(x.float() for x in operands))
        normed = F.rms_norm(out.transpose(1, 2), (s.value_dim,), self.norm.weight, 1e-6)
        return self.out_proj(normed.flatten(2) * F.silu(self.in_proj_z(h)))


class HybridDecoder(Decoder):
    """Qwen3.5's text model and its MTP layer, which reads the embedding at every position."""

    norm_type = CentredNorm
    masks_first = False

    def _layer(self, index: int) -> Layer:
        s = self.shape
        assert isinstance(s, HybridShape)
        mixer = DeltaNet(s) if (index + 1) % s.interval else GatedAttention(s)
        return Layer(s.hidden, mixer, MLP(s.hidden, s.intermediate), CentredNorm)

    def _mtp_layer(self) -> MtpLayer:
        assert isinstance(self.shape, HybridShape)
        return MtpLayer(self._layer(self.shape.interval - 1), CentredNorm)


def new_decoder(shape: Sizes) -> Decoder:
    """A model of the shape, drawn at random."""
    return (HybridDecoder if isinstance(shape, HybridShape) else Decoder)(shape)
