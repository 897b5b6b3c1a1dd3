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
        self.is_speculators = "transformer_layer_config" in published
        super().__init__(
            published["transformer_layer_config"] if self.is_speculators else published,
            {name: t.double() for name, t in self.stored.items() if t.is_floating_point()},
        )
        self.target = plain_target or PlainTarget(target)
        self.block = {**published, **published.get("dflash_config", {})}
        self.block_size = self.block["block_size"]
        kind = published.get("speculators_model_type")
        self.first = int(not published.get("sample_from_anchor", kind == "dspark"))
        offsets = self.stored.get("d2t", torch.zeros(len(self.target.head), dtype=torch.long))
        self.draft_ids = torch.arange(len(offsets)) + offsets
        self.head = self.tensors.get("lm_head.weight", self.target.head[self.draft_ids])
        if self.is_speculators:
            self.taps = list(published["aux_hidden_state_layer_ids"])
            slides_causally = not published.get("sliding_window_non_causal", kind == "dflash2")
            self.causal = {"full_attention": False, "sliding_attention": slides_causally}
        else:
            self.taps = [index + 1 for index in self.block["target_layer_ids"]]
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
            window = self.config["sliding_window"]
            if self.is_speculators:
                visible &= keys >= start - window
            else:
                visible &= rows[:, None] - keys < window
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
            y = self.norm(x, f"{prefix}input_layernorm")
            y, factors = self.convolved(y, None, f"{prefix}attention_conv", 0)
            y = self.attend(layer, states[:start], y, start)
            x = x + self.convolved(y, factors, f"{prefix}attention_conv", 1)[0]
            y = self.norm(x, f"{prefix}post_attention_layernorm")
            y, factors = self.convolved(y, None, f"{prefix}mlp_conv", 0)
            x = x + self.convolved(self.mlp(y, prefix), factors, f"{prefix}mlp_conv", 1)[0]
        return self.norm(x, "norm")

    def convolved(
        self, y: Tensor, factors: Tensor | None, name: str, which: int
    ) -> tuple[Tensor, Tensor]:
        """Return rows y [B, H] after one of a DFlash 2's convolutions, and their own factors.

        The first convolution takes the factors from its rows.
        """
        if f"{name}.base_kernel" not in self.tensors:
            return y, y
        base = self.tensors[f"{name}.base_kernel"]
        kernel, hidden = base.shape[1:]
        if factors is None:
            factors = self.linear(y, f"{name}.kernel_projection").view(len(y), 2, kernel, -1)
        group = hidden // factors.shape[-1]
        result = torch.zeros_like(y)
        for row in range(len(y)):
            for offset in range(min(kernel, row + 1)):
                own = factors[row, which, offset].repeat_interleave(group)
                result[row] += (base[which, offset] + own) * y[row - offset]
        return result, factors

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [B, V] of normed rows."""
        logits = rows @ self.head.T * (self.block.get("output_multiplier") or 1.0)
        cap = self.block.get("final_logit_softcapping")
        return cap * (logits / cap).tanh() if cap else logits

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice."""
        rows = self.rows(tokens, hidden)
        logits = self.logits(rows)
        drafts = list[int]()
        gap = float("inf")
        for row in range(self.first, self.first + k):
            best, near = choose_token(self.refined(logits[row], rows, [tokens[-1], *drafts], row))
            drafts.append(int(self.draft_ids[best]))
            gap = min(gap, near)
        return drafts, gap

    def refined(self, logits: Tensor, rows: Tensor, tokens: list[int], row: int) -> Tensor:
        """Return the logits [V] of a row, whose block's tokens up to its own are known."""
        if "selector_top_k" in self.block:
            values, ids = logits.topk(self.block["selector_top_k"])
            prefix = "candidate_selector."
            context = self.tensors[f"{prefix}predecessor_codebook"][tokens[-1]]
            context = context * self.linear(rows[row], f"{prefix}hidden_projection")
            scores = values + self.tensors[f"{prefix}successor_codebook"][ids] @ context
            return torch.full_like(logits, -torch.inf).scatter(0, ids, scores)
        name = "markov_head.markov_w1.weight"
        if name not in self.tensors:
            return logits
        embedded = self.tensors[name][tokens]  # before the rows from `first` on
        kind = self.block["markov_head_type"]
        mixed = embedded[-1]
        if kind == "gated":
            joined = torch.cat((rows[row], mixed))
            mixed = self.linear(joined, "markov_head.gate_proj").sigmoid() * mixed
        elif kind == "rnn":
            state = torch.zeros_like(mixed)
            previous = torch.cat((embedded[:1], embedded)) if self.first else embedded
            for token, hidden in zip(previous, rows, strict=False):
                joined = self.linear(torch.cat((state, token, hidden)), "markov_head.joint_proj")
                gate, candidate, output = joined.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                mixed = output.tanh()
        return logits + self.linear(mixed, "markov_head.markov_w2")


