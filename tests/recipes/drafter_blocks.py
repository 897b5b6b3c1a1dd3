"""Block drafters to train, in plain torch: DFlash, and DSpark with its bias and its confidence.

A pass runs the newest token and mask tokens behind a text, and drafts all of a block at once. See
`drafter_heads` for what all drafters share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recipes import demo_model as model
from tests.recipes.demo_model import MLP, GroupedAttention, RMSNorm, linear
from tests.recipes.drafter_heads import DrafterShape, Rows, Start, at, rotated


class BlockLayer(nn.Module):
    """A layer of Qwen3's shape, whose rows attend to the text before the block and to the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.self_attn = GroupedAttention(shape, shape.hidden)
        self.mlp = MLP(shape.hidden, shape.intermediate)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads [B, heads, T, dim]."""
        attention = self.self_attn
        size = self.shape.head_dim
        heads = attention.k_proj(x).unflatten(-1, (-1, size)).transpose(1, 2)
        keys = rotated(attention.k_norm(heads), positions, self.shape.rope_theta)
        values = attention.v_proj(x).unflatten(-1, (-1, size)).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, anchors: Tensor) -> Tensor:
        """Return the next x [B, A * S, H] of blocks of S rows behind anchors [B, A].

        context [B, T, H]; positions [B, A * S].
        """
        size = self.shape.head_dim
        attention = self.self_attn
        y = self.input_layernorm(x)
        query = attention.q_proj(y).unflatten(-1, (-1, size)).transpose(1, 2)
        query = rotated(attention.q_norm(query), positions, self.shape.rope_theta) * size**-0.5
        span = torch.arange(context.shape[1])
        keys, values = self.keys(context, span.expand(context.shape[:2]))
        own_keys, own_values = self.keys(y, positions)
        count = anchors.shape[1]
        rows = x.shape[1] // count
        hidden = span > anchors.repeat_interleave(rows, dim=1)[:, :, None]
        scores = (query @ keys.transpose(-1, -2)).masked_fill(hidden[:, None], float("-inf"))
        blocks = (-1, self.shape.heads, count, rows, size)
        own_scores = query.reshape(blocks) @ own_keys.reshape(blocks).transpose(-1, -2)
        weights = torch.cat([scores, own_scores.flatten(2, 3)], dim=-1).softmax(-1)
        out = weights[..., : len(span)] @ values
        own_weights = weights[..., len(span) :].unflatten(2, (count, rows))
        out = out + (own_weights @ own_values.reshape(blocks)).flatten(2, 3)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """A bias of a draft's logits by the token before it."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = linear(rank, draft_vocab)


class ConfidenceHead(nn.Module):
    """The chance that a draft is accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class Block(nn.Module):
    """A DFlash drafter; with `markov_rank` a DSpark, which drafts from its first row too."""

    def __init__(self, shape: DrafterShape, draft_vocab: int) -> None:
        super().__init__()
        self.shape = shape
        self.is_dspark = shape.markov_rank > 0
        self.fc = linear(len(shape.taps) * shape.hidden, shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        if self.is_dspark:
            self.markov_head = MarkovHead(shape.vocab, draft_vocab, shape.markov_rank)
            self.confidence_head = ConfidenceHead(shape.hidden + shape.markov_rank)
        model.initialise(self)
        if self.is_dspark:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    @property
    def max_drafts(self) -> int:
        """Return the drafts of a block."""
        return self.shape.block_size - (not self.is_dspark)

    @torch.no_grad()
    def start_from(self, start: Start) -> None:
        """Begin with the target's last norm, and with streams of one size."""
        self.norm.weight.copy_(start.final_norm)
        scales = (
            start.streams.unflatten(-1, (len(self.shape.taps), -1)).square().mean((0, 2)).rsqrt()
        )
        self.fc.weight.mul_(scales.repeat_interleave(self.shape.hidden))

    def anchors(self, rows: Rows, draws: torch.Generator) -> Tensor:
        """Return some positions of each text [B, A], drawn anew in each step."""
        room = (rows.lengths - rows.firsts).clamp(min=1)
        chances = torch.rand(len(room), self.shape.anchors, generator=draws)
        return rows.firsts[:, None] - 1 + (chances * room[:, None]).long()

    def states(self, rows: Rows, embedding: Tensor, anchors: Tensor, depth: int) -> list[Tensor]:
        """Return the normed rows that draft tokens 1 … depth behind the anchors [B, A, H]."""
        size = self.shape.block_size
        positions = (anchors[:, :, None] + 1 + torch.arange(size)).flatten(1)
        ids = torch.full((*anchors.shape, size), self.shape.mask_id)
        ids[..., 0] = at(rows.ids, anchors + 1)
        x = F.embedding(ids.flatten(1), embedding)
        context = self.hidden_norm(self.fc(rows.streams))
        for layer in self.layers:
            x = layer(x, context, positions, anchors)
        outputs = self.norm(x).unflatten(1, (-1, size))
        first = int(not self.is_dspark)
        return list(outputs[:, :, first : first + depth].unbind(2))

    def bias(self, tokens: Tensor) -> Tensor | None:
        """Return what the tokens before drafts [N] add to their logits [N, D]."""
        if not self.is_dspark:
            return None
        bias: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(tokens))
        return bias

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the logits [N] of the chances that drafts are accepted."""
        if not self.is_dspark:
            return None
        read = torch.cat([states, self.markov_head.markov_w1(tokens)], dim=-1)
        logits: Tensor = self.confidence_head.proj(read.detach())[:, 0]
        return logits

    def config(self, vocab: int, draft_vocab: int) -> dict[str, Any]:
        """Return config.json, in the keys of `speculators`."""
        shape = self.shape
        layer = {
            "model_type": "qwen3",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.max_positions,
            "vocab_size": vocab,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }
        dspark = {
            "markov_rank": shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return {
            "architectures": ["DSparkSpeculator" if self.is_dspark else "DFlashSpeculator"],
            "speculators_model_type": "dspark" if self.is_dspark else "dflash",
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": list(shape.taps),
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_id,
            "draft_vocab_size": draft_vocab,
            "sample_from_anchor": self.is_dspark,
            **(dspark if self.is_dspark else {}),
        }
