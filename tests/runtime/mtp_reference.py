"""Plain MTP drafters to compare with: no cache, every row computed anew, in float64.

Written from the published forward passes, in rows: row P of module m is made of token P + m + 1 and the
state of row P, at rotary position P. Import nothing of `spd`.
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

HIDDEN_FIRST = ("mimo",)
MASK_FIRST = ("deepseek", "glm4", "mimo", "ernie")
RECYCLE_RAW = ("glm4", "ernie")
"""Families whose projection reads the state first; that hide the first embedding; that skip a norm."""
AROUND_ZERO = ("step3", "mtp")
"""Families whose scales of norms are stored as their distance from 1; of "mtp" the hybrids."""
LIMITS = ("swiglu_limits", "swiglu_limits_shared")
HOW: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
"""The library's models; those with experts, too: `experts_implementation`."""
STEP_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "model_type": "step3p5_vision",
}


def chosen(logits: Tensor) -> tuple[int, float]:
    """The best id, and how near the second choice came."""
    best = logits.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()
    }


class PlainDrafter(Protocol):
    """What a reference shows to tests: the target's states of a text, and drafts after a part of it."""

    def hidden(self, tokens: list[int]) -> Tensor: ...

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]: ...


class PlainLayers:
    """The pre-norm decoder layers of a Llama or Qwen3 checkpoint, run over whole texts."""

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
        """x [T, heads, D] turned, first half against second half."""
        size = x.shape[-1]
        inverse = self.config["rope_theta"] ** (
            -torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        angles = (positions[:, None] * inverse)[:, None]
        first, second = x.chunk(2, dim=-1)
        turned = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat(turned, dim=-1)

    def attention(self, y: Tensor, prefix: str) -> Tensor:
        """What attention adds to rows at positions from 0 on, each seeing those before; y: normed rows."""
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
        """What the gated network adds; y: normed rows."""
        gate = self.linear(y, f"{prefix}mlp.gate_proj")
        up = self.linear(y, f"{prefix}mlp.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}mlp.down_proj")

    def layer(self, x: Tensor, prefix: str) -> Tensor:
        """One decoder layer over rows [T, H]."""
        x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), prefix)
        return x + self.mlp(self.norm(x, f"{prefix}post_attention_layernorm"), prefix)