class PublishedBlock(PlainBlock):
    """A drafter run by the package `dflash`, with a target run by `transformers`, in float64."""

    def __init__(self, target: Path, drafter: Path) -> None:
        from dflash.model import DFlash2DraftModel, DFlashDraftModel
        from transformers import AutoModelForCausalLM

        super().__init__(target, drafter)
        self.model = AutoModelForCausalLM.from_pretrained(target, **LIBRARY_OPTIONS).eval()
        build = DFlash2DraftModel if "selector_top_k" in self.block else DFlashDraftModel
        loaded = build.from_pretrained(drafter, dtype=torch.float64)
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

    @torch.inference_mode()
    def refined(self, logits: Tensor, rows: Tensor, tokens: list[int], row: int) -> Tensor:
        """Return the logits [V] of a row: of a DFlash 2 only its choice's, which is made at once."""
        if "selector_top_k" not in self.block:
            return logits
        if len(tokens) == 1:
            anchor = torch.tensor(tokens)
            head = self.model.lm_head
            self.path = self.drafter.propose(rows[None, 1:], anchor, head, 0.0)[0][0].tolist()
        chosen = torch.zeros_like(logits)
        chosen[self.path[row - 1]] = 1.0
        return chosen

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` greedy tokens of the package's own loop after a prompt."""
        ids: Tensor = self.drafter.spec_generate(
            self.model, torch.tensor([list(prompt)]), max_new_tokens=count, stop_token_ids=None
        )
        return ids[0, len(prompt) :].tolist()


class PublishedSpeculator(PublishedBlock):
    """A drafter run by the package `speculators`, with a target run by `transformers`, in float64."""

    def __init__(self, target: Path, drafter: Path) -> None:
        PlainBlock.__init__(self, target, drafter)
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, **LIBRARY_OPTIONS).eval()
        kinds = {
            "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
            "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
            "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        }
        read_config, build = kinds[self.block["speculators_model_type"]]
        config = read_config(**json.loads((drafter / "config.json").read_text()))
        config.transformer_layer_config._attn_implementation = "eager"
        self.drafter = build(config).double().eval()
        names = self.drafter.state_dict().keys()
        tensors = {name: tensor for name, tensor in self.stored.items() if name in names}
        unread = self.stored.keys() - tensors.keys()
        assert not unread, unread
        tensors["embed_tokens.weight"] = self.target.embedding
        tensors.setdefault("lm_head.weight", self.target.head)
        self.drafter.load_state_dict(tensors, strict=False)

    @torch.inference_mode()
    def rows(self, tokens: list[int], states: Tensor) -> Tensor:
        """Return the normed outputs [B, H] of the block behind all but the last of `tokens`."""
        start = len(tokens) - 1
        length = start + 1 + self.block_size
        ids = torch.tensor([[*tokens, *[0] * self.block_size]])
        mask = torch.zeros(1, length)
        mask[0, start] = 1
        padding = torch.zeros(length - start, states.shape[1], dtype=states.dtype)
        hidden, *_ = self.drafter._backbone_forward(
            torch.cat((states[:start], padding))[None],
            ids,
            mask,
            torch.zeros(1, length, self.target.embedding.shape[1], dtype=torch.float64),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        output: Tensor = hidden[0]
        return output

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [B, V] of normed rows."""
        logits: Tensor = self.drafter.lm_head(rows)
        return logits

    @torch.inference_mode()
    def refined(self, logits: Tensor, rows: Tensor, tokens: list[int], row: int) -> Tensor:
        """Return the logits [V] of a row, whose block's tokens up to its own are known."""
        if "selector_top_k" in self.block:
            ids, scores = self.drafter.candidate_selector.select(
                logits, rows[row], torch.tensor(tokens[-1])
            )
            return torch.full_like(logits, -torch.inf).scatter(0, ids, scores)
        if getattr(self.drafter, "markov_head", None) is None:
            return logits
        previous = [*tokens[:1] * self.first, *tokens]  # as the training's code shifts them
        bias = self.drafter.markov_head.block_bias(
            prev_token_ids=torch.tensor([previous]), hidden_states=rows[None, : len(previous)]
        )
        return logits + bias[0, row]
