"""What makes the tensors of another family of a tiny Llama's or Qwen3's: names, norms, blocks of its own.

Plain torch; imports nothing from `spd`. What a family has besides is drawn here, from its tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.recipes.tiny import drawn

Tensors = dict[str, torch.Tensor]


def unchanged(tensors: Tensors) -> Tensors:
    """As Llama has them."""
    return tensors


def without_output_bias(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values only."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}


def with_centred_norms(tensors: Tensors) -> Tensors:
    """Every scale stored as its distance from 1."""
    return {name: t - 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}


def with_gemma_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer, every scale stored as its distance from 1; those behind a block speak softly."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            prefix = name.removesuffix("post_attention_layernorm.weight")
            found[f"{prefix}pre_feedforward_layernorm.weight"] = tensor - 1
            for number, behind in enumerate(("post_attention_layernorm", "post_feedforward_layernorm")):
                found[f"{prefix}{behind}.weight"] = tensor.roll(number + 1) * 0.4 - 1
        else:
            found[name] = tensor - 1 if name.endswith("norm.weight") else tensor
    return found


def with_apart_gates(tensors: Tensors) -> Tensors:
    """Muse-Glimmer: those norms but for the last one, and a matrix of gates beside queries."""
    found = {**with_gemma_norms(tensors), "model.norm.weight": tensors["model.norm.weight"]}
    for name, tensor in tensors.items():
        if name.endswith("self_attn.q_proj.weight"):
            own = name.replace("q_proj", "gate_proj")
            found[own] = drawn(own, tuple(tensor.shape), 1.5 / tensor.shape[1] ** 0.5)
    return found


def fused(tensors: Tensors) -> Tensors:
    """Queries, keys and values in one tensor; gate and up in another."""
    found = dict(tensors)
    for name in tensors:
        for first, others, whole in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name:
                names = [name, *(name.replace(first, other) for other in others)]
                found[name.replace(first, whole)] = torch.cat([found.pop(part) for part in names])
    return found


def renamed(**names: str) -> Callable[[Tensors], Tensors]:
    """Parts of names, by what stands for them; None in place of one takes the tensor away."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(f".{old}.", f".{new}.")
            if ".none." not in name:
                found[name] = tensor
        return found

    return change


def with_post_norms_alone(tensors: Tensors) -> Tensors:
    """Two norms a layer, both behind a block."""
    names = {
        "post_attention_layernorm": "post_feedforward_layernorm",
        "input_layernorm": "post_attention_layernorm",
    }
    found = renamed(**names)(tensors)
    return {name: t * 0.4 if "layernorm" in name else t for name, t in found.items()}


def with_whole_norms(tensors: Tensors) -> Tensors:
    """As above; one norm over all heads of queries, and of keys."""
    return with_post_norms_alone(tensors) | _whole_norms(tensors)


def _whole_norms(tensors: Tensors) -> Tensors:
    rows = {n.replace("_proj", "_norm"): t for n, t in tensors.items() if n.endswith(_TURNED)}
    return {name: drawn(name, tensor.shape[:1], 0.2, 1.4) for name, tensor in rows.items()}


