"""Experts of mixtures: the constants of each family, and how `config.json` is read for them.

Source: the configurations of `deepseek_v3`, `qwen3_moe`, `ernie4_5_moe`, `gpt_oss` and others in
Hugging Face transformers 5.
"""

from __future__ import annotations

from dataclasses import replace

from spd.formats.block_config import MAX_EXPERTS, MAX_RANK, MAX_WIDTH, ExpertsConfig, RouterConfig
from spd.formats.json_file import Fields
from spd.formats.layer_kinds import read_mlp_kinds

SWIGLU_LIMIT = 7.0
"""The bound of gpt-oss's gates and inputs, where no key has one."""
SWIGLU_ALPHA = 1.702
"""The factor of gpt-oss's gates, where no key has one."""
_SOFTMAX_ROUTER = RouterConfig(0, sigmoid=False, has_correction=False, normalised=True)
_SIGMOID_ROUTER = RouterConfig(
    0, sigmoid=True, has_correction=True, normalised=True, experts_per_group_score=2
)
SOFTMAX_EXPERTS = ExpertsConfig(
    num_experts=0, intermediate_size=0, shared_size=0, sparse_layers=(), router=_SOFTMAX_ROUTER
)
"""Constants that no key of a family has.

The softmax of the chosen logits alone equals the softmax of all divided by its sum, so that Mixtral
and Granite are among these.
"""
SIGMOID_EXPERTS = replace(SOFTMAX_EXPERTS, router=_SIGMOID_ROUTER)
SHARED_GATE_EXPERTS = replace(SOFTMAX_EXPERTS, shared_name="shared_expert", has_shared_gate=True)
LFM2_EXPERTS = replace(
    SIGMOID_EXPERTS,
    correction_name="expert_bias",
    router=replace(_SIGMOID_ROUTER, weight_epsilon=1e-6),
)
MINIMAX_EXPERTS = replace(SIGMOID_EXPERTS, correction_name="e_score_correction_bias")
NEMOTRON_EXPERTS = replace(SIGMOID_EXPERTS, is_ungated=True)
GRANITE_EXPERTS = replace(SOFTMAX_EXPERTS, shared_name="shared_mlp")
GPT_OSS_EXPERTS = replace(SOFTMAX_EXPERTS, swiglu_clamp=(SWIGLU_LIMIT, SWIGLU_ALPHA))
ERNIE_EXPERTS = replace(
    SOFTMAX_EXPERTS,
    router=replace(_SOFTMAX_ROUTER, has_correction=True),
    correction_name="moe_statics.e_score_correction_bias",
)
"""Constants of families with other routers, shared experts or activations."""


def read_experts(fields: Fields, num_layers: int, constants: ExpertsConfig) -> ExpertsConfig:
    """Return the experts of a model; constants: values that no key of the family has."""
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    has_width = "moe_intermediate_size" in fields
    width_key = "moe_intermediate_size" if has_width else "intermediate_size"
    width = fields.integer(width_key, 1, MAX_WIDTH)
    shared = width * fields.integer("n_shared_experts", 0, 1024, 0)
    router = _read_router(fields, count, constants.router)
    limit = fields.number("swiglu_limit", 1e-3, 1e6, SWIGLU_LIMIT)
    alpha = fields.number("swiglu_alpha", 1e-3, 1e3, SWIGLU_ALPHA)
    return fields.read_dataclass(
        ExpertsConfig,
        constants,
        num_experts=count,
        intermediate_size=width,
        shared_size=fields.integer("shared_expert_intermediate_size", 0, MAX_WIDTH, shared),
        sparse_layers=tuple(_sparse_layers(fields, num_layers)),
        router=router,
        swiglu_clamp=constants.swiglu_clamp and (limit, alpha),
    )


def _read_router(fields: Fields, num_experts: int, constants: RouterConfig) -> RouterConfig:
    """Return how experts are chosen; constants: values that no key of the family has."""
    per_token = fields.integer("num_experts_per_tok", 1, num_experts)
    methods = ("noaux_tc",) if constants.sigmoid else ("greedy", "group_limited_greedy")
    scoring = "sigmoid" if constants.sigmoid else "softmax"
    fields.refuse_unsupported_values({"scoring_func": (scoring,), "topk_method": methods})
    groups = 1
    top_groups = 1
    if fields.get("topk_method") != "greedy":  # greedy takes all groups, whatever other keys say
        groups = fields.integer("n_group", 1, num_experts, 1)
        top_groups = fields.integer("topk_group", 1, groups, 1)
    size = num_experts // groups
    reason = f"{groups} does not divide {num_experts} experts"
    fields.require(num_experts % groups == 0, "n_group", reason)
    reason = f"{top_groups} groups hold fewer than {per_token} experts"
    fields.require(top_groups * size >= per_token, "topk_group", reason)
    needed = constants.experts_per_group_score
    reason = f"{groups} groups of {num_experts} experts hold {size} each, {needed} are needed"
    fields.require(size >= needed, "n_group", reason)
    return fields.read_dataclass(
        RouterConfig, constants, per_token=per_token, groups=groups, top_groups=top_groups
    )


def _sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return True for each layer with experts.

    They are given by kind, or as a range of layers with a step without the dense ones of a list.
    """
    kinds = read_mlp_kinds(fields, num_layers)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    first = fields.integer("first_k_dense_replace", 0, MAX_RANK, 0)
    last = fields.integer("moe_layer_end_index", -1, MAX_RANK, -1)
    frequency = fields.integer("moe_layer_freq", 1, MAX_RANK, 1)
    step = fields.integer("decoder_sparse_step", 1, MAX_RANK, 1)
    dense = fields.integers("mlp_only_layers", 0, MAX_RANK) if "mlp_only_layers" in fields else []
    layers = range(first, num_layers if last == -1 else last + 1)
    sparse = {layer for layer in layers if layer % frequency == 0 and (layer + 1) % step == 0}
    sparse.difference_update(dense)
    return [layer in sparse for layer in range(num_layers)]
