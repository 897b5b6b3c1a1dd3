"""Changes of a tiny Llama's or Qwen3's tensors into those of another family.

Plain torch; imports nothing from `spd`. Further tensors of a family are drawn here, seeded by their
names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.recipes.tiny import Tensors, draw_normal

GATE_UP = "mlp.gate_up_proj"
QKV = "self_attn.qkv_proj"
FUSED_PARTS = {
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}


def draw(
    tensors: Tensors, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0
) -> None:
    """Draw a tensor from its name and put it among others."""
    tensors[name] = draw_normal(name, shape, std, mean)


def draw_mlp(tensors: Tensors, stem: str, width: int, hidden: int, strength: float = 1.2) -> None:
    """Draw a gated MLP of a width and put it among other tensors."""
    for part, shape in (
        ("gate", (width, hidden)),
        ("up", (width, hidden)),
        ("down", (hidden, width)),
    ):
        draw(tensors, f"{stem}{part}_proj.weight", shape, strength / shape[1] ** 0.5)


def find_stems(tensors: Tensors, suffix: str) -> list[str]:
    """Return the beginnings of all names that end in a suffix."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def layer_index(name: str) -> int:
    """Return the layer in a tensor's name."""
    return int(name.split(".")[2])


def pop_experts(tensors: Tensors, stem: str) -> Tensors:
    """Remove a layer's experts and return their gate, up and down matrices, stacked."""
    count = len(tensors[f"{stem}mlp.gate.weight"])
    return {
        part: torch.stack(
            [tensors.pop(f"{stem}mlp.experts.{e}.{part}_proj.weight") for e in range(count)]
        )
        for part in ("gate", "up", "down")
    }


