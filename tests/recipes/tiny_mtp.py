"""Give a tiny checkpoint an MTP head, in the names of the published families.

Two kinds. A `random` head: everything in it matters, so that any slip in its conventions changes what it
drafts. A `copy` of the target's first layer that reads mostly the token: in a target whose later layers
speak softly it often agrees, at every depth, so that runs of drafts are accepted and others rejected.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes.tiny import EMBEDDING_STD, VARIANTS, drawn, write_tensors, write_tiny
from tests.recipes.tiny_dense import FAMILIES, write_dense

DEEPSEEK = (
    "model.layers.{l}.enorm",
    "model.layers.{l}.hnorm",
    "model.layers.{l}.eh_proj",
    "model.layers.{l}.shared_head.norm",
    "model.layers.{l}.",
    False,
)
# What surrounds a module's layer: embedding norm, hidden norm, projection, final norm, the layer's prefix,
# and whether the hidden state comes first. {i} counts modules, {l} layers after the target's.
NAMES: dict[str, tuple[str, str, str, str | None, str, bool]] = {
    "deepseek": DEEPSEEK,
    "glm4": DEEPSEEK,
    "mimo": (
        "model.mtp_layers.{i}.token_layernorm",
        "model.mtp_layers.{i}.hidden_layernorm",
        "model.mtp_layers.{i}.input_proj",
        "model.mtp_layers.{i}.final_layernorm",
        "model.mtp_layers.{i}.",
        True,
    ),
    "mimo_v2": (
        "model.mtp.layers.{i}.enorm",
        "model.mtp.layers.{i}.hnorm",
        "model.mtp.layers.{i}.eh_proj",
        "model.mtp.layers.{i}.final_layernorm",
        "model.mtp.layers.{i}.",
        False,
    ),
    "step3": (*DEEPSEEK[:3], "model.layers.{l}.transformer.shared_head.norm", *DEEPSEEK[4:]),
    "ernie": (
        "model.mtp_emb_norm.{i}",
        "model.mtp_hidden_norm.{i}",
        "model.mtp_linear_proj.{i}",
        None,
        "model.mtp_block.{i}.",
        False,
    ),
    "nemotron_h": (
        *(f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")),
        "mtp.layers.1.final_layernorm",
        "mtp.layers.",
        False,
    ),
    "mtp": (
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
        "mtp.norm",
        "mtp.layers.{i}.",
        False,
    ),
}


def soft(layer: int) -> float:
    """The gain of a target that its first layer's copy can follow."""
    return 0.06 if layer == 0 else 0.012


def write_tiny_mtp(
    folder: Path,
    *,
    family: str = "deepseek",
    variant: str = "qwen3",
    modules: int = 1,
    kind: str = "random",
    hidden_share: float = 0.25,
    copies: str = "",
    **options: Any,
) -> Path:
    """Write a variant of a tiny checkpoint (see `write_tiny`) with an MTP head; returns its folder.

    hidden_share: how loud the hidden state is beside the token in the projection of a `copy`. copies:
    "same" adds copies of embedding and head to a deepseek head, "other" different ones.
    """
    options = {"layers": 3, **VARIANTS.get(variant, {"layers": 4}), "tie": False, **options}
    if kind == "copy":
        options = {"residual_gain": soft, **options}
    shards = options.pop("shards", 1)
    if variant in FAMILIES:
        write_dense(folder, variant, **options)
    else:
        write_tiny(folder, **options)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for module in range(modules):
        tensors |= module_tensors(tensors, config, family, module, kind, hidden_share)
        if copies:
            prefix = NAMES[family][4].format(l=config["num_hidden_layers"] + module, i=module)
            table, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
            head = table if head is None else head
            other = 1.0 if copies == "same" else -1.0
            tensors[prefix + "embed_tokens.weight"] = other * table
            tensors[prefix + "shared_head.head.weight"] = other * head
    if shards > 1:
        (folder / "model.safetensors").unlink()
    write_tensors(folder, {name: tensor.clone() for name, tensor in tensors.items()}, shards)
    return folder


def _alike(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.shape == other.shape


def module_tensors(
    target: dict[str, torch.Tensor],
    config: dict[str, Any],
    family: str,
    module: int,
    kind: str,
    hidden_share: float,
) -> dict[str, torch.Tensor]:
    """One module's tensors under their full names."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    token_norm, hidden_norm, projection, final_norm, layer, hidden_first = NAMES[family]
    place = {"i": module, "l": layers + module}

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        return drawn(f"{kind}/{family}/{module}/{name}", shape, std, mean)

    # A module's layer is like the target's last one; the loud first one is what is worth copying.
    inside: dict[str, torch.Tensor] = {}
    slides = family in ("mimo_v2", "step3")
    for source in (f"model.layers.{2 if slides else layers - 1}.", "model.layers.0."):
        found = {name.removeprefix(source): t for name, t in target.items() if name.startswith(source)}
        inside |= {name: t for name, t in found.items() if not inside or _alike(inside.get(name), t)}
    if slides:  # attention as in a layer that slides, the MLP as in the first
        inside = {n: t for n, t in inside.items() if not n.startswith(("mlp.", "moe.", "share_expert."))}
        first = "model.layers.0.mlp."
        inside |= {f"mlp.{n.removeprefix(first)}": t for n, t in target.items() if n.startswith(first)}
    if family == "nemotron_h":  # a layer that attends and one of experts, behind each other
        stems = "backbone.layers.1.", f"backbone.layers.{layers - 1}."
        inside = {
            f"{number}.{name.removeprefix(stem)}": t
            for number, stem in enumerate(stems)
            for name, t in target.items()
            if name.startswith(stem)
        }
    if family == "mimo_v2":
        inside["pre_mlp_layernorm.weight"] = inside.pop("post_attention_layernorm.weight")
    if kind == "random":
        inside = {
            name: draw(name, tuple(t.shape), 1.5 / math.sqrt(t.shape[-1]))
            if t.dim() == 2 and "e_score" not in name
            else t + draw(name, tuple(t.shape), 0.05)
            for name, t in inside.items()
        }
        halves = [draw(side, (hidden, hidden), 1.0 / math.sqrt(hidden)) for side in ("token", "hidden")]
    else:
        noise = draw("hidden", (hidden, hidden), hidden_share * EMBEDDING_STD / math.sqrt(hidden))
        halves = [EMBEDDING_STD * torch.eye(hidden), noise]
    final = target["backbone.norm_f.weight" if family == "nemotron_h" else "model.norm.weight"]
    found = {
        f"{token_norm}.weight": draw("enorm", (hidden,), 0.1 if kind == "random" else 0.0, 1.0),
        f"{hidden_norm}.weight": draw("hnorm", (hidden,), 0.1, 1.0),
        f"{projection}.weight": torch.cat(halves[::-1] if hidden_first else halves, dim=1),
        **{layer + name: tensor for name, tensor in inside.items()},
    }
    if final_norm is not None:
        found[f"{final_norm}.weight"] = final + draw("norm", (hidden,), 0.1) * (kind == "random")
    dtype = final.dtype
    return {name.format(**place): tensor.to(dtype) for name, tensor in found.items()}
