"""The demo's architectures in plain torch: DeepSeek-V3, Qwen3.5, and Qwen3 for the draft.

Imports nothing from `spd`, so that the checkpoints are evidence independent of the program that
reads them. Parameters have the names of published checkpoints, but the matrices of a layer's shared
and routed experts are one matrix, which `demo_checkpoint.py` splits: every expert is computed for
every token and those that are not selected get weight zero, which at this size is faster than
gathering tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of every decoder."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    rope_theta: float = 10000.0
    max_positions: int = 4096
    vocab: int = 4096


@dataclass(frozen=True)
class Shape(Sizes):
    """Sizes of one Qwen3-shaped decoder."""

    intermediate: int = 640
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True)
class DeepseekShape(Sizes):
    """Sizes of one DeepSeek-V3-shaped decoder with one MTP layer behind its last layer."""

    kv_rank: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 64
    dense: int = 896
    expert: int = 64
    shared: int = 6
    routed: int = 6
    groups: int = 3
    top_groups: int = 2
    top_experts: int = 3
    routed_scaling: float = 2.5


@dataclass(frozen=True)
class HybridShape(Shape):
    """Sizes of a Qwen3.5-shaped decoder: DeltaNets, and attention in each `interval`-th layer."""

    interval: int = 4
    rope: int = 16
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    kernel: int = 4


DRAFT = Shape(96, layers=4, heads=3, rope_theta=100000.0, intermediate=256, kv_heads=1, head_dim=32)
TARGET = DeepseekShape()
HYBRID = HybridShape()
TARGETS = {"deepseek": TARGET, "hybrid": HYBRID}
Memory = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def initialise(model: nn.Module) -> None:
    """Draw every matrix: narrow where a layer writes to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
            std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5 * (0.3 if last else 0.7)
            nn.init.normal_(parameter, std=std)


def rotary_angles(length: int, dim: int, theta: float, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, dim / 2] of positions first … first + length - 1."""
    inverse = theta ** -(torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
    angles = torch.arange(first, first + length, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, D] as NeoX with cos and sin [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions 2i and 2i + 1 together: interleaved rotary embedding."""
    even = x[..., 0::2]
    odd = x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class Attention(nn.Module):
    """The base of attention blocks; queries, keys and values are [B, heads, T, dim]."""

    o_proj: nn.Linear

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of h [B, T, inputs], and gates of the output, if any."""
        raise NotImplementedError

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, memory: Memory | None = None) -> Tensor:
        """Return attention's output over `memory`, to which the keys and values are appended."""
        q, k, v, *gates = self.project(h, cos, sin)
        memory = [] if memory is None else memory
        memory.append((k, v))
        out = attend_memory(q, memory).transpose(1, 2)
        return self.o_proj((out * gates[0].sigmoid() if gates else out).flatten(2))


