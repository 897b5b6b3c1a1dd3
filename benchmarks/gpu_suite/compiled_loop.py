# mypy: disable-error-code="no-untyped-call"
"""A peer of our own making: one decode step over static tensors, compiled by torch and captured
whole.

What a good torch user writes in a hundred lines (in the manner of gpt-fast): fused projections, a
static cache indexed by a position held on the device, `torch.compile` and one CUDA graph, greedy
choice. Layers are alike, so that one of them is compiled for all; each leaves its last sum to the
next one's norm, with which it is fused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_suite.shapes import Shape

EPSILON = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the root-mean-square norm in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


class Block(nn.Module):
    """One layer: attention over a static cache, then the gated MLP."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    first: Tensor
    second: Tensor
    query_norm: Tensor
    key_norm: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape, positions: int) -> None:
        super().__init__()
        self.shape = shape
        for name, (n, k) in shape.weights().items():
            if name != "head":
                self.register_parameter(name, nn.Parameter(torch.randn(n, k) * k**-0.5))
        for name, size in (("first", shape.hidden), ("second", shape.hidden)):
            self.register_parameter(name, nn.Parameter(torch.ones(size)))
        for name in ("query_norm", "key_norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(shape.head_dim)))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, shape.kv_heads, positions, shape.head_dim))

    def forward(
        self, x: Tensor, last: Tensor, where: Tensor, mask: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states [T, hidden] and what is to be added to them, from those of the layer
        before.

        Positions where [T]; mask bool [T, positions]; cos and sin [T, head_dim].
        """
        s = self.shape
        rows = x.shape[0]
        x = x + last
        qkv = F.linear(rms_norm(x, self.first), self.qkv).view(rows, -1, s.head_dim)
        query, key, value = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        query = rms_norm(query, self.query_norm)
        key = rms_norm(key, self.key_norm)
        query = _rotate(query, cos, sin)
        key = _rotate(key, cos, sin)
        self.keys.index_copy_(2, where, key.transpose(0, 1)[None])
        self.values.index_copy_(2, where, value.transpose(0, 1)[None])
        # A group's queries as rows of their KV head: no key is repeated for them.
        folded = (
            query.view(rows, s.kv_heads, -1, s.head_dim)
            .transpose(0, 1)
            .reshape(1, s.kv_heads, -1, s.head_dim)
        )
        seen = mask[:, None].expand(-1, s.heads // s.kv_heads, -1).reshape(-1, mask.shape[1])
        mixed = F.scaled_dot_product_attention(
            folded, self.keys, self.values, attn_mask=seen[None, None]
        )
        mixed = mixed.view(s.kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)
        x = x + F.linear(mixed, self.out)
        gate, up = F.linear(rms_norm(x, self.second), self.gate_up).chunk(2, dim=-1)
        return x, F.linear(F.silu(gate) * up, self.down)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


class Loop(nn.Module):
    """The model and its step; made under `torch.device` and a default type, with random weights."""

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, shape: Shape, positions: int, theta: float = 1e6) -> None:
        super().__init__()
        self.positions = positions
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden))
        self.head = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * shape.hidden**-0.5)
        if shape.tied:
            self.head = self.embedding
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.layers = nn.ModuleList(Block(shape, positions) for _ in range(shape.layers))
        kind = self.embedding.dtype
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().to(kind))
        self.register_buffer("sin", angles.sin().to(kind))
        self.register_buffer("mask", torch.ones(positions, positions, dtype=torch.bool).tril())

    def begin(self, ids: Tensor, where: Tensor) -> tuple[Tensor, ...]:
        """Return the first layer's inputs: states, nothing to add, mask, cosines and sines."""
        x = self.embedding[ids]
        return x, torch.zeros_like(x), self.mask[where], self.cos[where], self.sin[where]

    def end(self, x: Tensor, last: Tensor) -> Tensor:
        """Return the likeliest token int64 [1] after the last row."""
        logits = F.linear(rms_norm((x + last)[-1:], self.norm), self.head)
        return logits.float().argmax(dim=-1)

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return the likeliest token int64 [1] after the rows ids [T] at positions where [T]."""
        x, last, mask, cos, sin = self.begin(ids, where)
        for layer in self.layers:
            x, last = layer.forward(x, last, where, mask, cos, sin)
        return self.end(x, last)

    def compile_step(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Compute `forward` by compiled parts, for one row."""
        begin = torch.compile(self.begin, fullgraph=True)
        end = torch.compile(self.end, fullgraph=True)
        for layer in self.layers:
            layer.compile(fullgraph=True)

        def step(ids: Tensor, where: Tensor) -> Tensor:
            x, last, mask, cos, sin = begin(ids, where)
            for layer in self.layers:
                x, last = layer(x, last, where, mask, cos, sin)
            return end(x, last)

        return step


class CompiledLoop:
    """Generates with the compiled step; the prompt is read eagerly, as one batch of rows."""

    graph: torch.cuda.CUDAGraph | None = None

    def __init__(
        self,
        shape: Shape,
        positions: int,
        device: str,
        dtype: torch.dtype,
        compiled: bool,
        tuned: bool = False,
    ) -> None:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.model = Loop(shape, positions).requires_grad_(False)
        finally:
            torch.set_default_dtype(default)
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.step: Callable[[Tensor, Tensor], Tensor] = self.model.forward
        if compiled:
            from torch._inductor import config

            config.coordinate_descent_tuning = (
                tuned  # as gpt-fast does: slower to compile, faster to run
            )
            torch._dynamo.reset()  # or code that was compiled otherwise would be taken again
            self.step = self.model.compile_step()
            if torch.device(device).type == "cuda":
                self._capture()

    def _advance(self) -> None:
        self.token.copy_(self.step(self.token, self.place))
        self.place.add_(1)

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture the step as one graph, after compiling it on another stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self.graph = graph

    @torch.inference_mode()
    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Generate so many tokens greedily; the host reads them once, at the end."""
        ids = torch.tensor(prompt, device=self.token.device)
        where = torch.arange(len(prompt), device=self.token.device)
        self.token.copy_(self.model(ids, where))
        self.place.copy_(where[-1:] + 1)
        token_tensors = [self.token.clone()]
        for _ in range(tokens - 1):
            if self.graph is None:
                self._advance()
            else:
                self.graph.replay()
            token_tensors.append(self.token.clone())
        return [int(token) for token in torch.cat(token_tensors).tolist()]
