"""What drafters that are trained share, in plain torch, and an EAGLE-3 head.

Each holds its own parameters only: embedding and output head are the target's, and stay as they
are. Parameters have the published names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.recipes import demo_model as model
from tests.recipes.demo_model import MLP, GroupedAttention, RMSNorm, Shape, linear, rotate_halves


@dataclass(frozen=True)
class DrafterShape(Shape):
    """Sizes of a drafter, and for each stream that it reads the layers that it has passed."""

    taps: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    block_size: int = 8
    anchors: int = 8
    """Positions of each text that a block drafter is trained at in one step."""
    mask_id: int = 0
    markov_rank: int = 0
    """Elements of a token's embedding in a DSpark's bias; 0 in other drafters."""


@dataclass(frozen=True)
class Rows:
    """Rows of texts, filled up at their ends: what one step trains on.

    ids [B, T]; streams [B, T, taps * H]; best, chances [B, T, TOP]: the likeliest tokens behind a
    position among the drafter's, by their indices there, and their chances; is_known [B, T]: True
    where there are any; firsts, starts, lengths [B]: where a text's own positions begin, where its
    reply does, and where it ends.
    """

    ids: Tensor
    streams: Tensor
    best: Tensor
    chances: Tensor
    is_known: Tensor
    firsts: Tensor
    starts: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Start:
    """What a drafter's first weights follow from.

    final_norm [H]: the target's last norm; streams [N, taps * H] at some positions; following
    [N, H]: the next tokens' embeddings; states [N, H]: what enters the last norm behind the next
    token, each of root mean square 1.
    """

    final_norm: Tensor
    streams: Tensor
    following: Tensor
    states: Tensor


def fit_linear(inputs: Tensor, outputs: Tensor, ridge: float = 0.05) -> Tensor:
    """Return the matrix [O, I] that maps inputs [N, I] to outputs [N, O] with the least error."""
    moments = inputs.T @ inputs / len(inputs)
    moments += ridge * moments.diagonal().mean() * torch.eye(len(moments))
    return torch.linalg.solve(moments, inputs.T @ outputs / len(inputs)).T


def at(values: Tensor, positions: Tensor) -> Tensor:
    """Return values [B, T, …] at positions [B, R]; beyond the end the last ones."""
    rows = torch.arange(len(values))[:, None]
    return values[rows, positions.clamp(max=values.shape[1] - 1)]


def rotated(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return heads [B, heads, T, dim] rotated to positions [B, T]."""
    half = heads.shape[-1] // 2
    angles = positions[:, None, :, None] * theta ** -(torch.arange(half) / half)
    return rotate_halves(heads, angles.cos(), angles.sin())