class GroupedAttention(Attention):
    """Grouped heads.

    With `norms`, each query and key head is normed before its rotation, as Qwen3's are.
    """

    def __init__(self, shape: Shape, inputs: int, norms: bool = True) -> None:
        """Create projections from `inputs` columns to heads, and from heads to the hidden size."""
        super().__init__()
        self.shape = shape
        wide = shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.q_proj = linear(inputs, wide)
        self.o_proj = linear(wide, shape.hidden)
        self.k_proj = linear(inputs, narrow)
        self.v_proj = linear(inputs, narrow)
        self.q_norm, self.k_norm = (
            RMSNorm(shape.head_dim) if norms else nn.Identity() for _ in range(2)
        )

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            part(h).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for part in parts
        )
        q = rotate_halves(self.q_norm(q), cos, sin)
        k = rotate_halves(self.k_norm(k), cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


class LatentAttention(Attention):
    """Multi-head latent attention without a query rank, keys and values expanded for every head."""

    def __init__(self, shape: DeepseekShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.q_proj = linear(s.hidden, s.heads * (s.nope + s.rope))
        self.kv_a_proj_with_mqa = linear(s.hidden, s.kv_rank + s.rope)
        self.kv_a_layernorm = RMSNorm(s.kv_rank)
        self.kv_b_proj = linear(s.kv_rank, s.heads * (s.nope + s.value))
        self.o_proj = linear(s.heads * s.value, s.hidden)

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        s = self.shape
        batch, length, _ = h.shape
        q = self.q_proj(h).view(batch, length, s.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([s.nope, s.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(h).split([s.kv_rank, s.rope], dim=-1)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .view(batch, length, s.heads, -1)
            .transpose(1, 2)
        )
        k_nope, v = kv.split([s.nope, s.value], dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], cos, sin).expand(-1, s.heads, -1, -1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, cos, sin)], dim=-1)
        return q, torch.cat([k_nope, k_rope], dim=-1), v


def attend_memory(q: Tensor, memory: Memory) -> Tensor:
    """Attend from rows P to step 0's keys up to P and, of each later step, to row P's key."""
    (keys, values), *later_steps = memory
    if not later_steps:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    length = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(future, float("-inf"))
    row_scores = torch.stack([(q * k).float().sum(-1) for k, _ in later_steps], dim=-1)
    weights = torch.cat([scores, row_scores], dim=-1).softmax(-1).to(values.dtype)
    out = weights[..., :length] @ values
    for step, (_, v) in enumerate(later_steps):
        out = out + weights[..., length + step, None] * v
    return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Gate(nn.Module):
    """`noaux_tc`: sigmoid scores, a correction bias for selection alone, groups before experts."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, shape: DeepseekShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.routed, shape.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.routed))
        self.register_buffer("load", torch.zeros(shape.routed), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """Return weights [B, T, routed] of every expert, zero where it is not selected."""
        s = self.shape
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(h.float(), self.weight.float()).sigmoid()
        choice = (scores + self.e_score_correction_bias).detach()
        grouped = choice.unflatten(-1, (s.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(s.top_groups, dim=-1).indices
        allowed = (
            torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)[..., None].expand_as(grouped)
        )
        choice = choice.masked_fill(allowed.flatten(-2) == 0, float("-inf"))
        chosen = torch.zeros_like(scores).scatter(
            -1, choice.topk(s.top_experts, dim=-1).indices, 1.0
        )
        if self.training:
            self.load += chosen.detach().flatten(0, -2).mean(0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling


class MoE(nn.Module):
    """Shared and routed experts, all in the rows of one SwiGLU: shared first."""

    def __init__(self, shape: DeepseekShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Gate(shape)
        self.experts = MLP(shape.hidden, (shape.shared + shape.routed) * shape.expert)

    def forward(self, h: Tensor) -> Tensor:
        """Return the sum of the shared experts and the selected routed ones."""
        s = self.shape
        mlp = self.experts
        weights = self.gate(h).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else h.dtype)
        inner = F.silu(mlp.gate_proj(h)) * mlp.up_proj(h)
        shared, routed = inner.split([s.shared * s.expert, s.routed * s.expert], dim=-1)
        routed = (routed.unflatten(-1, (s.routed, s.expert)) * weights[..., None]).flatten(-2)
        return mlp.down_proj(torch.cat([shared, routed], dim=-1))


class Layer(nn.Module):
    """One pre-norm decoder layer of an attention block and an MLP."""

    def __init__(
        self, hidden: int, attention: nn.Module, mlp: nn.Module, norm: type = RMSNorm
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(hidden)
        self.post_attention_layernorm = norm(hidden)
        self.self_attn = attention
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *memory: Memory) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A causal decoder with tied embeddings; `forward` gives hidden states after the final norm."""

    norm_type: type[nn.Module] = RMSNorm
    masks_first_embedding = True

    def __init__(self, shape: Sizes) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(self._layer(index) for index in range(shape.layers))
        self.norm = self.norm_type(shape.hidden)
        self.mtp = self._mtp_layer()
        initialise(self)

    def _layer(self, index: int) -> Layer:
        s = self.shape
        if isinstance(s, DeepseekShape):
            return Layer(s.hidden, LatentAttention(s), MoE(s) if index else MLP(s.hidden, s.dense))
        assert isinstance(s, Shape)
        return Layer(s.hidden, GroupedAttention(s, s.hidden), MLP(s.hidden, s.intermediate))

    def _mtp_layer(self) -> MtpLayer | None:
        return MtpLayer(self._layer(1), RMSNorm) if isinstance(self.shape, DeepseekShape) else None

    def autocast(self) -> torch.autocast:
        """Return the context of mixed precision: bfloat16 and float32."""
        return torch.autocast("cpu", torch.bfloat16)

    def rotary(self, length: int, dtype: torch.dtype, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `length` positions from `first` on."""
        if isinstance(self.shape, DeepseekShape | HybridShape):
            dim = self.shape.rope
        else:
            assert isinstance(self.shape, Shape)
            dim = self.shape.head_dim
        cos, sin = rotary_angles(length, dim, self.shape.rope_theta, first)
        return cos.to(dtype), sin.to(dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embedding, in bfloat16 under autocast."""
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        return self.embed_tokens(ids).to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden states [B, T, hidden] after the final norm."""
        x = self.embed(ids)
        cos, sin = self.rotary(ids.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight).float()

    def mtp_hidden(self, hidden: Tensor, following: Tensor, depth: int) -> list[Tensor]:
        """Return the MTP layer's normed states [B, T, hidden] at draft steps 0 … depth - 1.

        hidden [B, T, hidden] after the final norm; following [B, T + depth - 1], the tokens at
        positions 1 on. Row P of step j has seen (hidden P, token P + 1) and its own j recycled
        states, at position P + j: keys of step 0 up to P, then one key of each later step, as a
        drafter's cache holds them.
        """
        assert self.mtp is not None
        length = hidden.shape[1]
        steps = []
        memory: Memory = []
        for step in range(depth):
            embedded = self.embed(following[:, step : step + length])
            if step == 0 and self.masks_first_embedding:
                embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
            hidden = self.mtp(embedded, hidden, self.rotary(length, embedded.dtype, step), memory)
            steps.append(hidden)
        return steps


class MtpLayer(nn.Module):
    """DeepSeek's MTP layer: norms of embedding and hidden, a projection, a decoder layer, a norm."""

    def __init__(self, block: Layer, norm: type[nn.Module]) -> None:
        super().__init__()
        hidden = block.input_layernorm.weight.shape[0]
        self.enorm = norm(hidden)
        self.hnorm = norm(hidden)
        self.eh_proj = linear(2 * hidden, hidden)
        self.block = block
        self.norm = norm(hidden)

    def forward(
        self, embedded: Tensor, hidden: Tensor, turns: tuple[Tensor, ...], memory: Memory
    ) -> Tensor:
        """Return the next recycled hidden states.

        Append this step's keys and values to `memory`.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        cos, sin = turns
        return self.norm(self.block(x, cos, sin, memory))


class ZeroCenteredNorm(nn.Module):
    """Root-mean-square norm whose learned scale is stored as its distance from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, 1e-6)


class GatedAttention(Attention):
    """Grouped heads, normed before a part of each is rotated.

    Gates beside the queries scale the output.
    """

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.q_proj = linear(s.hidden, 2 * s.heads * s.head_dim)
        self.k_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden, s.kv_heads * s.head_dim)
        self.o_proj = linear(s.heads * s.head_dim, s.hidden)
        self.q_norm = ZeroCenteredNorm(s.head_dim)
        self.k_norm = ZeroCenteredNorm(s.head_dim)

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """See `Attention`."""
        s = self.shape
        batch, length, _ = h.shape
        q, gate = self.q_proj(h).view(batch, length, s.heads, -1).chunk(2, dim=-1)
        k, v = (part(h).view(batch, length, s.kv_heads, -1) for part in (self.k_proj, self.v_proj))
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = (
            torch.cat((rotate_halves(x[..., : s.rope], cos, sin), x[..., s.rope :]), -1)
            for x in (q, k)
        )
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, dim=1) for x in (k, v.transpose(1, 2)))
        return q, k, v, gate


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ of strictly lower triangular A [..., C, C]."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        """Return the inverse."""
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of A."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return (-(transposed @ grad @ transposed)).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Compute the gated delta rule from a zero state in float32, by chunks (Yang et al., 2024).

    q and k [B, Hk, T, dk], normed, q scaled; v [B, Hv, T, dv]; g, the decay's logarithm, and beta
    [B, Hv, T]. Returns [B, Hv, T, dv]. Value head j reads key head j // (Hv / Hk).
    """
    batch, heads, length, width = k.shape
    groups = v.shape[1] // k.shape[1]
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (g, beta))
    q = q[:, :, None]
    k = k[:, :, None]
    v, g, beta = (x.unflatten(1, (heads, groups)) for x in (v, g, beta))
    log_decay = g.cumsum(-1)
    is_later = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    between = (
        (log_decay[..., :, None] - log_decay[..., None, :])
        .masked_fill(is_later, float("-inf"))
        .exp()
    )
    lower = ((k @ k.transpose(-1, -2)) * between * beta[..., None]).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    values = inverse @ (v * beta[..., None])
    reads = inverse @ (k * (beta * log_decay.exp())[..., None])
    writes = (k * (log_decay[..., -1:] - log_decay).exp()[..., None]).transpose(-1, -2)
    chunk_decay = log_decay[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, groups, width, v.shape[-1])
    states = []
    written = []
    for value, read, write, decay in zip(
        values.unbind(3), reads.unbind(3), writes.unbind(3), chunk_decay.unbind(3), strict=True
    ):
        states.append(state)
        written.append(value - read @ state)
        state = state * decay + write @ written[-1]
    out = (q * log_decay.exp()[..., None]) @ torch.stack(states, 3)
    out = out + ((q @ k.transpose(-1, -2)) * between) @ torch.stack(written, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :, :length]


