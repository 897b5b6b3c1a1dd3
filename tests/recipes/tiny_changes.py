"""What makes the tensors of another family of a tiny Llama's or Qwen3's: names, norms, blocks of its own.

Plain torch; imports nothing from `spd`. What a family has besides is drawn here, from its tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.recipes.tiny import Tensors, drawn

GATES = "mlp.gate_up_proj"
QUERIES = "self_attn.qkv_proj"
FUSED = {
    GATES: ("mlp.gate_proj", "mlp.up_proj"),
    QUERIES: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
}


def draw(found: Tensors, own: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
    """Put a tensor that its name decides."""
    found[own] = drawn(own, shape, std, mean)


def draw_mlp(found: Tensors, stem: str, width: int, hidden: int, strength: float = 1.2) -> None:
    """Put a gated MLP of a width."""
    for part, shape in (
        ("gate", (width, hidden)),
        ("up", (width, hidden)),
        ("down", (hidden, width)),
    ):
        draw(found, f"{stem}{part}_proj.weight", shape, strength / shape[1] ** 0.5)


def stems(found: Tensors, last: str) -> list[str]:
    """What stands before the last part of every name that has it."""
    return [name.removesuffix(last) for name in found if name.endswith(last)]


def layer_of(name: str) -> int:
    """The layer that a name says."""
    return int(name.split(".")[2])


def take_experts(found: Tensors, stem: str) -> Tensors:
    """Gates, ups and downs of a layer's experts, stacked and taken away."""
    count = len(found[f"{stem}mlp.gate.weight"])
    return {
        part: torch.stack(
            [found.pop(f"{stem}mlp.experts.{e}.{part}_proj.weight") for e in range(count)]
        )
        for part in ("gate", "up", "down")
    }


