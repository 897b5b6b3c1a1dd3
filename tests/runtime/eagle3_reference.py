"""Plain EAGLE-3 drafters to compare with: no cache, every row computed anew, in float64.

Written from the published forward pass, in rows: row P pairs the target's state of position P with
token P + 1, at rotary position P of the head's own table. Import nothing of `spd`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.mtp_reference import LIBRARY_OPTIONS, PlainLayers, PlainTarget, choose_token


class PlainEagle3(PlainLayers):
    """An EAGLE-3 head with a tiny target, run over full texts."""

    def __init__(self, target: Path, head: Path, plain_target: PlainTarget | None = None) -> None:
        published: dict[str, Any] = json.loads((head / "config.json").read_text())
        speculators = "transformer_layer_config" in published
        stored = load_file(head / "model.safetensors")
        tensors = {
            name: tensor.double() for name, tensor in stored.items() if tensor.is_floating_point()
        }
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
        super().__init__(
            published["transformer_layer_config"] if speculators else published,
            {name.replace(prefix, "", 1): tensor for name, tensor in tensors.items()},
        )
        self.target = plain_target or PlainTarget(target)
        self.embedding = self.tensors.get("embed_tokens.weight", self.target.embedding)
        offsets = stored.get("d2t", torch.zeros(len(self.target.head), dtype=torch.long))
        self.draft_ids = torch.arange(len(offsets)) + offsets
        self.output = self.tensors.get("lm_head.weight", self.target.head[self.draft_ids])
        self.norms_residual = bool(published.get("norm_before_residual", speculators))
        self.norms_joined = bool(published.get("norm_before_fc"))
        self.norms_parts = bool(published.get("fc_norm"))
        self.recycles_normed = bool(published.get("norm_output"))
        self.indices = self._indices(published)

    def _indices(self, published: dict[str, Any]) -> list[int]:
        """Return the indices of the head's streams: j is the residual stream that enters the
        target's layer j.
        """
        key = "eagle_aux_hidden_state_layer_ids"
        layers = self.target.config["num_hidden_layers"]
        inputs = published.get(key)
        outputs = published.get("eagle_config", {}).get(key)
        if inputs:
            return list(inputs)
        return [index + 1 for index in outputs] if outputs else [2, layers // 2, layers - 3]

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the fused states [T, H] of the target's positions."""
        streams = self.target.streams(tokens)
        parts = [streams[index] for index in self.indices]
        if self.norms_parts:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        fused = torch.cat(parts, dim=-1)
        return self.linear(self.norm(fused, "input_norm") if self.norms_joined else fused, "fc")

    def rows(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (next states, logits over draft ids) of rows of tokens and the states before them."""
        normed_states = self.norm(states, "hidden_norm")
        pairs = torch.cat(
            (self.norm(self.embedding[tokens], "input_layernorm"), normed_states), dim=-1
        )
        x = (normed_states if self.norms_residual else states) + self.attention(pairs, "")
        x = x + self.mlp(self.norm(x, "post_attention_layernorm"), "")
        normed = self.norm(x, "norm")
        return normed if self.recycles_normed else x, normed @ self.output.T

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice.

        Rows of `tokens` are made of fused states; each draft adds a row of the last state.
        """
        drafts = list[int]()
        gap = float("inf")
        states = hidden[: len(tokens) - 1]
        for _ in range(k):
            next_states, logits = self.rows([*tokens[1:], *drafts], states)
            best_id, second_gap = choose_token(logits[-1])
            drafts = [*drafts, int(self.draft_ids[best_id])]
            gap = min(gap, second_gap)
            states = torch.cat((states, next_states[-1:]))
        return drafts, gap


class LibraryTarget(PlainTarget):
    """A target of any family, run by `transformers` in float64."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(folder)
        options = {**LIBRARY_OPTIONS, "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    @torch.inference_mode()
    def streams(self, tokens: list[int]) -> list[Tensor]:
        """Return the residual streams [T, H] that enter the layers, and the one after the last."""
        hidden_states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [stream[0] for stream in hidden_states]
