"""Write a tiny checkpoint with an MTP head, in the names of the published families.

Two kinds. A `random` head: all of its tensors matter, so that any error in its conventions changes
its drafts. A `copy` of the target's first layer that reads mostly the token: it often agrees with a
target whose later layers have a small gain, at every depth, so that runs of drafts are accepted and
others rejected.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes.tiny import (
    EMBEDDING_STD,
    VARIANTS,
    Tensors,
    draw_normal,
    write_tensors,
    write_tiny,
)
from tests.recipes.tiny_dense import FAMILIES, write_dense

ModuleNames = tuple[str, str, str, str | None, str, bool]
"""Names of a module: embedding norm, hidden norm, projection, final norm, the layer's prefix; and
True if the hidden state comes first. {i} counts modules, {l} layers after the target's."""


def name_module(
    stem: str, *names: str | None, final: str = "final_layernorm", first: bool = False
) -> ModuleNames:
    """Return four names below a stem, which is the layer's prefix unless a fifth name is."""
    filled = [*names, *("enorm", "hnorm", "eh_proj", final, stem)[len(names) :]]
    token, hidden, projection, last = (name and stem + name for name in filled[:4])
    return token, hidden, projection, last, filled[4], first


ERNIE = (f"mtp_{name}.{{i}}" for name in ("emb_norm", "hidden_norm", "linear_proj"))
MODULE_NAMES: dict[str, ModuleNames] = {
    "deepseek": name_module("model.layers.{l}.", final="shared_head.norm"),
    "glm4": name_module("model.layers.{l}.", final="shared_head.norm"),
    "mimo": name_module(
        "model.mtp_layers.{i}.", "token_layernorm", "hidden_layernorm", "input_proj", first=True
    ),
    "mimo_v2": name_module("model.mtp.layers.{i}."),
    "step3": name_module("model.layers.{l}.", final="transformer.shared_head.norm"),
    "ernie": name_module("model.", *ERNIE, None, "model.mtp_block.{i}."),
    "nemotron_h": name_module(
        "mtp.layers.", "0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"
    ),
    "mtp": name_module(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp.layers.{i}."
    ),
}


def soft_gain(layer: int) -> float:
    """Return the gain of a target's layer that its first layer's copy can follow."""
    return 0.06 if layer == 0 else 0.012


def write_tiny_mtp(
    folder: Path,
    *,
    family: str = "deepseek",
    variant: str = "qwen3",
    modules: int = 1,
    kind: str = "random",
    hidden_share: float = 0.25,
    **options: Any,
) -> Path:
    """Write a variant of a tiny checkpoint (see `write_tiny`) with an MTP head; return its folder.

    hidden_share: the gain of the hidden state relative to the token's in the projection of a
    `copy`.
    """
    gains = {"residual_gain": soft_gain} if kind == "copy" else {}
    options = {
        **gains,
        "layers": 3,
        **VARIANTS.get(variant, {"layers": 4}),
        "tie": False,
        **options,
    }
    shards = options.pop("shards", 1)
    folder = (
        write_dense(folder, variant, **options)
        if variant in FAMILIES
        else write_tiny(folder, **options)
    )
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for module in range(modules):
        tensors |= module_tensors(
            target=tensors,
            config=config,
            family=family,
            module=module,
            kind=kind,
            share=hidden_share,
        )
    if shards > 1:
        (folder / "model.safetensors").unlink()
    write_tensors(folder, {name: tensor.clone() for name, tensor in tensors.items()}, shards)
    return folder


def select_below(tensors: Tensors, stem: str) -> Tensors:
    """Return the tensors whose names begin with a stem, by the remaining name."""
    return {name.removeprefix(stem): t for name, t in tensors.items() if name.startswith(stem)}


def module_tensors(
    target: Tensors, config: dict[str, Any], family: str, module: int, kind: str, share: float
) -> Tensors:
    """Return one module's tensors under their full names."""
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    token_norm, hidden_norm, projection, final_norm, layer, hidden_first = MODULE_NAMES[family]
    numbers = {"i": module, "l": layers + module}

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        return draw_normal(f"{kind}/{family}/{module}/{name}", shape, std, mean)

    # A module's layer is like the target's last one, with the first one's tensors, whose gain is large.
    is_sliding = family in ("mimo_v2", "step3")
    inside = select_below(target, f"model.layers.{2 if is_sliding else layers - 1}.")
    first_layer = select_below(target, "model.layers.0.").items()
    inside |= {
        name: t for name, t in first_layer if name in inside and inside[name].shape == t.shape
    }
    if is_sliding:  # attention as in a layer with a sliding window, the MLP as in the first
        inside = {
            n: t for n, t in inside.items() if not n.startswith(("mlp.", "moe.", "share_expert."))
        }
        inside |= {
            f"mlp.{name}": t for name, t in select_below(target, "model.layers.0.mlp.").items()
        }
    if family == "nemotron_h":  # a layer of attention, then one of experts
        blocks = (select_below(target, f"backbone.layers.{number}.") for number in (1, layers - 1))
        inside = {f"{n}.{name}": t for n, block in enumerate(blocks) for name, t in block.items()}
    if family == "mimo_v2":
        inside["pre_mlp_layernorm.weight"] = inside.pop("post_attention_layernorm.weight")
    if kind == "random":
        inside = {
            name: draw(name, tuple(t.shape), 1.5 / math.sqrt(t.shape[-1]))
            if t.dim() == 2 and "e_score" not in name
            else t + draw(name, tuple(t.shape), 0.05)
            for name, t in inside.items()
        }
        halves = [
            draw(side, (hidden, hidden), 1.0 / math.sqrt(hidden)) for side in ("token", "hidden")
        ]
    else:
        noise = draw("hidden", (hidden, hidden), share * EMBEDDING_STD / math.sqrt(hidden))
        halves = [EMBEDDING_STD * torch.eye(hidden), noise]
    final = target["backbone.norm_f.weight" if family == "nemotron_h" else "model.norm.weight"]
    tensors = {
        f"{token_norm}.weight": draw("enorm", (hidden,), 0.1 if kind == "random" else 0.0, 1.0),
        f"{hidden_norm}.weight": draw("hnorm", (hidden,), 0.1, 1.0),
        f"{projection}.weight": torch.cat(halves[::-1] if hidden_first else halves, dim=1),
        **{layer + name: tensor for name, tensor in inside.items()},
    }
    if final_norm is not None:
        tensors[f"{final_norm}.weight"] = final + draw("norm", (hidden,), 0.1) * (kind == "random")
    dtype = final.dtype
    return {name.format(**numbers): tensor.to(dtype) for name, tensor in tensors.items()}