class PlainTarget(PlainLayers):
    """A tiny Llama or Qwen3 checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(json.loads((folder / "config.json").read_text()), tensors_of(folder))
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.head = (
            self.embedding if self.config["tie_word_embeddings"] else self.tensors["lm_head.weight"]
        )

    def streams(self, tokens: list[int]) -> list[Tensor]:
        """The residual streams [T, H] that enter the layers, and the one after the last of them."""
        streams = [self.embedding[tokens]]
        for layer in range(self.config["num_hidden_layers"]):
            streams.append(self.layer(streams[-1], f"model.layers.{layer}."))
        return streams

    def hidden(self, tokens: list[int]) -> Tensor:
        """The states [T, H] after the final norm."""
        return self.norm(self.streams(tokens)[-1], "model.norm")


class PlainMtp(PlainTarget):
    """A tiny Llama or Qwen3 checkpoint with an MTP head."""

    def __init__(self, folder: Path, family: str, modules: int) -> None:
        super().__init__(folder)
        self.family = family
        self.modules = modules

    def module(self, module: int, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """(states that go on, logits) of rows 0 to len(tokens) - 1, with the states before them."""
        place = {"i": module, "l": self.config["num_hidden_layers"] + module}
        family = self.family
        names = (str(name or "").format(**place) for name in MODULE_NAMES[family][:5])
        token_norm, hidden_norm, projection, final_norm, prefix = names
        token = self.embedding[tokens].clone()
        if family in MASK_FIRST:
            token[0] = 0
        pair = [self.norm(token, token_norm), self.norm(states, hidden_norm)]
        x = self.linear(
            torch.cat(pair[::-1] if family in HIDDEN_FIRST else pair, dim=-1), projection
        )
        x = self.layer(x, prefix)
        shown = self.norm(x, final_norm) if final_norm else x
        return x if family in RECYCLE_RAW else shown, shown @ self.head.T

    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """The k greedy drafts after `tokens`, and how near the nearest second choice came."""
        drafts = list[int]()
        fed = list[int]()
        gap = float("inf")
        states = inputs = hidden[: len(tokens) - 1]
        for step in range(k):
            if step < self.modules:
                inputs = states  # each module reads the states that the one before it made
                fed = [*tokens, *drafts][step + 1 :]
            else:
                # The last module again: one row more, made of its own last draft and its own last state.
                inputs = torch.cat((inputs, states[-1:]))
                fed = [*fed, drafts[-1]]
            states, logits = self.module(min(step, self.modules - 1), fed, inputs)
            best, near = chosen(logits[-1])
            drafts = [*drafts, best]
            gap = min(gap, near)
        return drafts, gap


class LibraryMtp(PlainMtp):
    """The same with `transformers`' layers: a module's layer is loaded as one more layer of the target."""

    def __init__(self, folder: Path, family: str, modules: int, scratch: Path) -> None:
        super().__init__(folder, family, modules)
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        layers = self.config["num_hidden_layers"]
        self.numbers = {
            MODULE_NAMES[family][4].format(i=m, l=layers + m): layers + m for m in range(modules)
        }
        outer = (
            "enorm",
            "hnorm",
            "eh_proj",
            "shared_head",
            "embed_tokens",
            "final_layernorm",
            "transformer",
        )
        kept = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            prefix = next(filter(name.startswith, self.numbers), "")
            inside = name.removeprefix(prefix).replace(
                "pre_mlp_layernorm", "post_attention_layernorm"
            )
            if not prefix or inside.split(".")[0] not in outer:
                name = f"model.layers.{self.numbers[prefix]}.{inside}" if prefix else name
                kept[name] = tensor.contiguous()
        scratch.mkdir()
        write_tensors(scratch, kept)
        longer = {
            **self.config,
            "num_hidden_layers": layers + modules,
            "num_nextn_predict_layers": 0,
        }
        if "layer_types" in self.config:
            kind = "full_attention" if family == "mtp" else "sliding_attention"
            longer["layer_types"] = [*self.config["layer_types"], *[kind] * modules]
            longer["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1), *["dense"] * modules]
        if family == "step3":
            padding = {
                "rope_theta": 200.0,
                "partial_rotary_factors": 1.0,
                **dict.fromkeys(LIMITS, 0.0),
            }
            longer |= {key: [*self.config[key], *[each] * modules] for key, each in padding.items()}
            longer = {
                "architectures": ["Step3p7ForConditionalGeneration"],
                "model_type": "step3p7",
                "text_config": longer,
                "vision_config": STEP_VISION,
                "tie_word_embeddings": False,
            }
        for name, tensor in self.tensors.items() if family in AROUND_ZERO else ():
            if tensor.dim() == 1 and "norm" in name:  # also of those outside layers
                tensor += 1
        write_json(scratch / "config.json", longer)
        made = AutoModelForImageTextToText if family == "step3" else AutoModelForCausalLM
        model = made.from_pretrained(scratch, **HOW, experts_implementation="eager")
        self.model = getattr(model.eval().model, "language_model", model.model)

    @torch.inference_mode()
    def layer(self, x: Tensor, prefix: str) -> Tensor:
        rows = torch.arange(len(x))[None]
        number = self.numbers.get(prefix)
        number = int(prefix.split(".")[2]) if number is None else number
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        kinds = getattr(self.model.config, "layer_types", None)
        kind = [kinds[number]] if kinds is not None else []
        if kind == ["sliding_attention"]:
            mask += torch.full_like(mask, -torch.inf).tril(-self.model.config.sliding_window)
        seen = None if kind == ["linear_attention"] else mask[None, None]
        given = {"attention_mask": seen, "position_ids": rows}
        given["position_embeddings"] = self.model.rotary_emb(
            x[None], rows, *kind[self.family == "mtp" :]
        )
        out = self.model.layers[number](x[None], **given)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found[0] if found.dim() == 3 else found


class NemotronMtp(PlainMtp):
    """The same for Nemotron-H, whose module is two of the library's layers, which know no positions."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = tensors_of(folder)
        self.epsilon = self.config["layer_norm_epsilon"]
        self.family = "nemotron_h"
        self.modules = 1
        self.embedding = self.tensors["backbone.embeddings.weight"]
        self.head = self.tensors["lm_head.weight"]
        around = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        kept = {
            name.replace("mtp.", "backbone."): tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("backbone.layers.") and not {*name.split(".")[3:4]} & {*around}
        }
        scratch.mkdir()
        write_tensors(scratch, kept)
        config = {**self.config, "hybrid_override_pattern": "*E", "num_hidden_layers": 2}
        write_json(scratch / "config.json", config)
        self.model, blocks = (
            AutoModelForCausalLM.from_pretrained(each, **HOW, experts_implementation="eager")
            .eval()
            .model
            for each in (folder, scratch)
        )
        self.blocks = blocks.layers

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        found: Tensor = self.model(torch.tensor([tokens])).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def layer(self, x: Tensor, prefix: str) -> Tensor:
        mask = torch.full((1, 1, len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        stream = x[None]
        for block in self.blocks:
            stream = block(stream, attention_mask=mask)
        return stream[0]