class MidLayer(nn.Module):
    """The head's layer: attention over norms of embedding and state, the state as residual."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.self_attn = GroupedAttention(shape, 2 * shape.hidden, norms=False)
        self.mlp = MLP(shape.hidden, shape.intermediate)

    def paired(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return what attention reads [B, T, 2 * H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Return the next state of attention's output [B, T, heads * dim]."""
        x = state + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """A head that reads a few residual streams of the target, each behind a norm of its own."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden) for _ in shape.taps)
        self.fc = linear(len(shape.taps) * shape.hidden, shape.hidden)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden)
        model.initialise(self)

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """Begin with the linear map from streams and token that predicts the target's state best.

        So the residual has the scale that the target's last norm expects. Rows attend mostly to
        themselves, and the MLP adds nothing yet.
        """
        hidden = self.shape.hidden
        self.norm.weight.copy_(start.final_norm)
        streams = start.streams.chunk(len(self.fc_norm), -1)
        for norm, stream in zip(self.fc_norm, streams, strict=True):
            normed = F.rms_norm(stream, (hidden,))
            norm.get_parameter("weight").copy_(1 / normed.square().mean(0).sqrt().clamp(min=0.1))
        parts = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        seen = torch.cat([*parts, self.midlayer.input_layernorm(start.following)], dim=-1)
        matrix = fit_linear(seen, start.states)
        self.fc.weight.copy_(matrix[:, :-hidden])
        self._attend_to_own(matrix[:, -hidden:])
        self.midlayer.mlp.down_proj.weight.zero_()

    def _attend_to_own(self, matrix: Tensor) -> None:
        """Make attention's output the product of a matrix [H, H] with the row's own embedding."""
        hidden = self.shape.hidden
        attention = self.midlayer.self_attn
        mixed = torch.cat([nn.init.orthogonal_(torch.empty(hidden, hidden)) for _ in range(2)], 1)
        for part in (attention.q_proj, attention.k_proj):
            rows = len(part.weight)
            part.weight.copy_(mixed[:rows] if rows <= hidden else mixed.repeat(2, 1)[:rows])
        left, sizes, right = torch.linalg.svd(matrix)
        rows = len(attention.v_proj.weight)
        rank = min(rows, hidden)
        turn = nn.init.orthogonal_(torch.empty(rank, rank))  # the heads share what is large
        attention.v_proj.weight.zero_()[:rank, :hidden] = turn @ right[:rank]
        outputs = F.pad(left[:, :rank] * sizes[:rank] @ turn.T, (0, rows - rank))
        group = self.shape.heads // self.shape.kv_heads
        outputs = outputs.unflatten(1, (self.shape.kv_heads, -1)).repeat_interleave(group, dim=1)
        attention.o_proj.weight.copy_(outputs.flatten(1) / group)

    def fused(self, streams: Tensor) -> Tensor:
        """Return the states of streams [..., taps * H]."""
        parts = zip(self.fc_norm, streams.chunk(len(self.fc_norm), -1), strict=True)
        return self.fc(torch.cat([norm(stream) for norm, stream in parts], dim=-1))

    def anchors(self, rows: Rows, draws: torch.Generator) -> Tensor:
        """Return the positions P of rows [B, R] whose next token is a text's own.

        The last ones of short texts are beyond their end.
        """
        count = int((rows.lengths - rows.firsts).max())
        return (rows.firsts - 1)[:, None] + torch.arange(count)

    def states(self, rows: Rows, embedding: Tensor, anchors: Tensor, depth: int) -> list[Tensor]:
        """Return the normed states of the anchors at each of `depth` steps [B, R, H].

        Row P of step j has seen (streams P, token P + 1) and its own j states, at rotary position
        P + j; its keys are those of step 0 up to P and its own of later steps, as in a drafter's
        cache.
        """
        layer = self.midlayer
        attention = layer.self_attn
        state = self.fused(rows.streams)
        following = F.embedding(rows.ids.roll(-1, dims=1), embedding)
        span = torch.arange(rows.ids.shape[1])
        wide = layer.paired(following, state)
        keys, values = self._keys(wide, span.expand(rows.ids.shape))
        visible = span <= anchors[:, :, None]
        state = at(state, anchors)
        wide = at(wide, anchors)
        later: list[tuple[Tensor, Tensor]] = []
        normed = []
        for step in range(depth):
            if step:
                token = at(rows.ids, anchors + 1 + step)
                wide = layer.paired(F.embedding(token, embedding), state)
                later.append(self._keys(wide, anchors + step))
            query = attention.q_proj(wide).unflatten(-1, (-1, self.shape.head_dim))
            query = rotated(query.transpose(1, 2), anchors + step, self.shape.rope_theta)
            attended = attend(query, keys, values, visible, later)
            state = layer.finish(state, attended.transpose(1, 2).flatten(2))
            normed.append(self.norm(state))
        return normed

    def _keys(self, wide: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads [B, heads, T, dim]."""
        attention = self.midlayer.self_attn
        size = self.shape.head_dim
        keys = attention.k_proj(wide).unflatten(-1, (-1, size)).transpose(1, 2)
        keys = rotated(keys, positions, self.shape.rope_theta)
        values = attention.v_proj(wide).unflatten(-1, (-1, size)).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)

    def bias(self, tokens: Tensor) -> Tensor | None:
        """Return None: the tokens before drafts change no logits."""

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """Return None: there is no confidence head."""

    def config(self, vocab: int, draft_vocab: int) -> dict[str, Any]:
        """Return config.json."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_positions,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        }


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    later: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend from queries [B, heads, R, dim] to the visible keys, and to the row's `later` ones."""
    if not later:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible[:, None])
    query = query * query.shape[-1] ** -0.5
    scores = (query @ keys.transpose(-1, -2)).masked_fill(~visible[:, None], float("-inf"))
    row_scores = torch.stack([(query * k).sum(-1) for k, _ in later], dim=-1)
    weights = torch.cat([scores, row_scores], dim=-1).softmax(-1)
    length = keys.shape[2]
    out = weights[..., :length] @ values
    for step, (_, v) in enumerate(later):
        out = out + weights[..., length + step, None] * v
    return out


def save_drafter(
    drafter: nn.Module, config: Mapping[str, Any], folder: Path, draft_ids: Tensor
) -> None:
    """Write config.json and model.safetensors: weights in bfloat16, and the offsets of ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in drafter.state_dict().items()
    }
    tensors["d2t"] = (draft_ids - torch.arange(len(draft_ids))).int()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_weights(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Return a saved drafter's parameters in float32, and its ids."""
    weights = load_file(folder / "model.safetensors")
    draft_ids = weights.pop("d2t").long()
    draft_ids += torch.arange(len(draft_ids))
    return {name: value.float() for name, value in weights.items()}, draft_ids