def without_output_bias(tensors: Tensors) -> Tensors:
    """Remove the biases of attention's outputs."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}


def with_zero_centered_norms(tensors: Tensors) -> Tensors:
    """Store the scales of norms as their distance from 1."""
    return {name: t - 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}


def with_gemma_norms(tensors: Tensors) -> Tensors:
    """Make four norms in a layer, scales stored as their distance from 1.

    Those after a block are small.
    """
    changed = with_zero_centered_norms(tensors)
    for stem in find_stems(tensors, "post_attention_layernorm.weight"):
        scale = tensors[f"{stem}post_attention_layernorm.weight"]
        changed[f"{stem}pre_feedforward_layernorm.weight"] = scale - 1
        for number, norm in enumerate(("post_attention_layernorm", "post_feedforward_layernorm")):
            changed[f"{stem}{norm}.weight"] = scale.roll(number + 1) * 0.4 - 1
    return changed


def with_separate_gates(tensors: Tensors) -> Tensors:
    """Make Muse-Glimmer's: Gemma's norms but for the last, and gates beside queries."""
    changed = {**with_gemma_norms(tensors), "model.norm.weight": tensors["model.norm.weight"]}
    for stem in find_stems(tensors, "self_attn.q_proj.weight"):
        shape = tuple(tensors[f"{stem}self_attn.q_proj.weight"].shape)
        draw(changed, f"{stem}self_attn.gate_proj.weight", shape, 1.5 / shape[1] ** 0.5)
    return changed


def with_fused_matrices(tensors: Tensors, *fused_names: str) -> Tensors:
    """Fuse queries, keys and values, and gate and up, in one tensor each.

    Or only the named ones.
    """
    changed = dict(tensors)
    for name in tensors:
        for fused_name in fused_names or FUSED_PARTS:
            first, *other_parts = FUSED_PARTS[fused_name]
            if f"{first}." in name:
                names = [name, *(name.replace(first, other) for other in other_parts)]
                changed[name.replace(first, fused_name)] = torch.cat(
                    [changed.pop(part) for part in names]
                )
    return changed


def with_renamed_parts(**names: str) -> Callable[[Tensors], Tensors]:
    """Return a change of parts of names to others; the part `none` removes the tensor."""

    def change(tensors: Tensors) -> Tensors:
        """Rename or remove tensors."""
        changed: Tensors = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(f".{old}.", f".{new}.")
            if ".none." not in name:
                changed[name] = tensor
        return changed

    return change


without_head_norms = with_renamed_parts(q_norm="none", k_norm="none")
MIXTRAL_MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
as_mixtral = with_renamed_parts(mlp="block_sparse_moe", q_norm="none", k_norm="none", **MIXTRAL_MLP)


def with_only_post_norms(tensors: Tensors) -> Tensors:
    """Make two norms in a layer, both after a block."""
    names = {"post_attention_layernorm": "post_feedforward_layernorm"}
    changed = with_renamed_parts(**names, input_layernorm="post_attention_layernorm")(tensors)
    return {name: t * 0.4 if "layernorm" in name else t for name, t in changed.items()}


def with_full_width_norms(tensors: Tensors) -> Tensors:
    """Make two norms after blocks, and one norm over all heads of queries, and of keys."""
    return with_only_post_norms(tensors) | _draw_full_width_norms(tensors)


def _draw_full_width_norms(tensors: Tensors) -> Tensors:
    """Draw norms over all heads of queries, and of keys."""
    rows = {
        name: len(t)
        for name, t in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    }
    names = {name.replace("_proj", "_norm"): (length,) for name, length in rows.items()}
    return {name: draw_normal(name, shape, 0.2, 1.4) for name, shape in names.items()}


def with_routed_norms(tensors: Tensors) -> Tensors:
    """Make MiniMax-M2's: norms over all heads, Mixtral's names, router corrections."""
    changed = as_mixtral(tensors) | _draw_full_width_norms(tensors)
    for stem in find_stems(changed, "block_sparse_moe.gate.weight"):
        block = f"{stem}block_sparse_moe."
        draw(
            changed,
            f"{block}e_score_correction_bias",
            changed[f"{block}gate.weight"].shape[:1],
            0.1,
        )
    return changed


def with_glm4_norms(tensors: Tensors) -> Tensors:
    """Make four norms in a layer; gate and up in one tensor."""
    changed = dict(tensors)
    for stem in find_stems(tensors, "input_layernorm.weight"):
        for number, norm in enumerate(("post_self_attn_layernorm", "post_mlp_layernorm")):
            scale = tensors[f"{stem}input_layernorm.weight"].roll(number + 1)
            changed[f"{stem}{norm}.weight"] = scale * 0.4
    return with_fused_mlp(changed)


def with_fused_mlp(tensors: Tensors) -> Tensors:
    """Make gate and up one tensor, with biases of queries, keys and values only."""
    return with_fused_matrices(without_output_bias(tensors), GATE_UP)


def with_shared_expert(tensors: Tensors) -> Tensors:
    """Make biases of queries, keys and values, no norms of heads, a gated shared expert."""
    changed = without_head_norms(without_output_bias(tensors))
    for stem in find_stems(changed, "mlp.gate.weight"):
        hidden = changed[f"{stem}mlp.gate.weight"].shape[1]
        changed[f"{stem}mlp.shared_expert_gate.weight"] = draw_normal(
            f"{stem}mlp.sg", (1, hidden), 0.2
        )
        draw_mlp(changed, f"{stem}mlp.shared_expert.", 48, hidden)
    return changed


def with_shared_mlp(tensors: Tensors) -> Tensors:
    """Make HunYuan-MoE's: its names of norms and of the router, and an expert for all rows."""
    changed = with_renamed_parts(q_norm="query_layernorm", k_norm="key_layernorm")(tensors)
    for stem in find_stems(changed, "mlp.gate.weight"):
        changed[f"{stem}mlp.gate.wg.weight"] = router = changed.pop(f"{stem}mlp.gate.weight")
        draw_mlp(changed, f"{stem}mlp.shared_mlp.", 32, router.shape[1])
    return changed


def with_narrow_values(tensors: Tensors, value: int = 10, kinds: str = "FSSS") -> Tensors:
    """Make MiMo-V2's: sliding layers with sinks and twice the key heads, narrow values."""
    changed = without_head_norms(tensors)
    for stem in find_stems(changed, "k_proj.weight"):
        rows, hidden = changed[f"{stem}k_proj.weight"].shape
        slides = kinds[layer_index(stem)] == "S"
        keys = rows // 16 * (1 + slides)
        heads = changed[f"{stem}q_proj.weight"].shape[0] // 16
        gain = float(changed[f"{stem}o_proj.weight"].std()) * (16 / value) ** 0.5
        draw(changed, f"{stem}k_proj.weight", (keys * 16, hidden), 1.4 / hidden**0.5)
        draw(changed, f"{stem}v_proj.weight", (keys * value, hidden), 1 / hidden**0.5)
        draw(changed, f"{stem}o_proj.weight", (hidden, heads * value), gain)
        if slides:
            changed[f"{stem}attention_sink_bias"] = draw_normal(f"{stem}sinks", (heads,), 1.0, 1.0)
    for stem in find_stems(changed, "mlp.gate.weight"):
        shape = changed[f"{stem}mlp.gate.weight"].shape[:1]
        draw(changed, f"{stem}mlp.gate.e_score_correction_bias", shape, 0.1)
    return changed