def without_output_bias(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values only."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}


def with_centred_norms(tensors: Tensors) -> Tensors:
    """Every scale stored as its distance from 1."""
    return {name: t - 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}


def with_gemma_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer, every scale stored as its distance from 1; those behind a block speak softly."""
    found = with_centred_norms(tensors)
    for stem in stems(tensors, "post_attention_layernorm.weight"):
        scale = tensors[f"{stem}post_attention_layernorm.weight"]
        found[f"{stem}pre_feedforward_layernorm.weight"] = scale - 1
        for number, behind in enumerate(("post_attention_layernorm", "post_feedforward_layernorm")):
            found[f"{stem}{behind}.weight"] = scale.roll(number + 1) * 0.4 - 1
    return found


def with_apart_gates(tensors: Tensors) -> Tensors:
    """Muse-Glimmer: those norms but for the last one, and a matrix of gates beside queries."""
    found = {**with_gemma_norms(tensors), "model.norm.weight": tensors["model.norm.weight"]}
    for stem in stems(tensors, "self_attn.q_proj.weight"):
        shape = tuple(tensors[f"{stem}self_attn.q_proj.weight"].shape)
        draw(found, f"{stem}self_attn.gate_proj.weight", shape, 1.5 / shape[1] ** 0.5)
    return found


def fused(tensors: Tensors, *wholes: str) -> Tensors:
    """Queries, keys and values in one tensor, gate and up in another; or only what is named."""
    found = dict(tensors)
    for name in tensors:
        for whole in wholes or FUSED:
            first, *others = FUSED[whole]
            if f"{first}." in name:
                names = [name, *(name.replace(first, other) for other in others)]
                found[name.replace(first, whole)] = torch.cat([found.pop(part) for part in names])
    return found


def renamed(**names: str) -> Callable[[Tensors], Tensors]:
    """Parts of names, by what stands for them; none in place of one takes the tensor away."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(f".{old}.", f".{new}.")
            if ".none." not in name:
                found[name] = tensor
        return found

    return change


without_head_norms = renamed(q_norm="none", k_norm="none")
WAYS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
as_mixtral = renamed(mlp="block_sparse_moe", q_norm="none", k_norm="none", **WAYS)


def with_post_norms_alone(tensors: Tensors) -> Tensors:
    """Two norms a layer, both behind a block."""
    names = {"post_attention_layernorm": "post_feedforward_layernorm"}
    found = renamed(**names, input_layernorm="post_attention_layernorm")(tensors)
    return {name: t * 0.4 if "layernorm" in name else t for name, t in found.items()}


def with_whole_norms(tensors: Tensors) -> Tensors:
    """As above; one norm over all heads of queries, and of keys."""
    return with_post_norms_alone(tensors) | _whole_norms(tensors)


def _whole_norms(tensors: Tensors) -> Tensors:
    rows = {
        name: len(t)
        for name, t in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    }
    names = {name.replace("_proj", "_norm"): (length,) for name, length in rows.items()}
    return {name: drawn(name, shape, 0.2, 1.4) for name, shape in names.items()}


def with_routed_norms(tensors: Tensors) -> Tensors:
    """MiniMax-M2: the same norms beside those before blocks; Mixtral's names, corrections of the router."""
    found = as_mixtral(tensors) | _whole_norms(tensors)
    for stem in stems(found, "block_sparse_moe.gate.weight"):
        block = f"{stem}block_sparse_moe."
        draw(found, f"{block}e_score_correction_bias", found[f"{block}gate.weight"].shape[:1], 0.1)
    return found


def with_glm4_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer; gate and up in one tensor."""
    found = dict(tensors)
    for stem in stems(tensors, "input_layernorm.weight"):
        for number, behind in enumerate(("post_self_attn_layernorm", "post_mlp_layernorm")):
            scale = tensors[f"{stem}input_layernorm.weight"].roll(number + 1)
            found[f"{stem}{behind}.weight"] = scale * 0.4
    return with_fused_mlp(found)


def with_fused_mlp(tensors: Tensors) -> Tensors:
    """Gate and up in one tensor; biases of queries, keys and values only."""
    return fused(without_output_bias(tensors), GATES)


def with_shared_expert(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values, no norms of heads, and a gated expert for every row."""
    found = without_head_norms(without_output_bias(tensors))
    for stem in stems(found, "mlp.gate.weight"):
        hidden = found[f"{stem}mlp.gate.weight"].shape[1]
        found[f"{stem}mlp.shared_expert_gate.weight"] = drawn(f"{stem}mlp.sg", (1, hidden), 0.2)
        draw_mlp(found, f"{stem}mlp.shared_expert.", 48, hidden)
    return found


def with_shared_mlp(tensors: Tensors) -> Tensors:
    """HunYuan-MoE: its names of norms and of the router, and an expert for every row."""
    found = renamed(q_norm="query_layernorm", k_norm="key_layernorm")(tensors)
    for stem in stems(found, "mlp.gate.weight"):
        found[f"{stem}mlp.gate.wg.weight"] = router = found.pop(f"{stem}mlp.gate.weight")
        draw_mlp(found, f"{stem}mlp.shared_mlp.", 32, router.shape[1])
    return found


def with_narrow_values(tensors: Tensors, value: int = 10, kinds: str = "FSSS") -> Tensors:
    """MiMo-V2: sliding layers have twice the key heads, and sinks; values are narrower; corrected routers."""
    found = without_head_norms(tensors)
    for stem in stems(found, "k_proj.weight"):
        rows, hidden = found[f"{stem}k_proj.weight"].shape
        slides = kinds[layer_of(stem)] == "S"
        keys = rows // 16 * (1 + slides)
        heads = found[f"{stem}q_proj.weight"].shape[0] // 16
        gain = float(found[f"{stem}o_proj.weight"].std()) * (16 / value) ** 0.5
        draw(found, f"{stem}k_proj.weight", (keys * 16, hidden), 1.4 / hidden**0.5)
        draw(found, f"{stem}v_proj.weight", (keys * value, hidden), 1 / hidden**0.5)
        draw(found, f"{stem}o_proj.weight", (hidden, heads * value), gain)
        if slides:
            found[f"{stem}attention_sink_bias"] = drawn(f"{stem}sinks", (heads,), 1.0, 1.0)
    for stem in stems(found, "mlp.gate.weight"):
        shape = found[f"{stem}mlp.gate.weight"].shape[:1]
        draw(found, f"{stem}mlp.gate.e_score_correction_bias", shape, 0.1)
    return found


def with_head_gates(tensors: Tensors, kinds: str = "FSSF") -> Tensors:
    """Step-3.7: a gate a head; sliding layers have six heads in place of four; norms stored around 0."""
    found = with_centred_norms(tensors)
    for stem in stems(found, "q_proj.weight"):
        hidden = found[f"{stem}q_proj.weight"].shape[1]
        heads = 6 if kinds[layer_of(stem)] == "S" else 4
        gain = float(found[f"{stem}o_proj.weight"].std()) * (4 / heads) ** 0.5
        draw(found, f"{stem}q_proj.weight", (heads * 16, hidden), hidden**-0.5)
        draw(found, f"{stem}o_proj.weight", (hidden, heads * 16), gain)
        draw(found, f"{stem}g_proj.weight", (heads, hidden), 2 * hidden**-0.5)
    for stem in stems(found, "mlp.gate.weight"):
        count, hidden = found[f"{stem}mlp.gate.weight"].shape
        gain = float(found[f"{stem}mlp.experts.0.down_proj.weight"].std())
        found |= {
            f"{stem}moe.{part}_proj.weight": each
            for part, each in take_experts(found, stem).items()
        }
        found[f"{stem}moe.gate.weight"] = found.pop(f"{stem}mlp.gate.weight")
        found[f"{stem}moe.router_bias"] = drawn(f"{stem}bias", (count,), 0.1)
        draw_mlp(found, f"{stem}share_expert.", 48, hidden)
        draw(found, f"{stem}share_expert.down_proj.weight", (hidden, 48), gain)
    return found


def packed_experts(tensors: Tensors) -> Tensors:
    """Every expert in two tensors, under Granite's names."""
    found = without_head_norms(tensors)
    for stem in stems(found, "mlp.gate.weight"):
        each = take_experts(found, stem)
        block = f"{stem}block_sparse_moe."
        found[f"{block}router.layer.weight"] = found.pop(f"{stem}mlp.gate.weight")
        found[f"{block}input_linear.weight"] = torch.cat((each["gate"], each["up"]), 1)
        found[f"{block}output_linear.weight"] = each["down"]
    return found


def with_sinks(tensors: Tensors) -> Tensors:
    """gpt-oss: sinks, biases everywhere, experts packed with inputs before outputs, gate and up in turn."""
    found = without_head_norms(tensors)
    for stem in stems(found, "mlp.gate.weight"):
        each = take_experts(found, stem)
        router = found.pop(f"{stem}mlp.gate.weight")
        block = f"{stem}mlp."
        both = torch.stack((each["gate"] * 2, each["up"] * 2), 2).flatten(1, 2)
        found[f"{block}router.weight"] = router
        found[f"{block}router.bias"] = drawn(f"{stem}router.bias", (len(router),), 0.5)
        for part, whole in (("gate_up", both), ("down", each["down"])):
            own = f"{block}experts.{part}"
            found[f"{own}_proj"] = whole.mT.contiguous()
            found[f"{own}_proj_bias"] = drawn(own, tuple(whole.shape[:2]), 0.3)
        found[f"{stem}self_attn.sinks"] = drawn(f"{stem}sinks", (4,), 1.0, 1.0)
        found[f"{stem}self_attn.o_proj.bias"] = drawn(f"{stem}o", (router.shape[1],), 0.1)
    return found


def with_sides(tensors: Tensors, sparse: bool = False) -> Tensors:
    """Gemma 4: every second layer wider, the last two without keys of their own, embeddings of layers."""
    found = {
        n: t + 1 if n.endswith("norm.weight") else t for n, t in with_gemma_norms(tensors).items()
    }
    width = 12
    hidden = 64
    experts = 8
    put = partial(draw, found)
    for layer in range(4):
        stem = f"model.layers.{layer}."
        wide = bool(layer % 2)
        shares = layer > 1
        size = 32 if wide else 16
        own = f"{stem}self_attn."
        if wide:
            for name, rows in (("q", 4), ("k", 1), ("v", 1)):
                put(f"{own}{name}_proj.weight", (rows * size, hidden), hidden**-0.5)
            put(f"{own}o_proj.weight", (hidden, 4 * size), 1.5 / (4 * size) ** 0.5)
            put(f"{own}k_norm.weight", (size,), 0.2, 1.4)
        put(f"{own}q_norm.weight", (size,), 0.1, 1.4 * size**-0.5)
        for name in (
            *(("k_proj", "v_proj", "k_norm") if shares else ()),
            *(("v_proj",) if wide else ()),
        ):
            found.pop(f"{own}{name}.weight", None)
        if shares:
            draw_mlp(found, f"{stem}mlp.", 256, hidden, 1.4)
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
    return found


def with_convolutions(tensors: Tensors) -> Tensors:
    """LFM2: every layer but each third one convolves; norms and projections under its own names.

    Scores of all experts are faint for some tokens: what is added to their sum shows.
    """
    names = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
    }
    found = renamed(**names, **WAYS, norm="embedding_norm")(tensors)
    for stem in stems(found, "self_attn.out_proj.weight"):
        out = found[f"{stem}self_attn.out_proj.weight"]
        hidden = len(out)
        if layer_of(stem) % 3 != 2:
            found = {
                each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")
            }
            found[f"{stem}conv.out_proj.weight"] = out
            found[f"{stem}conv.in_proj.weight"] = drawn(
                f"{stem}in", (3 * hidden, hidden), 1.5 / hidden**0.5
            )
            found[f"{stem}conv.conv.weight"] = drawn(f"{stem}conv", (hidden, 1, 3), 0.7)
        if (router := f"{stem}feed_forward.gate.weight") in found:
            found[router] = found[router] + drawn(f"{stem}faint", (1, hidden), 8 / hidden**0.5)
            found[f"{stem}feed_forward.expert_bias"] = drawn(f"{stem}bias", (8,), 0.1)
    return found


