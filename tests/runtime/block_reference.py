"""A plain block drafter to compare with: no cache, every row computed anew, in float64.

Written from the published forward pass. Import nothing of `spd`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.mtp_reference import LIBRARY_OPTIONS, PlainLayers, PlainTarget, choose_token


class PlainBlock(PlainLayers):
    """A block drafter with a tiny target, run over full texts."""

    def __init__(
        self, target: Path, drafter: Path, plain_target: PlainTarget | None = None
    ) -> None:
        published: dict[str, Any] = json.loads((drafter / "config.json").read_text())
        self.stored = load_file(drafter / "model.safetensors")
        super().__init__(
            published,
            {name: t.double() for name, t in self.stored.items() if t.is_floating_point()},
        )
        self.target = plain_target or PlainTarget(target)
        nested = published.get("dflash_config", {})
        self.block = {**published, **nested}
        self.taps = [index + 1 for index in self.block["target_layer_ids"]]
        self.block_size = self.block["block_size"]
        self.first = 1
        causal = published.get("is_causal")
        self.causal = {"full_attention": bool(causal), "sliding_attention": causal is not False}

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the states [T, H] of the target's positions, from which keys and values follow."""
        streams = self.target.streams(tokens)
        fused = self.linear(torch.cat([streams[tap] for tap in self.taps], dim=-1), "fc")
        return self.norm(fused, "hidden_norm")

    def is_visible(self, layer: int, rows: Tensor, keys: Tensor, start: int) -> Tensor:
        """Return which keys rows of the block at `start` attend to: bool [B, N], by positions."""
        kinds = self.config.get("layer_types") or ["full_attention"] * (layer + 1)
        visible = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if self.causal[kinds[layer]]:
            visible &= keys <= rows[:, None]
        if kinds[layer] == "sliding_attention":
            visible &= rows[:, None] - keys < self.config["sliding_window"]
        return visible

    def attend(self, layer: int, states: Tensor, y: Tensor, start: int) -> Tensor:
        """Return the attention of a block's normed rows y [B, H], to states [start, H] and to it."""
        prefix = f"layers.{layer}.self_attn."
        heads = self.config["num_attention_heads"]
        kv_heads = self.config["num_key_value_heads"]
        keys = torch.arange(start + len(y), dtype=torch.float64)
        rows = keys[start:]

        def project(x: Tensor, name: str, count: int) -> Tensor:
            return self.linear(x, f"{prefix}{name}_proj").view(len(x), count, -1)

        both = torch.cat((states, y))
        query = self.norm(project(y, "q", heads), f"{prefix}q_norm")
        key = self.norm(project(both, "k", kv_heads), f"{prefix}k_norm")
        query = self.rotated(query, rows)
        key = self.rotated(key, keys)
        value = project(both, "v", kv_heads)
        key, value = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~self.is_visible(layer, rows, keys, start), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(y), -1)
        return self.linear(mixed, f"{prefix}o_proj")

    def rows(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return the normed outputs [B, H] of the block behind all but the last of `tokens`."""
        start = len(tokens) - 1
        ids = [tokens[-1]] + [self.block["mask_token_id"]] * (self.block_size - 1)
        x = self.target.embedding[ids] * (self.block.get("input_embedding_scale") or 1.0)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            x = x + self.attend(
                layer, states[:start], self.norm(x, f"{prefix}input_layernorm"), start
            )
            x = x + self.mlp(self.norm(x, f"{prefix}post_attention_layernorm"), prefix)
        return self.norm(x, "norm")

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [B, V] of normed rows."""
        logits = rows @ self.target.head.T * (self.block.get("output_multiplier") or 1.0)
        cap = self.block.get("final_logit_softcapping")
        return cap * (logits / cap).tanh() if cap else logits

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice."""
        logits = self.logits(self.rows(tokens, hidden))[self.first : self.first + k]
        choices = [choose_token(row) for row in logits]
        return [best for best, _ in choices], min(gap for _, gap in choices)


class PublishedBlock(PlainBlock):
    """A drafter run by the package `dflash`, with a target run by `transformers`, in float64."""

    def __init__(self, target: Path, drafter: Path) -> None:
        from dflash.model import DFlashDraftModel
        from transformers import AutoModelForCausalLM

        super().__init__(target, drafter)
        self.model = AutoModelForCausalLM.from_pretrained(target, **LIBRARY_OPTIONS).eval()
        loaded = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float64)
        self.drafter = loaded.eval()
        assert self.drafter.target_layer_ids == [tap - 1 for tap in self.taps]

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the target's streams [T, taps * H] that are read."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[tap][0] for tap in self.taps], dim=-1)

    @torch.inference_mode()
    def rows(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return the normed outputs [B, H] of the block behind all but the last of `tokens`."""
        start = len(tokens) - 1
        ids = [tokens[-1]] + [self.block["mask_token_id"]] * (self.block_size - 1)
        scale = self.block.get("input_embedding_scale") or 1.0
        output: Tensor = self.drafter(
            position_ids=torch.arange(start + self.block_size)[None],
            noise_embedding=self.model.get_input_embeddings()(torch.tensor([ids])) * scale,
            target_hidden=states[None, :start],
        )
        return output[0]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [B, V] of normed rows."""
        logits: Tensor = self.drafter.compute_logits(rows, self.model.lm_head)
        return logits

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` greedy tokens of the package's own loop after a prompt."""
        ids: Tensor = self.drafter.spec_generate(
            self.model, torch.tensor([list(prompt)]), max_new_tokens=count, stop_token_ids=None
        )
        return ids[0, len(prompt) :].tolist()