def with_head_gates(tensors: Tensors, kinds: str = "FSSF") -> Tensors:
    """Make Step-3.7's: a gate for each head; six heads in sliding layers, not four.

    Norms around 0.
    """
    changed = with_zero_centered_norms(tensors)
    for stem in find_stems(changed, "q_proj.weight"):
        hidden = changed[f"{stem}q_proj.weight"].shape[1]
        heads = 6 if kinds[layer_index(stem)] == "S" else 4
        gain = float(changed[f"{stem}o_proj.weight"].std()) * (4 / heads) ** 0.5
        draw(changed, f"{stem}q_proj.weight", (heads * 16, hidden), hidden**-0.5)
        draw(changed, f"{stem}o_proj.weight", (hidden, heads * 16), gain)
        draw(changed, f"{stem}g_proj.weight", (heads, hidden), 2 * hidden**-0.5)
    for stem in find_stems(changed, "mlp.gate.weight"):
        count, hidden = changed[f"{stem}mlp.gate.weight"].shape
        gain = float(changed[f"{stem}mlp.experts.0.down_proj.weight"].std())
        changed |= {
            f"{stem}moe.{part}_proj.weight": experts
            for part, experts in pop_experts(changed, stem).items()
        }
        changed[f"{stem}moe.gate.weight"] = changed.pop(f"{stem}mlp.gate.weight")
        changed[f"{stem}moe.router_bias"] = draw_normal(f"{stem}bias", (count,), 0.1)
        draw_mlp(changed, f"{stem}share_expert.", 48, hidden)
        draw(changed, f"{stem}share_expert.down_proj.weight", (hidden, 48), gain)
    return changed


def with_packed_experts(tensors: Tensors) -> Tensors:
    """Make all experts two tensors, under Granite's names."""
    changed = without_head_norms(tensors)
    for stem in find_stems(changed, "mlp.gate.weight"):
        experts = pop_experts(changed, stem)
        block = f"{stem}block_sparse_moe."
        changed[f"{block}router.layer.weight"] = changed.pop(f"{stem}mlp.gate.weight")
        changed[f"{block}input_linear.weight"] = torch.cat((experts["gate"], experts["up"]), 1)
        changed[f"{block}output_linear.weight"] = experts["down"]
    return changed


def with_sinks(tensors: Tensors) -> Tensors:
    """Make gpt-oss's: sinks, all biases, experts stacked inputs first, gate and up interleaved."""
    changed = without_head_norms(tensors)
    for stem in find_stems(changed, "mlp.gate.weight"):
        experts = pop_experts(changed, stem)
        router = changed.pop(f"{stem}mlp.gate.weight")
        block = f"{stem}mlp."
        gate_up = torch.stack((experts["gate"] * 2, experts["up"] * 2), 2).flatten(1, 2)
        changed[f"{block}router.weight"] = router
        changed[f"{block}router.bias"] = draw_normal(f"{stem}router.bias", (len(router),), 0.5)
        for part, matrices in (("gate_up", gate_up), ("down", experts["down"])):
            name = f"{block}experts.{part}"
            changed[f"{name}_proj"] = matrices.mT.contiguous()
            changed[f"{name}_proj_bias"] = draw_normal(name, tuple(matrices.shape[:2]), 0.3)
        changed[f"{stem}self_attn.sinks"] = draw_normal(f"{stem}sinks", (4,), 1.0, 1.0)
        changed[f"{stem}self_attn.o_proj.bias"] = draw_normal(f"{stem}o", (router.shape[1],), 0.1)
    return changed