def with_mamba(tensors: Tensors, groups: int = 4) -> Tensors:
    """Granite 4: all layers but one are Mamba-2's, with 8 heads of 16; gate and up of the MLP are one."""
    found = packed_experts(fused(tensors, GATES))
    for stem in stems(found, f"{GATES}.weight"):
        found[f"{stem}shared_mlp.input_linear.weight"] = found.pop(f"{stem}{GATES}.weight")
        found[f"{stem}shared_mlp.output_linear.weight"] = found.pop(f"{stem}mlp.down_proj.weight")
    for stem in stems(found, "block_sparse_moe.router.layer.weight"):
        draw(found, f"{stem}shared_mlp.input_linear.weight", (96, 64), 1.2 / 64**0.5)
        draw(found, f"{stem}shared_mlp.output_linear.weight", (64, 48), 1.2 / 48**0.5)
    for stem in stems(found, "self_attn.o_proj.weight"):
        if layer_of(stem) != 1:
            out = found[f"{stem}self_attn.o_proj.weight"]
            found = {
                each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")
            }
            found |= mamba(f"{stem}mamba.", groups, out)
    return found


def mamba(stem: str, groups: int, out: torch.Tensor) -> Tensors:
    """A Mamba-2 layer's tensors, every one of which matters, as loud as the attention with that output."""
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
    return {stem + name: drawn(stem + name, *how) for name, how in shapes.items()}


