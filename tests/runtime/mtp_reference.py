"""Plain MTP drafters to compare with: no cache, every row computed anew, in float64.

Written from the published forward passes, in rows: row P of module m is made of token P + m + 1 and
the state of row P, at rotary position P. Import nothing of `spd`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes.tiny import write_json, write_tensors
from tests.recipes.tiny_mtp import MODULE_NAMES

STATE_FIRST = ("mimo",)
"""Families whose projection reads the state before the token."""
MASKS_FIRST = ("deepseek", "glm4", "mimo", "ernie")
"""Families that mask the first embedding."""
RECYCLES_UNNORMED = ("glm4", "ernie")
"""Families whose next input state is the layer's output without a norm."""
ZERO_CENTRED_NORMS = ("step3", "mtp")
"""Families whose scales of norms are stored minus 1; of "mtp" the hybrids."""
LIMITS = ("swiglu_limits", "swiglu_limits_shared")
LIBRARY_OPTIONS: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
"""Options of the library's models; those with experts have `experts_implementation`, too."""
STEP_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "model_type": "step3p5_vision",
}


def choose_token(logits: Tensor) -> tuple[int, float]:
    """Return the id of the largest logit, and its distance to the second largest."""
    best = logits.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])


def load_float64(folder: Path) -> dict[str, Tensor]:
    """Return a folder's tensors in float64."""
    return {
        name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()
    }


class PlainDrafter(Protocol):
    """The interface of references: the target's states of a text, and drafts after a part of it."""

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the target's states of a text."""
        ...

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice."""
        ...


class PlainLayers:
    """The pre-norm decoder layers of a Llama or Qwen3 checkpoint, run over full texts."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.tensors = tensors
        self.epsilon = self.config["rms_norm_eps"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
            * self.tensors[f"{name}.weight"]
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))
        return x @ self.tensors[f"{name}.weight"].T + bias

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [T, heads, D] rotated, first half against second half."""
        size = x.shape[-1]
        inverse = self.config["rope_theta"] ** (
            -torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        angles = (positions[:, None] * inverse)[:, None]
        first, second = x.chunk(2, dim=-1)
        rotated_halves = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat(rotated_halves, dim=-1)

    def attention(self, y: Tensor, prefix: str) -> Tensor:
        """Return the causal attention of normed rows y at positions from 0 on."""
        heads = self.config["num_attention_heads"]
        kv_heads = self.config["num_key_value_heads"]
        rows = len(y)
        positions = torch.arange(len(y), dtype=torch.float64)
        q, k, v = (
            self.linear(y, f"{prefix}self_attn.{name}_proj").view(rows, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q = self.norm(q, f"{prefix}self_attn.q_norm")
            k = self.norm(k, f"{prefix}self_attn.k_norm")
        q = self.rotated(q, positions)
        k = self.rotated(k, positions)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores + torch.full((rows, rows), -torch.inf, dtype=y.dtype).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
        return self.linear(mixed, f"{prefix}self_attn.o_proj")

    def mlp(self, y: Tensor, prefix: str) -> Tensor:
        """Return the gated network's result for normed rows y."""
        gate = self.linear(y, f"{prefix}mlp.gate_proj")
        up = self.linear(y, f"{prefix}mlp.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}mlp.down_proj")

    def layer(self, x: Tensor, prefix: str) -> Tensor:
        """Return a decoder layer's output for rows [T, H]."""
        x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), prefix)
        return x + self.mlp(self.norm(x, f"{prefix}post_attention_layernorm"), prefix)


class PlainTarget(PlainLayers):
    """A tiny Llama or Qwen3 checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(json.loads((folder / "config.json").read_text()), load_float64(folder))
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.head = (
            self.embedding if self.config["tie_word_embeddings"] else self.tensors["lm_head.weight"]
        )

    def streams(self, tokens: list[int]) -> list[Tensor]:
        """Return the residual streams [T, H] that enter the layers, and the one after the last."""
        streams = [self.embedding[tokens]]
        for layer in range(self.config["num_hidden_layers"]):
            streams.append(self.layer(streams[-1], f"model.layers.{layer}."))
        return streams

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the states [T, H] after the final norm."""
        return self.norm(self.streams(tokens)[-1], "model.norm")