_TURNED = ("q_proj.weight", "k_proj.weight")
MIXTRAL = {
    **{"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    **{"q_norm": "none", "k_norm": "none"},
}


def with_routed_norms(tensors: Tensors) -> Tensors:
    """MiniMax-M2: the same norms beside those before blocks; Mixtral's names, corrections of the router."""
    found = renamed(**MIXTRAL)(tensors) | _whole_norms(tensors)
    for name in [name for name in found if name.endswith("block_sparse_moe.gate.weight")]:
        own = name.replace("gate.weight", "e_score_correction_bias")
        found[own] = drawn(own, found[name].shape[:1], 0.1)
    return found


def with_glm4_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer; gate and up in one tensor."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            for number, behind in enumerate(("post_self_attn_layernorm", "post_mlp_layernorm")):
                found[name.replace("input_layernorm", behind)] = tensor.roll(number + 1) * 0.4
    return with_fused_mlp(found)


def with_fused_mlp(tensors: Tensors) -> Tensors:
    """Gate and up in one tensor; biases of queries, keys and values only."""
    found = without_output_bias(tensors)
    both = fused({name: t for name, t in found.items() if "mlp" in name})
    return {**{name: t for name, t in found.items() if ".mlp." not in name}, **both}


def with_shared_expert(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values, no norms of heads, and a gated expert for every row."""
    found = renamed(q_norm="none", k_norm="none")(without_output_bias(tensors))
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem, hidden = name.removesuffix("gate.weight"), found[name].shape[1]
        found[f"{stem}shared_expert_gate.weight"] = drawn(f"{stem}sg", (1, hidden), 0.2)
        for part, shape in (("gate", (48, hidden)), ("up", (48, hidden)), ("down", (hidden, 48))):
            own = f"{stem}shared_expert.{part}_proj.weight"
            found[own] = drawn(own, shape, 1.2 / shape[1] ** 0.5)
    return found


def with_shared_mlp(tensors: Tensors) -> Tensors:
    """HunYuan-MoE: its names of norms and of the router, and an expert for every row."""
    found = renamed(q_norm="query_layernorm", k_norm="key_layernorm")(tensors)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem, hidden = name.removesuffix("gate.weight"), found[name].shape[1]
        found[f"{stem}gate.wg.weight"] = found.pop(name)
        for part, shape in (("gate", (32, hidden)), ("up", (32, hidden)), ("down", (hidden, 32))):
            own = f"{stem}shared_mlp.{part}_proj.weight"
            found[own] = drawn(own, shape, 1.2 / shape[1] ** 0.5)
    return found


def with_narrow_values(tensors: Tensors, value: int = 10, kinds: str = "FSSS") -> Tensors:
    """MiMo-V2: sliding layers have twice the key heads, and sinks; values are narrower; corrected routers."""
    found = renamed(q_norm="none", k_norm="none")(tensors)
    for name in [name for name in found if name.endswith("self_attn.k_proj.weight")]:
        stem, (rows, hidden) = name.removesuffix("k_proj.weight"), found[name].shape
        slides = kinds[int(name.split(".")[2])] == "S"
        keys, heads = rows // 16 * (1 + slides), found[f"{stem}q_proj.weight"].shape[0] // 16
        gain = float(found[f"{stem}o_proj.weight"].std()) * (16 / value) ** 0.5
        for part, shape, std in (
            ("k", (keys * 16, hidden), 1.4 / hidden**0.5),
            ("v", (keys * value, hidden), 1 / hidden**0.5),
            ("o", (hidden, heads * value), gain),
        ):
            own = f"{stem}{part}_proj.weight"
            found[own] = drawn(own, shape, std)
        if slides:
            found[f"{stem}attention_sink_bias"] = drawn(f"{stem}sinks", (heads,), 1.0, 1.0)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        own = name.replace("gate.weight", "gate.e_score_correction_bias")
        found[own] = drawn(own, found[name].shape[:1], 0.1)
    return found


def with_head_gates(tensors: Tensors, kinds: str = "FSSF") -> Tensors:
    """Step-3.7: a gate a head; sliding layers have six heads in place of four; norms stored around 0."""
    found = with_centred_norms(tensors)
    for name in [name for name in found if name.endswith("self_attn.q_proj.weight")]:
        stem, hidden = name.removesuffix("q_proj.weight"), found[name].shape[1]
        heads = 6 if kinds[int(name.split(".")[2])] == "S" else 4
        gain = float(found[f"{stem}o_proj.weight"].std()) * (4 / heads) ** 0.5
        shapes = {"q": (heads * 16, hidden), "o": (hidden, heads * 16), "g": (heads, hidden)}
        for (part, shape), std in zip(shapes.items(), (hidden**-0.5, gain, 2 * hidden**-0.5), strict=True):
            own = f"{stem}{part}_proj.weight"
            found[own] = drawn(own, shape, std)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem, (count, hidden) = name.removesuffix("mlp.gate.weight"), found[name].shape
        found[f"{stem}moe.gate.weight"] = found.pop(name)
        found[f"{stem}moe.router_bias"] = drawn(f"{stem}bias", (count,), 0.1)
        gain = float(found[f"{stem}mlp.experts.0.down_proj.weight"].std())
        for part in ("gate", "up", "down"):
            each = [found.pop(f"{stem}mlp.experts.{e}.{part}_proj.weight") for e in range(count)]
            found[f"{stem}moe.{part}_proj.weight"] = torch.stack(each)
            shape = (hidden, 48) if part == "down" else (48, hidden)
            own = f"{stem}share_expert.{part}_proj.weight"
            found[own] = drawn(own, shape, gain if part == "down" else 1.2 / hidden**0.5)
    return found


def packed_experts(tensors: Tensors) -> Tensors:
    """Every expert in two tensors, under Granite's names."""
    found = renamed(q_norm="none", k_norm="none")(tensors)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem = name.removesuffix("mlp.gate.weight")
        own = [f"{stem}mlp.experts.{i}." for i in range(found[name].shape[0])]
        each = {part: [found.pop(f"{e}{part}_proj.weight") for e in own] for part in ("gate", "up", "down")}
        block = f"{stem}block_sparse_moe."
        first = torch.cat((torch.stack(each["gate"]), torch.stack(each["up"])), 1)
        found[f"{block}router.layer.weight"] = found.pop(name)
        found[f"{block}input_linear.weight"] = first
        found[f"{block}output_linear.weight"] = torch.stack(each["down"])
    return found


def with_sinks(tensors: Tensors) -> Tensors:
    """gpt-oss: sinks, biases everywhere, experts packed with inputs before outputs, gate and up in turn."""
    found = renamed(q_norm="none", k_norm="none")(tensors)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem = name.removesuffix("mlp.gate.weight")
        router = found.pop(name)
        count = router.shape[0]
        each = {
            part: torch.stack([found.pop(f"{stem}mlp.experts.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        }
        both = torch.stack((each["gate"] * 2, each["up"] * 2), 2).flatten(1, 2)
        block = f"{stem}mlp.experts."
        found[f"{stem}mlp.router.weight"] = router
        found[f"{stem}mlp.router.bias"] = drawn(f"{stem}router.bias", (count,), 0.5)
        found[f"{block}gate_up_proj"] = both.mT.contiguous()
        found[f"{block}down_proj"] = each["down"].mT.contiguous()
        for part, width in (("gate_up", both.shape[1]), ("down", each["down"].shape[1])):
            found[f"{block}{part}_proj_bias"] = drawn(f"{block}{part}", (count, width), 0.3)
        found[f"{stem}self_attn.sinks"] = drawn(f"{stem}sinks", (4,), 1.0, 1.0)
        found[f"{stem}self_attn.o_proj.bias"] = drawn(f"{stem}o", (router.shape[1],), 0.1)
    return found


def with_sides(tensors: Tensors, sparse: bool = False) -> Tensors:
    """Gemma 4: every second layer wider, the last two without keys of their own, embeddings of layers."""
    found = {n: t + 1 if n.endswith("norm.weight") else t for n, t in with_gemma_norms(tensors).items()}
    width, hidden, experts = 12, 64, 8

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        found[name] = drawn(name, shape, std, mean)

    for layer in range(4):
        stem, wide, shares = f"model.layers.{layer}.", bool(layer % 2), layer > 1
        size = 32 if wide else 16
        if wide:
            for name, rows in (("q", 4), ("k", 1), ("v", 1)):
                draw(f"{stem}self_attn.{name}_proj.weight", (rows * size, hidden), hidden**-0.5)
            draw(f"{stem}self_attn.o_proj.weight", (hidden, 4 * size), 1.5 / (4 * size) ** 0.5)
            draw(f"{stem}self_attn.k_norm.weight", (size,), 0.2, 1.4)
        draw(f"{stem}self_attn.q_norm.weight", (size,), 0.1, 1.4 * size**-0.5)
        for name in (*(("k_proj", "v_proj", "k_norm") if shares else ()), *(("v_proj",) if wide else ())):
            found.pop(f"{stem}self_attn.{name}.weight", None)
        if shares:
            for name, shape in (("gate", (256, hidden)), ("up", (256, hidden)), ("down", (hidden, 256))):
                draw(f"{stem}mlp.{name}_proj.weight", shape, 1.4 / shape[1] ** 0.5)
        draw(f"{stem}layer_scalar", (1,), 0.05, 0.9)
        draw(f"{stem}per_layer_input_gate.weight", (width, hidden), 0.2)
        draw(f"{stem}per_layer_projection.weight", (hidden, width), 0.4)
        draw(f"{stem}post_per_layer_input_norm.weight", (hidden,), 0.05, 0.4)
        if sparse:
            draw(f"{stem}router.scale", (hidden,), 0.1, 1.0)
            draw(f"{stem}router.proj.weight", (experts, hidden), 1.5)
            draw(f"{stem}router.per_expert_scale", (experts,), 0.2, 1.0)
            draw(f"{stem}experts.gate_up_proj", (experts, 64, hidden), 1.2 / hidden**0.5)
            draw(f"{stem}experts.down_proj", (experts, hidden, 32), 1.5 / 32**0.5)
            for name in (
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            ):
                draw(f"{stem}{name}.weight", (hidden,), 0.1, 0.8)
    draw("model.embed_tokens_per_layer.weight", (320, 4 * width), 0.3)
    draw("model.per_layer_model_projection.weight", (4 * width, hidden), 2.0)
    draw("model.per_layer_projection_norm.weight", (width,), 0.1, 1.0)
    return found


def with_convolutions(tensors: Tensors) -> Tensors:
    """LFM2: every layer but each third one convolves; norms and projections under its own names.

    Scores of all experts are faint for some tokens: what is added to their sum shows.
    """
    names = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj", "mlp": "feed_forward"}
    names |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "norm": "embedding_norm"}
    found = renamed(**names)(tensors)
    for name in [name for name in found if name.endswith("self_attn.out_proj.weight")]:
        stem, hidden = name.removesuffix("self_attn.out_proj.weight"), len(found[name])
        if int(stem.split(".")[2]) % 3 != 2:
            found[f"{stem}conv.out_proj.weight"] = found[name]
            found = {each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")}
            found[f"{stem}conv.in_proj.weight"] = drawn(f"{stem}in", (3 * hidden, hidden), 1.5 / hidden**0.5)
            found[f"{stem}conv.conv.weight"] = drawn(f"{stem}conv", (hidden, 1, 3), 0.7)
        if (router := f"{stem}feed_forward.gate.weight") in found:
            found[router] = found[router] + drawn(f"{stem}faint", (1, hidden), 8 / hidden**0.5)
            found[f"{stem}feed_forward.expert_bias"] = drawn(f"{stem}bias", (8,), 0.1)
    return found


def with_mamba(tensors: Tensors, groups: int = 4) -> Tensors:
    """Granite 4: all layers but one are Mamba-2's, with 8 heads of 16; gate and up of the MLP are one."""
    both = fused({name: t for name, t in tensors.items() if "mlp.gate_proj" in name or "mlp.up_proj" in name})
    found = packed_experts(
        {**{n: t for n, t in tensors.items() if "mlp.gate_p" not in n and "mlp.up_p" not in n}, **both}
    )
    for name in [name for name in found if name.endswith("mlp.gate_up_proj.weight")]:
        stem = name.removesuffix("mlp.gate_up_proj.weight")
        found[f"{stem}shared_mlp.input_linear.weight"] = found.pop(name)
        found[f"{stem}shared_mlp.output_linear.weight"] = found.pop(f"{stem}mlp.down_proj.weight")
    for name in [name for name in found if name.endswith("block_sparse_moe.router.layer.weight")]:
        stem, hidden = name.removesuffix("block_sparse_moe.router.layer.weight"), found[name].shape[1]
        for part, shape in (("input", (96, hidden)), ("output", (hidden, 48))):
            own = f"{stem}shared_mlp.{part}_linear.weight"
            found[own] = drawn(own, shape, 1.2 / shape[1] ** 0.5)
    for name in [name for name in found if name.endswith("self_attn.o_proj.weight")]:
        stem = name.removesuffix("self_attn.o_proj.weight")
        if int(stem.split(".")[2]) != 1:
            gain = found[name].std() * len(found[name]) ** 0.5
            found = {each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")}
            found |= mamba(f"{stem}mamba.", 64, 8, 16, groups, 24, float(gain))
    return found


def mamba(stem: str, hidden: int, heads: int, size: int, groups: int, state: int, gain: float) -> Tensors:
    """One Mamba-2 layer's tensors, every one of which matters."""
    inner, channels = heads * size, heads * size + 2 * groups * state
    shapes: dict[str, tuple[tuple[int, ...], float, float]] = {
        "in_proj.weight": ((inner + channels + heads, hidden), 1.2 / hidden**0.5, 0.0),
        "conv1d.weight": ((channels, 1, 4), 0.5, 0.0),
        "conv1d.bias": ((channels,), 0.2, 0.0),
        "A_log": ((heads,), 0.7, 0.3),
        "dt_bias": ((heads,), 1.0, -1.0),
        "D": ((heads,), 0.5, 1.0),
        "norm.weight": ((inner,), 0.2, 1.0),
        "out_proj.weight": ((hidden, inner), gain / inner**0.5, 0.0),
    }
    return {stem + name: drawn(stem + name, *how) for name, how in shapes.items()}


def with_single_blocks(tensors: Tensors, kinds: str, latent: int = 0) -> Tensors:
    """Nemotron-H: of each layer one block under its own names; matrices without gates.

    latent: the width that routed experts work in, where it is another.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers."):
            others = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
            stem = name.removesuffix(".weight")
            found[f"{others.get(stem, stem)}.weight"] = tensor
            continue
        layer, inside = int(name.split(".")[2]), name.split(".", 3)[3]
        kind, to = kinds[layer], f"backbone.layers.{layer}."
        if inside == "input_layernorm.weight":
            found[f"{to}norm.weight"] = tensor
        elif kind == "M" and inside == "self_attn.o_proj.weight":
            gain = float(tensor.std()) * len(tensor) ** 0.5
            found |= mamba(f"{to}mixer.", 64, 8, 16, 4, 24, gain)
        elif kind == "*" and inside.startswith("self_attn.") and "norm" not in inside:
            found[f"{to}mixer.{inside.removeprefix('self_attn.')}"] = tensor
        elif kind in "-E" and inside.startswith("mlp.") and "gate_proj" not in inside:
            own = f"{to}mixer.{inside.removeprefix('mlp.')}"
            if latent and ".experts." in inside:
                shape = (len(tensor), latent) if "up_proj" in inside else (latent, tensor.shape[1])
                tensor = drawn(own, shape, float(tensor.std()) * (tensor.shape[1] / shape[1]) ** 0.5)
            found[own] = tensor
            if inside == "mlp.gate.weight":
                own = f"{to}mixer.gate.e_score_correction_bias"
                found[own] = drawn(own, (8,), 0.1)
                shapes = {"shared_experts.up_proj": (48, 64), "shared_experts.down_proj": (64, 48)}
                if latent:
                    shapes |= {"fc1_latent_proj": (latent, 64), "fc2_latent_proj": (64, latent)}
                for part, shape in shapes.items():
                    own = f"{to}mixer.{part}.weight"
                    found[own] = drawn(own, shape, 1.0 / shape[1] ** 0.5)
    return found