def with_single_blocks(tensors: Tensors, kinds: str, latent: int = 0) -> Tensors:
    """Nemotron-H: of each layer one block under its own names; matrices without gates.

    latent: the width that routed experts work in, where it is another.
    """
    names = {"model.embed_tokens.weight": "backbone.embeddings.weight"}
    names |= {"model.norm.weight": "backbone.norm_f.weight", "lm_head.weight": "lm_head.weight"}
    found = {new: tensors[old] for old, new in names.items()}
    for name in tensors.keys() - names:
        tensor = tensors[name]
        layer = layer_of(name)
        inside = name.split(".", 3)[3]
        kind = kinds[layer]
        to = f"backbone.layers.{layer}."
        if inside == "input_layernorm.weight":
            found[f"{to}norm.weight"] = tensor
        elif kind == "M" and inside == "self_attn.o_proj.weight":
            found |= mamba(f"{to}mixer.", 4, tensor)
        elif kind == "*" and inside.startswith("self_attn.") and "norm" not in inside:
            found[f"{to}mixer.{inside.removeprefix('self_attn.')}"] = tensor
        elif kind in "-E" and inside.startswith("mlp.") and "gate_proj" not in inside:
            own = f"{to}mixer.{inside.removeprefix('mlp.')}"
            if latent and ".experts." in inside:
                shape = (len(tensor), latent) if "up_proj" in inside else (latent, tensor.shape[1])
                tensor = drawn(
                    own, shape, float(tensor.std()) * (tensor.shape[1] / shape[1]) ** 0.5
                )
            found[own] = tensor
            if inside == "mlp.gate.weight":
                draw(found, f"{to}mixer.gate.e_score_correction_bias", (8,), 0.1)
                shapes = {"shared_experts.up_proj": (48, 64), "shared_experts.down_proj": (64, 48)}
                if latent:
                    shapes |= {"fc1_latent_proj": (latent, 64), "fc2_latent_proj": (64, latent)}
                for part, shape in shapes.items():
                    draw(found, f"{to}mixer.{part}.weight", shape, 1.0 / shape[1] ** 0.5)
    return found
