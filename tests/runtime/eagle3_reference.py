"""Plain EAGLE-3 drafters to compare with: no cache, every row computed anew, in float64.

Written from the published forward pass, in rows: row P pairs the target's state of position P with token
P + 1, at rotary position P of the head's own table. Import nothing of `spd`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.mtp_reference import HOW, PlainLayers, PlainTarget, chosen


class PlainEagle3(PlainLayers):
    """An EAGLE-3 head beside a tiny target, run over whole texts."""

    def __init__(self, target: Path, head: Path, runs: PlainTarget | None = None) -> None:
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
        self.target = runs or PlainTarget(target)
        self.embedding = self.tensors.get("embed_tokens.weight", self.target.embedding)
        self.output = self.tensors.get("lm_head.weight", self.target.head)
        self.said = torch.arange(len(self.output)) + stored.get("d2t", torch.tensor(0))
        self.norms_residual = bool(published.get("norm_before_residual", speculators))
        self.norms_together = bool(published.get("norm_before_fc"))
        self.norms_apart = bool(published.get("fc_norm"))
        self.recycles_normed = bool(published.get("norm_output"))
        self.indices = self._indices(published)

    def _indices(self, published: dict[str, Any]) -> list[int]:
        """Entering indices: j is the residual stream that enters layer j of the target."""
        key = "eagle_aux_hidden_state_layer_ids"
        layers = self.target.config["num_hidden_layers"]
        inputs = published.get(key)
        outputs = published.get("eagle_config", {}).get(key)
        if inputs:
            return list(inputs)
        return [index + 1 for index in outputs] if outputs else [2, layers // 2, layers - 3]

    def hidden(self, tokens: list[int]) -> Tensor:
        """The fused states [T, H] of the target's positions."""
        streams = self.target.streams(tokens)
        parts = [streams[index] for index in self.indices]
        if self.norms_apart:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        fused = torch.cat(parts, dim=-1)
        return self.linear(self.norm(fused, "input_norm") if self.norms_together else fused, "fc")

    def rows(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """(states that go on, logits over draft ids) of rows made of tokens and the states before them."""
        read = self.norm(states, "hidden_norm")
        pairs = torch.cat((self.norm(self.embedding[tokens], "input_layernorm"), read), dim=-1)
        x = (read if self.norms_residual else states) + self.attention(pairs, "")
        x = x + self.mlp(self.norm(x, "post_attention_layernorm"), "")
        shown = self.norm(x, "norm")
        return shown if self.recycles_normed else x, shown @ self.output.T

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """See `PlainMtp`. Rows of `tokens` are made of fused states; a draft adds one of the last state."""
        drafts = list[int]()
        gap = float("inf")
        states = hidden[: len(tokens) - 1]
        for _ in range(k):
            made, logits = self.rows([*tokens[1:], *drafts], states)
            best, near = chosen(logits[-1])
            drafts = [*drafts, int(self.said[best])]
            gap = min(gap, near)
            states = torch.cat((states, made[-1:]))
        return drafts, gap


class LibraryTarget(PlainTarget):
    """A target of any family, run by `transformers` in float64."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(folder)
        how = {**HOW, "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()

    @torch.inference_mode()
    def streams(self, tokens: list[int]) -> list[Tensor]:
        seen = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [stream[0] for stream in seen]