def with_layer_embeddings(tensors: Tensors, sparse: bool = False, width: int = 12) -> Tensors:
    """Make Gemma 4's: every second layer wider, the last two share keys, layer embeddings.

    width: of a token's embedding in each layer.
    """
    changed = {
        n: t + 1 if n.endswith("norm.weight") else t for n, t in with_gemma_norms(tensors).items()
    }
    hidden = 64
    experts = 8
    put = partial(draw, changed)
    for layer in range(4):
        stem = f"model.layers.{layer}."
        wide = bool(layer % 2)
        shares = layer > 1
        size = 32 if wide else 16
        attention = f"{stem}self_attn."
        if wide:
            for name, rows in (("q", 4), ("k", 1), ("v", 1)):
                put(f"{attention}{name}_proj.weight", (rows * size, hidden), hidden**-0.5)
            put(f"{attention}o_proj.weight", (hidden, 4 * size), 1.5 / (4 * size) ** 0.5)
            put(f"{attention}k_norm.weight", (size,), 0.2, 1.4)
        put(f"{attention}q_norm.weight", (size,), 0.1, 1.4 * size**-0.5)
        for name in (
            *(("k_proj", "v_proj", "k_norm") if shares else ()),
            *(("v_proj",) if wide else ()),
        ):
            changed.pop(f"{attention}{name}.weight", None)
        if shares:
            draw_mlp(tensors=changed, stem=f"{stem}mlp.", width=256, hidden=hidden, strength=1.4)
        put(f"{stem}layer_scalar", (1,), 0.05, 0.9)
        put(f"{stem}per_layer_input_gate.weight", (width, hidden), 0.2)
        put(f"{stem}per_layer_projection.weight", (hidden, width), 0.4)
        put(f"{stem}post_per_layer_input_norm.weight", (hidden,), 0.05, 0.4)
        if sparse:
            put(f"{stem}router.scale", (hidden,), 0.1, 1.0)
            put(f"{stem}router.proj.weight", (experts, hidden), 1.5)
            put(f"{stem}router.per_expert_scale", (experts,), 0.2, 1.0)
            put(f"{stem}experts.gate_up_proj", (experts, 64, hidden), 1.2 / hidden**0.5)
            put(f"{stem}experts.down_proj", (experts, hidden, 32), 1.5 / 32**0.5)
            for name in (
                "pre_feedforward_layernorm_2",
                *(f"post_feedforward_layernorm_{n}" for n in (1, 2)),
            ):
                put(f"{stem}{name}.weight", (hidden,), 0.1, 0.8)
    put("model.embed_tokens_per_layer.weight", (320, 4 * width), 0.3)
    put("model.per_layer_model_projection.weight", (4 * width, hidden), 2.0)
    put("model.per_layer_projection_norm.weight", (width,), 0.1, 1.0)
    return changed


def with_convolutions(tensors: Tensors) -> Tensors:
    """Make LFM2's: two of three layers are convolutions; norms and projections under its names.

    Scores of all experts are small for some tokens: the constant that is added to their sum
    matters.
    """
    names = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
    }
    changed = with_renamed_parts(**names, **MIXTRAL_MLP, norm="embedding_norm")(tensors)
    for stem in find_stems(changed, "self_attn.out_proj.weight"):
        out = changed[f"{stem}self_attn.out_proj.weight"]
        hidden = len(out)
        if layer_index(stem) % 3 != 2:
            changed = {
                name: t for name, t in changed.items() if not name.startswith(f"{stem}self_attn.")
            }
            changed[f"{stem}conv.out_proj.weight"] = out
            changed[f"{stem}conv.in_proj.weight"] = draw_normal(
                f"{stem}in", (3 * hidden, hidden), 1.5 / hidden**0.5
            )
            changed[f"{stem}conv.conv.weight"] = draw_normal(f"{stem}conv", (hidden, 1, 3), 0.7)
        if (router := f"{stem}feed_forward.gate.weight") in changed:
            changed[router] = changed[router] + draw_normal(
                f"{stem}faint", (1, hidden), 8 / hidden**0.5
            )
            changed[f"{stem}feed_forward.expert_bias"] = draw_normal(f"{stem}bias", (8,), 0.1)
    return changed