class DeltaNet(nn.Module):
    """Qwen3.5's gated DeltaNet: a short convolution, the gated delta rule, a gated norm."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.keys = s.key_heads * s.key_dim
        self.values = s.value_heads * s.value_dim
        wide = 2 * self.keys + self.values
        self.in_proj_qkv = linear(s.hidden, wide)
        self.in_proj_z = linear(s.hidden, self.values)
        self.in_proj_a = linear(s.hidden, s.value_heads)
        self.in_proj_b = linear(s.hidden, s.value_heads)
        self.conv1d = nn.Conv1d(wide, wide, s.kernel, groups=wide, bias=False)
        # Time constants from some tokens to a thousand, as in Mamba's initialisation.
        steps = torch.empty(s.value_heads).uniform_(-6.9, -2.3).exp()
        self.A_log = nn.Parameter(torch.empty(s.value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(s.value_dim))
        self.out_proj = linear(self.values, s.hidden)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output [B, T, hidden]; positions have no rotary embedding."""
        s = self.shape
        length = h.shape[1]
        before = F.pad(self.in_proj_qkv(h), (0, 0, s.kernel - 1, 0))
        weight = self.conv1d.weight
        taps = (before[:, i : i + length] * weight[:, 0, i] for i in range(s.kernel))
        mixed = F.silu(sum(taps, before.new_zeros(())))
        parts = mixed.split([self.keys, self.keys, self.values], dim=-1)
        heads = (s.key_heads, s.key_heads, s.value_heads)
        q, k, v = (
            x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, heads, strict=True)
        )
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(h) + self.dt_bias)
        beta = self.in_proj_b(h).sigmoid()
        with torch.autocast("cpu", enabled=False):
            out = delta_rule(
                (q * s.key_dim**-0.5).float(),
                k.float(),
                v.float(),
                g=g.transpose(1, 2).float(),
                beta=beta.transpose(1, 2).float(),
            )
        scale = self.norm.get_parameter("weight")
        normed = F.rms_norm(out.transpose(1, 2), (s.value_dim,), scale, 1e-6)
        return self.out_proj(normed.flatten(2) * F.silu(self.in_proj_z(h)))


