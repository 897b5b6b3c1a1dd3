"""Write a tiny EAGLE-3 head for a tiny target, in the published layouts.

Two kinds. A `random` head: all of its tensors matter, so that any error in its conventions changes
its drafts. A `copy` of the target's first layer: it often agrees with a target whose later layers
have a small gain, at every depth, so that runs of drafts are accepted and others rejected (see
`write_tiny_pair`).

A head's next step reads its state, the residual stream, which would grow with every draft. The copy
has as many further attention heads, as wide as the state, that attend to their row only: they add
the token, which is in no residual here, and subtract most of the old state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes import tiny
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.recipes.tiny_mtp import select_below

LAYERS = {"research": "midlayer.", "vllm": "layers.0.", "speculators": "layers.0."}
"""Beginnings of the names of a head's layer, by layout."""
ARCHITECTURES = {"research": "LlamaForCausalLMEagle3", "vllm": "Eagle3LlamaForCausalLM"}
RANDOM_HEAD_SHAPE = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
}
"""Sizes of a random head, none of them the tiny target's."""
RANDOM_HEAD_ROPE = 5000.0
RANDOM_HEAD_EPSILON = 1e-3
"""The rotary base of a random head, and the epsilon of its norms: large enough to matter beside a
small embedding."""
SELF_SCORE = 60.0
"""About the score of a row with itself in the heads that attend to it alone."""
SOFT_STREAM_STD = 0.085
"""About the standard deviation of a soft target's residual stream."""

Draw = Callable[..., Tensor]


def soft_gain(layer: int) -> float:
    """Return the gain of a target's layer that its first layer's copy can follow."""
    return 0.04 if layer == 0 else 0.003


def write_tiny_pair(
    target: Path,
    head: Path,
    *,
    variant: str = "llama2",
    kind: str = "random",
    target_options: tiny.Json | None = None,
    **options: Any,
) -> Path:
    """Write a variant of a tiny checkpoint and an EAGLE-3 head for it; return the head's folder.

    Seven layers, so that the default auxiliary indices differ. A `copy` gets a target that it can
    follow, and more ids than a random head. options: see `write_tiny_eagle3`.
    """
    if variant in FAMILIES:
        write_dense(target, variant, layers=7)
    else:
        gains = {"residual_gain": soft_gain} if kind == "copy" else {}
        options = {"draft_vocab": 288, **options} if kind == "copy" else options
        shape = {
            **tiny.VARIANTS[variant],
            "tie": False,
            "layers": 7,
            **gains,
            **(target_options or {}),
        }
        tiny.write_tiny(target, **shape)
    return write_tiny_eagle3(head, target, kind=kind, **options)


DEFAULTS: dict[str, Any] = {
    "layout": "research",
    "kind": "random",
    "draft_vocab": 96,
    "hidden_size": None,
    "aux": None,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "own_embedding": False,
    "own_head": True,
    "hidden_share": 0.05,
    "seed": 0,
    "dtype": "float32",
}


def write_tiny_eagle3(folder: Path, target: Path, **options: Any) -> Path:
    """Write a head for the checkpoint in `target`; return its folder.

    aux: indices j of the layers at whose input the residual stream is read (the number of layers:
    the stream after the last), written in the layout's convention; None: left out.
    norm_before_residual: None: left out, which means yes in the speculators layout and no in the
    others. draft_vocab: the number of the target's ids that the head has logits for; None: all.
    Where own_head is false, the rows of the target's output head are used. hidden_share: the share
    of the old state that a copy keeps.
    """
    o = tiny.with_defaults(DEFAULTS, options)
    verifier = json.loads((target / "config.json").read_text())
    hidden = o.hidden_size or verifier["hidden_size"]
    layer = _layer_config(verifier, o.kind == "copy", hidden)
    config = _head_config(o, layer, verifier, target)
    tensors = _head_tensors(o, layer, config, target)
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_json(folder / "config.json", config)
    converted = {
        n: t.to(tiny.DTYPES[o.dtype]) if t.is_floating_point() else t for n, t in tensors.items()
    }
    tiny.write_tensors(folder, {name: tensor.contiguous() for name, tensor in converted.items()})
    return folder


