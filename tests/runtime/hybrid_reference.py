"""A plain Qwen3.5 to compare with: no cache, every row computed anew, in float64. Imports nothing of `spd`.

Written from the published forward pass: the recurrence token by token, over the whole text, for each text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tests.runtime.mtp_reference import PlainMtp


class PlainHybrid(PlainMtp):
    """A tiny hybrid with an MTP layer, in the names of `mtp.*`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "mtp", 1)
        self.config["rope_theta"] = 10000.0

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Scales are stored as their distance from 1."""
        normed = x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return normed * (1 + self.tensors[f"{name}.weight"])

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first quarter of each head turns."""
        turning = x.shape[-1] // 4
        return torch.cat((super().rotated(x[..., :turning], positions), x[..., turning:]), dim=-1)

    def attention(self, y: Tensor, prefix: str) -> Tensor:
        """Attention whose output is gated, or the delta rule, as the layer's tensors say."""
        if f"{prefix}linear_attn.A_log" in self.tensors:
            return self.delta(y, f"{prefix}linear_attn.")
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        weight, rows = self.tensors[f"{prefix}self_attn.q_proj.weight"], len(y)
        both = weight.view(heads, 2, size, -1)
        output = self.tensors[f"{prefix}self_attn.o_proj.weight"]
        gate = (y @ both[:, 1].flatten(0, 1).T).sigmoid()
        self.tensors[f"{prefix}self_attn.q_proj.weight"] = both[:, 0].flatten(0, 1)
        self.tensors[f"{prefix}self_attn.o_proj.weight"] = torch.eye(heads * size, dtype=y.dtype)
        mixed = super().attention(y, prefix).view(rows, -1)
        self.tensors[f"{prefix}self_attn.q_proj.weight"] = weight
        self.tensors[f"{prefix}self_attn.o_proj.weight"] = output
        return (mixed * gate) @ output.T

    def delta(self, y: Tensor, prefix: str) -> Tensor:
        """What a gated DeltaNet adds to rows from position 0 on; y: normed rows."""
        config, own = self.config, {n: self.tensors[prefix + n] for n in ("A_log", "dt_bias")}
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        width, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        weight = self.tensors[f"{prefix}conv1d.weight"][:, 0]
        inputs = self.linear(y, f"{prefix}in_proj_qkv")
        span = weight.shape[1]
        inputs = torch.cat((inputs.new_zeros(span - 1, inputs.shape[1]), inputs))
        mixed = silu(torch.stack([(inputs[t : t + span].T * weight).sum(1) for t in range(len(y))]))
        q, k, v = mixed.split([keys * width] * 2 + [values * size], dim=-1)
        q, k = (x.view(-1, keys, width).repeat_interleave(values // keys, dim=1) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        correct = self.linear(y, f"{prefix}in_proj_b").sigmoid()
        steps = softplus(self.linear(y, f"{prefix}in_proj_a") + own["dt_bias"])
        decay = (-own["A_log"].exp() * steps).exp()
        state, out, v = y.new_zeros(values, width, size), [], v.view(-1, values, size)
        for t in range(len(y)):
            state = state * decay[t, :, None, None]
            error = (v[t] - torch.einsum("hij,hi->hj", state, k[t])) * correct[t, :, None]
            state = state + torch.einsum("hi,hj->hij", k[t], error)
            out.append(torch.einsum("hij,hi->hj", state, q[t]) / width**0.5)
        read = torch.stack(out)
        read = read / (read.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        read = read * self.tensors[f"{prefix}norm.weight"]
        gate = silu(self.linear(y, f"{prefix}in_proj_z")).view(read.shape)
        return self.linear((read * gate).flatten(1), f"{prefix}out_proj")