class HybridDecoder(Decoder):
    """Qwen3.5's text model and its MTP layer, which reads the embedding at every position."""

    norm_type = ZeroCenteredNorm
    masks_first_embedding = False

    def _layer(self, index: int) -> Layer:
        s = self.shape
        assert isinstance(s, HybridShape)
        mixer = DeltaNet(s) if (index + 1) % s.interval else GatedAttention(s)
        return Layer(s.hidden, mixer, MLP(s.hidden, s.intermediate), ZeroCenteredNorm)

    def _mtp_layer(self) -> MtpLayer:
        assert isinstance(self.shape, HybridShape)
        return MtpLayer(self._layer(self.shape.interval - 1), ZeroCenteredNorm)


def new_decoder(shape: Sizes) -> Decoder:
    """Return a model of the shape with random weights."""
    return (HybridDecoder if isinstance(shape, HybridShape) else Decoder)(shape)


Optimizers = list[torch.optim.Optimizer]
OUTER = ("embed", "gate.weight", "in_proj_a", "in_proj_b")
"""Parts of the names of matrices that AdamW trains."""


def make_optimizers(
    model: nn.Module, scale: float, outer: Sequence[str] = OUTER, rate: float = 0.004
) -> Optimizers:
    """Return Muon for matrices inside layers, AdamW at `rate` for all other parameters."""
    parameters = list(model.named_parameters())
    inner = {n for n, p in parameters if p.dim() == 2 and not any(part in n for part in outer)}
    matrices = [p for n, p in parameters if n in inner]
    other_parameters = [p for n, p in parameters if n not in inner]
    return [
        torch.optim.Muon(
            matrices, lr=0.006 * scale, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(other_parameters, lr=rate * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]