def _head_config(
    o: SimpleNamespace, layer: tiny.Json, verifier: tiny.Json, target: Path
) -> dict[str, Any]:
    """Return config.json of a head in its layout. o: the options of `write_tiny_eagle3`."""
    hidden = layer["hidden_size"]
    target_hidden = verifier["hidden_size"]
    flags = {name: getattr(o, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    config: dict[str, Any]
    if o.layout == "speculators":
        config = _speculators_config(layer, flags, verifier, target)
    else:  # head_dim and the flags only where they differ from the defaults
        config = {"architectures": [ARCHITECTURES[o.layout]], **layer}
        if layer["num_attention_heads"] * layer["head_dim"] == hidden:
            del config["head_dim"]
        config |= {name: True for name, value in flags.items() if value}
    config |= {"draft_vocab_size": o.draft_vocab, "torch_dtype": o.dtype}
    if o.layout == "speculators" or hidden != target_hidden:
        config["target_hidden_size"] = target_hidden if hidden != target_hidden else None
    if o.norm_before_residual or (o.layout == "speculators" and o.norm_before_residual is not None):
        config["norm_before_residual"] = o.norm_before_residual
    if o.aux is not None and o.layout == "research":  # outputs of layers, in other layouts inputs
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in o.aux],
            "use_aux_hidden_state": True,
        }
    elif o.aux is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(o.aux)
    return config


def _head_tensors(
    o: SimpleNamespace, layer: tiny.Json, config: tiny.Json, target: Path
) -> tiny.Tensors:
    """Return the tensors of a head by their names in its layout."""
    verifier = json.loads((target / "config.json").read_text())
    target_tensors = load_file(target / "model.safetensors")
    target_hidden = verifier["hidden_size"]
    vocab = verifier["vocab_size"]
    hidden = layer["hidden_size"]
    parts = 3 if o.aux is None else len(o.aux)
    fused = parts * target_hidden

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
        return tiny.draw_normal(f"{o.seed}/{o.kind}/{name}", shape, std, mean)

    if o.kind == "copy":
        normed = bool(config.get("norm_before_residual", o.layout == "speculators"))
        stream_std = 1.0 if o.norm_before_fc or o.fc_norm else SOFT_STREAM_STD
        inside = _copy_layer(
            target=target_tensors,
            verifier=verifier,
            draw=draw,
            share=o.hidden_share,
            normed_residual=normed,
        )
        inside["fc.weight"] = draw("fc", (hidden, fused), 1.0 / (stream_std * math.sqrt(fused)))
    else:
        inside = _draw_head(layer, fused, vocab, draw)
    tensors = {
        name.replace("layer.", LAYERS[o.layout], 1): tensor for name, tensor in inside.items()
    }
    if not o.own_head:
        del tensors["lm_head.weight"]
    if o.draft_vocab is not None:
        order = torch.randperm(vocab, generator=tiny.named_generator(f"{o.seed}/ids"))
        draft_ids = order[: o.draft_vocab].sort().values
        if o.own_head:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][draft_ids]
        tensors["d2t"] = draft_ids - torch.arange(o.draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, draft_ids, True)
    if o.own_embedding or hidden != target_hidden:
        # A copy has the target's embedding; a random head has another, larger one.
        if o.kind == "copy":
            tensors["embed_tokens.weight"] = target_tensors["model.embed_tokens.weight"]
        else:
            tensors["embed_tokens.weight"] = draw("embed_tokens", (vocab, hidden), 0.2)
    if o.norm_before_fc:
        tensors["input_norm.weight"] = draw("input_norm", (fused,), 0.2, 1.0)
    if o.fc_norm:
        for part in range(parts):
            norm = draw(f"fc_norm{part}", (target_hidden,), 0.2, 1.0)
            tensors[f"fc_norm.{part}.weight"] = norm
    return tensors


def _layer_config(verifier: tiny.Json, is_copy: bool, hidden: int) -> dict[str, Any]:
    """Return a Llama configuration of one layer.

    A copy has twice the target's heads, each of `hidden`.
    """
    shape = RANDOM_HEAD_SHAPE
    rope = RANDOM_HEAD_ROPE
    epsilon = RANDOM_HEAD_EPSILON
    if is_copy:
        heads = 2 * verifier["num_attention_heads"]
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden}
        shape["intermediate_size"] = verifier["intermediate_size"]
        rope = verifier["rope_theta"]
        epsilon = verifier["rms_norm_eps"]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        **shape,
        **{key: verifier[key] for key in ("vocab_size", "max_position_embeddings")},
        "rms_norm_eps": epsilon,
        "rope_theta": rope,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _speculators_config(
    layer: tiny.Json, flags: tiny.Json, verifier: tiny.Json, target: Path
) -> dict[str, Any]:
    """Return the speculators layout: the head's layer as one of several keys, and its use."""
    greedy = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3}
    speculators = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{**greedy, "verifier_accept_k": 1}],
        "verifier": {"architectures": verifier["architectures"], "name_or_path": target.name},
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": speculators,
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **layer},
        **flags,
    }