def with_mamba(tensors: Tensors, groups: int = 4) -> Tensors:
    """Make Granite 4's: all layers but one are Mamba-2's, with 8 heads of 16.

    Gate and up are fused.
    """
    changed = with_packed_experts(with_fused_matrices(tensors, GATE_UP))
    for stem in find_stems(changed, f"{GATE_UP}.weight"):
        changed[f"{stem}shared_mlp.input_linear.weight"] = changed.pop(f"{stem}{GATE_UP}.weight")
        changed[f"{stem}shared_mlp.output_linear.weight"] = changed.pop(
            f"{stem}mlp.down_proj.weight"
        )
    for stem in find_stems(changed, "block_sparse_moe.router.layer.weight"):
        draw(changed, f"{stem}shared_mlp.input_linear.weight", (96, 64), 1.2 / 64**0.5)
        draw(changed, f"{stem}shared_mlp.output_linear.weight", (64, 48), 1.2 / 48**0.5)
    for stem in find_stems(changed, "self_attn.o_proj.weight"):
        if layer_index(stem) != 1:
            out = changed[f"{stem}self_attn.o_proj.weight"]
            changed = {
                name: t for name, t in changed.items() if not name.startswith(f"{stem}self_attn.")
            }
            changed |= draw_mamba(f"{stem}mamba.", groups, out)
    return changed


def draw_mamba(stem: str, groups: int, out: torch.Tensor) -> Tensors:
    """Draw a Mamba-2 layer's tensors, all of which matter, with the gain of `out`."""
    hidden = 64
    heads = 8
    inner = 128
    gain = float(out.std()) * len(out) ** 0.5
    channels = inner + 2 * groups * 24
    shapes: dict[str, tuple[tuple[int, ...], float, float]] = {
        "in_proj.weight": ((inner + channels + heads, hidden), 1.2 / hidden**0.5, 0.0),
        "out_proj.weight": ((hidden, inner), gain / inner**0.5, 0.0),
        "conv1d.weight": ((channels, 1, 4), 0.5, 0.0),
        "conv1d.bias": ((channels,), 0.2, 0.0),
        "A_log": ((heads,), 0.7, 0.3),
        "dt_bias": ((heads,), 1.0, -1.0),
        "D": ((heads,), 0.5, 1.0),
        "norm.weight": ((inner,), 0.2, 1.0),
    }
    return {
        stem + name: draw_normal(stem + name, shape, scale, mean)
        for name, (shape, scale, mean) in shapes.items()
    }


def with_single_blocks(tensors: Tensors, kinds: str, latent: int = 0) -> Tensors:
    """Make Nemotron-H's: one block of each layer under its names; MLPs without gates.

    latent: the width of routed experts' inputs, where it differs from the state's.
    """
    names = {"model.embed_tokens.weight": "backbone.embeddings.weight"}
    names |= {"model.norm.weight": "backbone.norm_f.weight", "lm_head.weight": "lm_head.weight"}
    changed = {new: tensors[old] for old, new in names.items()}
    for name in tensors.keys() - names:
        tensor = tensors[name]
        layer = layer_index(name)
        inside = name.split(".", 3)[3]
        kind = kinds[layer]
        target = f"backbone.layers.{layer}."
        if inside == "input_layernorm.weight":
            changed[f"{target}norm.weight"] = tensor
        elif kind == "M" and inside == "self_attn.o_proj.weight":
            changed |= draw_mamba(f"{target}mixer.", 4, tensor)
        elif kind == "*" and inside.startswith("self_attn.") and "norm" not in inside:
            changed[f"{target}mixer.{inside.removeprefix('self_attn.')}"] = tensor
        elif kind in "-E" and inside.startswith("mlp.") and "gate_proj" not in inside:
            new_name = f"{target}mixer.{inside.removeprefix('mlp.')}"
            if latent and ".experts." in inside:
                shape = (len(tensor), latent) if "up_proj" in inside else (latent, tensor.shape[1])
                tensor = draw_normal(
                    new_name, shape, float(tensor.std()) * (tensor.shape[1] / shape[1]) ** 0.5
                )
            changed[new_name] = tensor
            if inside == "mlp.gate.weight":
                draw(changed, f"{target}mixer.gate.e_score_correction_bias", (8,), 0.1)
                shapes = {"shared_experts.up_proj": (48, 64), "shared_experts.down_proj": (64, 48)}
                if latent:
                    shapes |= {"fc1_latent_proj": (latent, 64), "fc2_latent_proj": (64, latent)}
                for part, shape in shapes.items():
                    draw(changed, f"{target}mixer.{part}.weight", shape, 1.0 / shape[1] ** 0.5)
    return changed