class PlainMtp(PlainTarget):
    """A tiny Llama or Qwen3 checkpoint with an MTP head."""

    def __init__(self, folder: Path, family: str, modules: int) -> None:
        super().__init__(folder)
        self.family = family
        self.modules = modules

    def module(self, module: int, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (next states, logits) of rows 0 to len(tokens) - 1, with the states before them."""
        numbers = {"i": module, "l": self.config["num_hidden_layers"] + module}
        family = self.family
        names = (str(name or "").format(**numbers) for name in MODULE_NAMES[family][:5])
        token_norm, hidden_norm, projection, final_norm, prefix = names
        token = self.embedding[tokens].clone()
        if family in MASKS_FIRST:
            token[0] = 0
        normed_pair = [self.norm(token, token_norm), self.norm(states, hidden_norm)]
        x = self.linear(
            torch.cat(normed_pair[::-1] if family in STATE_FIRST else normed_pair, dim=-1),
            projection,
        )
        x = self.layer(x, prefix)
        normed = self.norm(x, final_norm) if final_norm else x
        return x if family in RECYCLES_UNNORMED else normed, normed @ self.head.T

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice."""
        drafts = list[int]()
        fed = list[int]()
        gap = float("inf")
        states = inputs = hidden[: len(tokens) - 1]
        for step in range(k):
            if step < self.modules:
                inputs = states  # of the module before
                fed = [*tokens, *drafts][step + 1 :]
            else:
                # The last module again: one more row, of its last draft and its last state.
                inputs = torch.cat((inputs, states[-1:]))
                fed = [*fed, drafts[-1]]
            states, logits = self.module(min(step, self.modules - 1), fed, inputs)
            best, near = choose_token(logits[-1])
            drafts = [*drafts, best]
            gap = min(gap, near)
        return drafts, gap


OUTSIDE_LAYER = (
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head",
    "embed_tokens",
    "final_layernorm",
    "transformer",
)
"""First parts of the names of a module's tensors that its layer has not."""


class LibraryMtp(PlainMtp):
    """A `PlainMtp` of `transformers`' layers: a module's layer is loaded as one more layer of the
    target.
    """

    def __init__(self, folder: Path, family: str, modules: int, scratch: Path) -> None:
        super().__init__(folder, family, modules)
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        layers = self.config["num_hidden_layers"]
        self.numbers = {
            MODULE_NAMES[family][4].format(i=m, l=layers + m): layers + m for m in range(modules)
        }
        layer_tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            prefix = next(filter(name.startswith, self.numbers), "")
            inner_name = name.removeprefix(prefix).replace(
                "pre_mlp_layernorm", "post_attention_layernorm"
            )
            if not prefix or inner_name.split(".")[0] not in OUTSIDE_LAYER:
                name = f"model.layers.{self.numbers[prefix]}.{inner_name}" if prefix else name
                layer_tensors[name] = tensor.contiguous()
        scratch.mkdir()
        write_tensors(scratch, layer_tensors)
        config = {
            **self.config,
            "num_hidden_layers": layers + modules,
            "num_nextn_predict_layers": 0,
        }
        if "layer_types" in self.config:
            kind = "full_attention" if family == "mtp" else "sliding_attention"
            config["layer_types"] = [*self.config["layer_types"], *[kind] * modules]
            config["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1), *["dense"] * modules]
        if family == "step3":
            padding = {
                "rope_theta": 200.0,
                "partial_rotary_factors": 1.0,
                **dict.fromkeys(LIMITS, 0.0),
            }
            config |= {
                key: [*self.config[key], *[value] * modules] for key, value in padding.items()
            }
            config = {
                "architectures": ["Step3p7ForConditionalGeneration"],
                "model_type": "step3p7",
                "text_config": config,
                "vision_config": STEP_VISION,
                "tie_word_embeddings": False,
            }
        for name, tensor in self.tensors.items() if family in ZERO_CENTRED_NORMS else ():
            if tensor.dim() == 1 and "norm" in name:  # also of those outside layers
                tensor += 1
        write_json(scratch / "config.json", config)
        auto_class = AutoModelForImageTextToText if family == "step3" else AutoModelForCausalLM
        model = auto_class.from_pretrained(
            scratch, **LIBRARY_OPTIONS, experts_implementation="eager"
        )
        self.model = getattr(model.eval().model, "language_model", model.model)

    @torch.inference_mode()
    def layer(self, x: Tensor, prefix: str) -> Tensor:
        """Return the output of a layer of the library's for rows x [T, H]."""
        rows = torch.arange(len(x))[None]
        number = self.numbers.get(prefix)
        number = int(prefix.split(".")[2]) if number is None else number
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        kinds = getattr(self.model.config, "layer_types", None)
        kind = [kinds[number]] if kinds is not None else []
        if kind == ["sliding_attention"]:
            mask += torch.full_like(mask, -torch.inf).tril(-self.model.config.sliding_window)
        attention_mask = None if kind == ["linear_attention"] else mask[None, None]
        arguments = {"attention_mask": attention_mask, "position_ids": rows}
        arguments["position_embeddings"] = self.model.rotary_emb(
            x[None], rows, *kind[self.family == "mtp" :]
        )
        output = self.model.layers[number](x[None], **arguments)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden[0] if hidden.dim() == 3 else hidden


class NemotronMtp(PlainMtp):
    """A `PlainMtp` of Nemotron-H, whose module is two of the library's layers, without positions."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_float64(folder)
        self.epsilon = self.config["layer_norm_epsilon"]
        self.family = "nemotron_h"
        self.modules = 1
        self.embedding = self.tensors["backbone.embeddings.weight"]
        self.head = self.tensors["lm_head.weight"]
        outside_layers = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        layer_tensors = {
            name.replace("mtp.", "backbone."): tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("backbone.layers.")
            and not {*name.split(".")[3:4]} & {*outside_layers}
        }
        scratch.mkdir()
        write_tensors(scratch, layer_tensors)
        config = {**self.config, "hybrid_override_pattern": "*E", "num_hidden_layers": 2}
        write_json(scratch / "config.json", config)
        self.model, blocks = (
            AutoModelForCausalLM.from_pretrained(
                path, **LIBRARY_OPTIONS, experts_implementation="eager"
            )
            .eval()
            .model
            for path in (folder, scratch)
        )
        self.blocks = blocks.layers

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the states [T, H] of the library's model."""
        hidden_states: Tensor = self.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden_states

    @torch.inference_mode()
    def layer(self, x: Tensor, prefix: str) -> Tensor:
        """Return the output of the module's two layers for rows x [T, H]."""
        mask = torch.full((1, 1, len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        stream = x[None]
        for block in self.blocks:
            stream = block(stream, attention_mask=mask)
        return stream[0]