def _draw_head(layer: tiny.Json, fused: int, vocab: int, draw: Draw) -> tiny.Tensors:
    """Draw the tensors that all heads have.

    The layer's under `layer.`, the output over all target ids.
    """
    hidden = layer["hidden_size"]
    inner = layer["intermediate_size"]
    query, key = (
        layer[f"num_{name}_heads"] * layer["head_dim"] for name in ("attention", "key_value")
    )
    rows = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
    matrices = {f"layer.{name}": (count, 2 * hidden, 1.5) for name, count in rows.items()}
    matrices |= {f"layer.mlp.{name}_proj": (inner, hidden, 1.5) for name in ("gate", "up")}
    matrices |= {
        "layer.self_attn.o_proj": (hidden, query, 1.5),
        "layer.mlp.down_proj": (hidden, inner, 1.5),
    }
    matrices |= {"fc": (hidden, fused, 1.0), "lm_head": (vocab, hidden, tiny.LOGIT_STD)}
    norms = (
        "layer.hidden_norm",
        "layer.input_layernorm",
        "layer.post_attention_layernorm",
        "norm",
    )
    tensors = {
        f"{name}.weight": draw(name, (rows, columns), scale / math.sqrt(columns))
        for name, (rows, columns, scale) in matrices.items()
    }
    return tensors | {f"{name}.weight": draw(name, (hidden,), 0.3, 1.0) for name in norms}


def _copy_layer(
    target: tiny.Tensors, verifier: tiny.Json, draw: Draw, share: float, normed_residual: bool
) -> tiny.Tensors:
    """Make a head of the target's first layer, with streams of about 1 in place of its small ones.

    share: of the old state that stays. normed_residual: the residual is that state after its norm.
    """
    source = {n: t.float() for n, t in select_below(target, "model.layers.0.").items()}
    hidden = verifier["hidden_size"]
    size = verifier["head_dim"]
    heads = verifier["num_attention_heads"]
    step = hidden // size
    columns = torch.arange(size // 2) * step
    # The columns of a wider head with the rotary frequencies of a narrow one.
    columns = torch.cat((columns, columns + hidden // 2))

    def widened(name: str) -> Tensor:
        """Return a projection of the copied heads, each as wide as the state [heads * hidden, hidden]."""
        weight = source[f"self_attn.{name}_proj.weight"].view(-1, size, hidden)
        scales = source.get(f"self_attn.{name}_norm.weight")
        weight = weight if scales is None else weight * scales[:, None]
        weight = weight.repeat_interleave(heads // len(weight), dim=0)
        return torch.zeros(heads, hidden, hidden).index_copy(1, columns, weight).flatten(0, 1)

    def projection(name: str, scale: float, token: Tensor, state: Tensor) -> Tensor:
        """Return the copied heads, which barely read the state, and as many of the row alone."""
        blind = draw(name, (heads * hidden, hidden), 0.2 * share / math.sqrt(hidden))
        seeing = torch.cat((widened(name) * scale, blind), 1)
        return torch.cat((seeing, torch.cat((token, state), 1).repeat(heads, 1)))

    embedding = target["model.embed_tokens.weight"].float()
    token_norm = source["input_layernorm.weight"]
    hidden_norm = draw("hidden_norm", (hidden,), 0.1, 1.0)
    inverse_norm = (1.0 / token_norm).diag()
    self_projection = inverse_norm * math.sqrt(SELF_SCORE / math.sqrt(hidden))
    out = source["self_attn.o_proj.weight"].view(hidden, heads, size) / SOFT_STREAM_STD
    out = torch.zeros(hidden, heads, hidden).index_copy(2, columns, out).flatten(1)
    final = target["model.norm.weight"].float()
    zeros = torch.zeros(hidden, hidden)
    token = embedding.square().mean().sqrt() / SOFT_STREAM_STD * inverse_norm
    state = (share - 1.0) * (torch.eye(hidden) if normed_residual else (1.0 / hidden_norm).diag())
    return {
        "layer.self_attn.q_proj.weight": projection("q", math.sqrt(step), self_projection, zeros),
        "layer.self_attn.k_proj.weight": projection("k", 1.0, self_projection, zeros),
        "layer.self_attn.v_proj.weight": projection("v", 1.0, token, state),
        "layer.self_attn.o_proj.weight": torch.cat(
            (out, torch.eye(hidden).repeat(1, heads) / heads), 1
        ),
        **{
            f"layer.mlp.{name}.weight": source[f"mlp.{name}.weight"]
            for name in ("gate_proj", "up_proj")
        },
        "layer.mlp.down_proj.weight": source["mlp.down_proj.weight"] / SOFT_STREAM_STD,
        "layer.hidden_norm.weight": hidden_norm,
        "layer.input_layernorm.weight": token_norm,
        "layer.post_attention_layernorm.weight": source["post_attention_layernorm.weight"],
        "norm.weight": final / final.mean(),
        "lm_head.weight": target.get("lm_head.weight", embedding).float() * final.mean(),
    }
