"""config.json and generation_config.json: values are read, wrong ones are refused by field."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats import json_file
from spd.formats.model_config import GenerationConfig, ModelConfig, read_generation_config
from spd.formats.rope_config import RopeConfig
from tests.formats.formats_helpers import LLAMA, QWEN3, raises_spd_error, write_json
from tests.helpers import read_model_config
from tests.recipes.tiny import VARIANTS, write_tiny
from tests.recipes.tiny_dense import FAMILIES, write_dense

SavedConfigs = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedConfigs:
    """Return configurations of tiny checkpoints by name.

    Each checkpoint is equal to `transformers` in `test_runtime_golden`.
    """

    @cache
    def get(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        write_dense(folder, name) if name in FAMILIES else write_tiny(folder, **VARIANTS[name])
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return config

    return get


def read_config(folder: Path, config: object) -> ModelConfig:
    write_json(folder, "config.json", config)
    return read_model_config(folder)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_is_read(tmp_path: Path) -> None:
    path = write_json(tmp_path, "config.json", LLAMA)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark is accepted
    assert read_model_config(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=300,
        max_positions=512,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig("default", 500000.0),
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_qwen3_as_published_is_read(tmp_path: Path) -> None:
    published = {
        **QWEN3,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "max_window_layers": 28,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "eos_token_id": [7, 8, 7],
        "auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"},
        "bos_token_id": None,
    }
    config = read_config(tmp_path, published)
    assert (config.head_dim, config.num_kv_heads, config.attention_bias) == (32, 1, True)
    assert (config.tie_embeddings, config.eos_token_ids, config.bos_token_id) == (
        True,
        (7, 8),
        None,
    )
    assert config.rope == RopeConfig("default", 1e6)


def test_defaults_are_those_of_hugging_face(tmp_path: Path) -> None:
    keys = {"num_key_value_heads", "rope_theta", "torch_dtype"}
    config = read_config(
        tmp_path, without(LLAMA, *keys, "eos_token_id", "bos_token_id", "model_type")
    )
    assert (config.num_kv_heads, config.rope) == (4, RopeConfig("default", 1e4))
    assert (config.dtype, config.eos_token_ids) == ("float32", ())


def test_biases_and_alternative_spellings_are_read(tmp_path: Path) -> None:
    config = read_config(
        tmp_path, {**LLAMA, "mlp_bias": True, "attention_bias": True, "hidden_act": "swish"}
    )
    assert (config.mlp_bias, config.attention_bias) == (True, True)
    assert read_config(tmp_path, {**LLAMA, "torch_dtype": "torch.float16"}).dtype == "float16"
    assert (
        read_config(tmp_path, {**without(LLAMA, "torch_dtype"), "dtype": "float32"}).dtype
        == "float32"
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_VALUES: dict = {
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.2,
    "truncate": False,
}
YARN_VALUES |= {"mscale": 1.0, "mscale_all_dim": 0.5}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, **YARN_VALUES}
ROPES = [
    ({"rope_type": "default"}, RopeConfig("default", 5e5)),
    ({}, RopeConfig("default", 5e5)),
    ({"type": "linear", "factor": 2}, RopeConfig("linear", 5e5, 2.0)),
    ({"rope_type": "linear", "type": "linear", "factor": 2.5}, RopeConfig("linear", 5e5, 2.5)),
    (LLAMA3, RopeConfig("llama3", 5e5, 32.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)),
    ({"rope_type": "yarn", "factor": 4.0}, RopeConfig("yarn", 5e5, 4.0, 512)),
    (YARN, RopeConfig("yarn", 5e5, 4.0, 128, **YARN_VALUES)),
]


@pytest.mark.parametrize(("scaling", "expected"), ROPES)
def test_rope_is_read_in_both_spellings(
    tmp_path: Path, scaling: dict, expected: RopeConfig
) -> None:
    assert read_config(tmp_path, {**LLAMA, "rope_scaling": scaling}).rope == expected
    new = without(LLAMA, "rope_theta")
    if scaling:
        assert (
            read_config(tmp_path, {**new, "rope_parameters": {**scaling, "rope_theta": 5e5}}).rope
            == expected
        )
        both = {"rope_parameters": {**scaling, "rope_theta": 5e5}, "rope_scaling": scaling}
        assert read_config(tmp_path, {**LLAMA, **both}).rope == expected


def test_unknown_quantization_and_architectures_are_named(tmp_path: Path) -> None:
    with raises_spd_error(CheckpointError, "quantization_config", "'exl3'"):
        read_config(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "exl3"}})
    with raises_spd_error(CheckpointError, "'GPT2LMHeadModel'") as caught:
        read_config(tmp_path, {**LLAMA, "architectures": ["GPT2LMHeadModel"]})
    assert caught.value.reason == (
        "nearest supported: LlamaForCausalLM; missing: blocks of its own",
    )
    seeing = {"architectures": ["XForConditionalGeneration"], "vision_config": {"depth": 1}}
    with raises_spd_error(
        CheckpointError, "'XForConditionalGeneration' is not supported"
    ) as caught:
        read_config(tmp_path, {**seeing, "text_config": {**LLAMA, "model_type": "qwen3"}})
    assert caught.value.reason == (
        "nearest supported: Qwen3ForCausalLM; missing: images and sound",
        "its text alone can be read: a copy of it saved as Qwen3ForCausalLM opens",
    )
    seeing["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    with raises_spd_error(
        CheckpointError, "'Qwen3VLMoeForConditionalGeneration' is not supported"
    ) as caught:
        read_config(
            tmp_path, {**seeing, "text_config": {**LLAMA, "model_type": "x", "num_experts": 8}}
        )
    assert caught.value.reason == (
        "nearest supported: Qwen3MoeForCausalLM; missing: images and sound, its experts",
        "its text alone cannot be read either",
    )


ON = {"use_sliding_window": True}
OFF = {"sliding_window": 128, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("base", "change", "layers", "expected"),
    [
        (QWEN3, OFF, 2, ()),
        (MISTRAL, {}, 2, (4096, 4096)),
        (MISTRAL, {"sliding_window": None}, 2, ()),
        (MISTRAL, {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 2, (64, 64)),
        (QWEN2, {"sliding_window": 64}, 2, ()),
        (QWEN3, {**ON, "sliding_window": 64, "max_window_layers": 2}, 4, (None, None, 64, 64)),
        (QWEN2, {**ON, "sliding_window": 64, "max_window_layers": 9}, 2, ()),
        (QWEN2, {**ON, "layer_types": ["sliding_attention", "full_attention"]}, 2, (4096, None)),
        (GEMMA2, {"sliding_window": 64}, 3, (64, None, 64)),
        (GEMMA3, {"sliding_window": 512}, 7, (512, 512, 512, 512, 512, None, 512)),
        (GEMMA3, {"sliding_window": 512, "sliding_window_pattern": 2}, 3, (512, None, 512)),
        (GEMMA3, {"sliding_window": 512, "layer_types": ["full_attention"] * 2}, 2, ()),
    ],
)
def test_sliding_windows_are_read(
    tmp_path: Path, base: dict, change: dict, layers: int, expected: tuple
) -> None:
    assert (
        read_config(tmp_path, {**base, "num_hidden_layers": layers, **change}).sliding_windows
        == expected
    )


PATTERN = {"hybrid_override_pattern": None, "num_hidden_layers": None}
OLDER_KINDS = {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}
SPELLINGS = [
    ("glm4_moe", {"partial_rotary_factor": None}),
    (
        "glm4_moe_lite",
        {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    ("lfm2", {"full_attn_idxs": None, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "block_ff_dim": 80}),
    (
        "granite_hybrid",
        {"layer_types": None, "layers_block_type": ["mamba", "attention", "mamba", "mamba"]},
    ),
    ("granite_hybrid_moe", {"mamba_d_head": "auto"}),
    ("nemotron_h_moe", {**PATTERN, **OLDER_KINDS}),
    ("nemotron_h_moe", {"time_step_limit": [0.0, float("inf")]}),  # json writes it as Infinity
]


@pytest.mark.parametrize(("name", "change"), SPELLINGS)
def test_other_spellings_say_the_same(
    saved: SavedConfigs, tmp_path: Path, name: str, change: dict
) -> None:
    assert read_config(tmp_path, {**saved(name), **change}) == read_config(tmp_path, saved(name))


def refused_values(
    base: dict | str, **fields: tuple
) -> list[tuple[dict | str, dict, tuple[str, ...]]]:
    """Return rows of values that are refused with the name of their field."""
    return [
        (base, {field: value}, (field,)) for field, values in fields.items() for value in values
    ]


REQUIRED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "architectures",
    "max_position_embeddings",
    "rms_norm_eps",
)
LINEAR = {"type": "linear", "factor": 2}
SPARSE_NAMES = ["full_attention", "sliding_attention"]
REFUSED = [
    *refused_values(LLAMA, **dict.fromkeys(REQUIRED_KEYS, (None,))),
    *refused_values(
        LLAMA,
        num_hidden_layers=(10**9, 0, -1, 2.0, "2", True, [2], 10**400),
        intermediate_size=(-5,),
    ),
    *refused_values(LLAMA, hidden_size=(-1, 0, 64.0, 2**40), num_attention_heads=(0, 5, -4, 10**6)),
    *refused_values(
        LLAMA,
        num_key_value_heads=(0, 3, 8),
        head_dim=(0, 15, 16.0, 10**6),
        vocab_size=(0, 2**31, 300.0),
    ),
    *refused_values(
        LLAMA,
        max_position_embeddings=(0, 10**12, 4096.0),
        rms_norm_eps=(0, -1e-6, 1.5, "1e-6", True),
    ),
    *refused_values(
        LLAMA, tie_word_embeddings=(1, "true"), attention_bias=(0, "no"), mlp_bias=("yes",)
    ),
    *refused_values(
        LLAMA, hidden_act=("gelu", "gelu_pytorch_tanh", 3), rope_theta=(0.5, 1e300, "1e6")
    ),
    *refused_values(
        LLAMA, torch_dtype=("float8_e4m3fn", "float64", "auto", 16), model_type=("mistral",)
    ),
    *refused_values(LLAMA, architectures=(["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", [3])),
    *refused_values(
        LLAMA, architectures=(["LlamaForCausalLM", "Qwen3ForCausalLM"],), sliding_window=(128,)
    ),
    *refused_values(
        LLAMA, quantization_config=({"quant_method": "fp8"},), compression_config=({"x": 1},)
    ),
    *refused_values(
        LLAMA,
        partial_rotary_factor=(0.5,),
        layer_types=(SPARSE_NAMES, ["full_attention"], {"a": 1}),
    ),
    *refused_values(LLAMA, eos_token_id=(-1, 2.0, [[2]], "2", [0] * 2000), bos_token_id=(-1, 1.0)),
    *(
        (LLAMA, {"rope_scaling": scaling}, words)
        for scaling, words in (
            ({"type": "dynamic", "factor": 2}, ("rope_scaling", "dynamic", "yarn")),
            ({"rope_type": "longrope", "factor": 2}, ("long_factor", "8 numbers")),
            (
                {"rope_type": "longrope", "factor": 2, "original_max_position_embeddings": 1},
                ("original_max_position_embeddings", "from 2"),
            ),
            ({"factor": 2}, ("rope_scaling", "rope_type", "missing")),
            ({"type": "linear"}, ("factor", "missing")),
            ({"type": "linear", "factor": 0.5}, ("factor", "0.5")),
            ({"type": "linear", "factor": "2"}, ("factor", "'2'")),
            ({"type": "linear", "factor": True}, ("factor", "true")),
            ({"type": "yarn", "factor": 4, "section": [1]}, ("section", "known")),
            ({**LLAMA3, "high_freq_factor": 1.0}, ("high_freq_factor", "low_freq_factor")),
            (without(LLAMA3, "low_freq_factor"), ("low_freq_factor", "missing")),
            (without(LLAMA3, "original_max_position_embeddings"), ("original_max", "missing")),
            ({**LLAMA3, "original_max_position_embeddings": 0}, ("original_max",)),
            ({**YARN, "beta_fast": 1, "beta_slow": 1}, ("beta_fast",)),
            ({**YARN, "attention_factor": -1}, ("attention_factor",)),
            ({**YARN, "truncate": 1}, ("truncate",)),
            ({**YARN, "partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
            ("linear", ("rope_scaling", "object")),
        )
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
        ("rope_scaling", "disagrees"),
    ),
    (
        LLAMA,
        {"dtype": "float32"},
        ("torch_dtype: 'bfloat16' disagrees with dtype, which is 'float32'",),
    ),
    (LLAMA, {"norm_eps": 1e-6}, ("norm_eps: 1e-06 disagrees with rms_norm_eps",)),
    (LLAMA, {"hidden_act": "\x1b[2Jgelu\n" * 100}, ("hidden_act", "\\x1b")),
    (
        LLAMA,
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        ("hidden_act", "gelu"),
    ),
    (LLAMA, {**OFF, **ON}, ("sliding_window", "128")),
    (MISTRAL, {"sliding_window": 0}, ("sliding_window", "0")),
    (QWEN2, {"layer_types": ["full_attention", "chunked_attention"]}, ("layer_types", "chunked")),
    (QWEN2, {"layer_types": SPARSE_NAMES}, ("no sliding_window",)),
    (QWEN2, {"layer_types": ["full_attention"]}, ("layer_types", "2 names")),
    (MISTRAL, {"layer_types": SPARSE_NAMES}, ("layer_types", "architecture")),
    (
        MISTRAL,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        ("rope_parameters", "full_"),
    ),
    (MISTRAL, {"rope_scaling": {"type": "dynamic", "alpha": 1e3}}, ("rope_scaling", "alpha")),
    *refused_values(GEMMA3, sliding_window_pattern=(0,), use_bidirectional_attention=(True,)),
    (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "ntk"}}}, ("rope_type", "ntk")),
    *refused_values(GEMMA2, attn_logit_softcapping=(0,)),
    (GEMMA2, {"hidden_activation": "gelu"}, ("hidden_activation", "gelu_pytorch_tanh")),
    *refused_values(
        "deepseek_v3", scoring_func=("softmax",), topk_method=("greedy",), topk_group=(9,)
    ),
    *refused_values(
        "deepseek_v3", num_experts_per_tok=(257, None), n_routed_experts=(10**6,), kv_lora_rank=(0,)
    ),
    *refused_values(
        "deepseek_v3", q_lora_rank=(-1,), v_head_dim=("128",), compression_config=({},)
    ),
    *refused_values("deepseek_v3", attention_bias=(True,)),
    ("deepseek_v3", {"n_group": 7}, ("n_group: 7 does not divide 8",)),
    ("deepseek_v3", {"n_group": 8, "topk_group": 8}, ("hold 1 each",)),
    ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 1}, ("1 groups hold fewer than 3",)),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, ("odd",)),
    *refused_values(
        "deepseek_v3", architectures=(["DeepseekV32ForCausalLM"], ["GlmMoeDsaForCausalLM"])
    ),
    *refused_values("deepseek_v2_lite", norm_topk_prob=(True,), topk_method=("noaux_tc",)),
    *refused_values("glm4_moe", partial_rotary_factor=(0.01, 1.5)),
    *refused_values(
        "glm4_moe_lite",
        mlp_layer_types=(["moe"] * 3,),
        partial_rotary_factor=(0.5,),
        kv_lora_rank=(None,),
    ),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse"] * 2},
        ("mlp_layer_types: is not a list of 3 names",),
    ),
    ("qwen3_moe", {"num_experts": None}, ("num_experts: is missing",)),
    *refused_values(
        "lfm2",
        full_attn_idxs=([2, 16],),
        block_ff_dim=(0,),
        block_multiple_of=(0,),
        conv_L_cache=(1,),
    ),
    *refused_values("lfm2", conv_bias=(True,)),
    ("lfm2", {"full_attn_idxs": []}, ("full_attn_idxs: no layer is full_attention",)),
    ("lfm2", {"full_attn_idxs": None}, ("layer_types: is missing",)),
    ("lfm2", {"layer_types": ["conv"] * 15}, ("layer_types: is not a list of 4 names",)),
    ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, ("layer_types: 'mamba' is not supported",)),
    *refused_values("lfm2_moe", use_expert_bias=(False,)),
    *refused_values("nemotron_h_moe", mlp_hidden_act=("silu",), moe_latent_size=(0,)),
    *refused_values(
        "nemotron_h_moe",
        use_bias=(True,),
        time_step_limit=([0.001, 0.1],),
        mamba_dt_limit=([0.0, 1.0],),
    ),
    (
        "nemotron_h_moe",
        {"n_routed_experts": None, "num_experts": None},
        ("num_experts: is missing",),
    ),
    *(
        ("nemotron_h_moe", {"hybrid_override_pattern": kinds}, (word,))
        for kinds, word in (
            ("MX*E", "'X'"),
            ("*E-E", "is linear_attention"),
            ("ME-E", "is full_attention"),
        )
    ),
    *refused_values(
        "granite_hybrid",
        mamba_proj_bias=(True,),
        mamba_d_state=(512,),
        time_step_limit=([0.001, 0.1],),
    ),
    *refused_values("granite_hybrid", position_embedding_type=("alibi",)),
    ("granite_hybrid", {"mamba_n_groups": 5}, ("mamba_n_groups: 5 does not divide 8 heads",)),
    (
        "granite_hybrid",
        {"layer_types": ["mamba"] * 4},
        ("layer_types: no layer is full_attention",),
    ),
    ("granite_hybrid", {"layer_types": None}, ("layer_types: is missing",)),
    (
        "granite_hybrid",
        {"layer_types": ["mamba", "conv", "attention", "mamba"]},
        ("'conv' is not supported",),
    ),
]


@pytest.mark.parametrize(("base", "change", "fragments"), REFUSED)
def test_wrong_values_are_refused_by_key(
    tmp_path: Path, saved: SavedConfigs, base: dict | str, change: dict, fragments: tuple
) -> None:
    base = saved(base) if isinstance(base, str) else base
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises_spd_error(CheckpointError, f"{tmp_path}/config.json: ", *fragments, seconds=1):
        read_config(tmp_path, {**base, **change})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_keys_of_another_family_change_nothing(tmp_path: Path) -> None:
    foreign = {
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        "query_pre_attn_scalar": 64,
        "no_rope_layers": [0, 1],
        "no_rope_layer_interval": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.5,
        "logits_scaling": 2.0,
        "logit_scale": 0.5,
        "sliding_window_pattern": "LG",
        "max_window_layers": 1,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    for base in (LLAMA, MISTRAL):
        assert read_config(tmp_path, {**base, **foreign}) == read_config(tmp_path, base)
    slides = {**MISTRAL, "sliding_window": 64}
    assert read_config(tmp_path, {**slides, "use_sliding_window": False}) == read_config(
        tmp_path, slides
    )


PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
LONG = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8}


def test_phi_is_read(tmp_path: Path) -> None:
    config = read_config(tmp_path, {**PHI3, "sliding_window": 64, "partial_rotary_factor": 0.75})
    assert (config.sliding_windows, config.rope.rotary_dim, config.head_dim) == ((64, 64), 12, 16)
    long = {**PHI3, "rope_scaling": LONG, "original_max_position_embeddings": 128}
    short = (1.0,) * 8
    config = read_config(tmp_path, long)
    assert config.rope == RopeConfig("longrope", 5e5, 4.0, 128, rotary_dim=16, short_factor=short)
    # Beyond the original context, earlier positions have other angles: the cache ends there.
    assert config.max_positions == 128
    for factors, fragment in (([1.0] * 7, "8 numbers"), (["x", *[1.0] * 7], "'x'")):
        with raises_spd_error(CheckpointError, "config.json", "short_factor", fragment):
            read_config(tmp_path, {**long, "rope_scaling": {**LONG, "short_factor": factors}})


def test_gemma_is_read(tmp_path: Path) -> None:
    bare = without(GEMMA2, "rope_theta")
    config = read_config(tmp_path, bare)
    assert config.tie_embeddings
    assert (config.attention_softcap, config.logit_softcap, config.scales.scores) == (
        50.0,
        30.0,
        1 / 16,
    )
    off = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 144,
    }
    config = read_config(tmp_path, {**bare, **off})
    assert (config.attention_softcap, config.logit_softcap, config.scales.scores) == (
        None,
        None,
        144.0**-0.5,
    )
    config = read_config(tmp_path, without(GEMMA3, "rope_theta"))
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert (config.rope, config.local_rope) == (
        RopeConfig("default", 1e6),
        RopeConfig("default", 1e4),
    )


def test_auto_map_is_never_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')\nclass Model: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (tmp_path / name).write_text(code)
    evil = {"AutoConfig": "configuration_evil.C", "AutoModel": "modeling_evil.Model"}
    read_config(tmp_path, {**LLAMA, "auto_map": evil})
    assert not canary.exists()


GOOD = json.dumps(LLAMA).encode()
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"", ("is not JSON", "line 1")),
        (b"{", ("is not JSON",)),
        *((data, ("is not a JSON object",)) for data in (b"[1, 2]", b"null")),
        *((GOOD.replace(b"500000.0", word.encode()), ("rope_theta", word)) for word in NOT_FINITE),
        (GOOD.replace(b"500000.0", b"1e999"), ("rope_theta",)),
        (GOOD.replace(b"500000.0", b"1" * 5000), ("number", "too long")),
        (GOOD[:-1] + b', "hidden_size": 65}', ("hidden_size", "twice")),
        *((GOOD.decode().encode(code), ("UTF-16",)) for code in ("utf-16", "utf-16-le")),
        (b'{"a": "\xff"}', ("not UTF-8", "byte 7")),
        (b'{"a": "\\ud800"}', ("surrogate",)),
        *((data, ("nested",)) for data in (b"[" * 10_000 + b"]" * 10_000, b"[" * 1_000_000)),
        (b'{"a":' * 100 + b"1" + b"}" * 100, ("nested",)),
        (b"[" + b"[]," * 3_000_001 + b"0]", ("lists and objects",)),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_wrong_files_are_refused_by_name(
    tmp_path: Path, data: bytes, fragments: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with raises_spd_error(CheckpointError, f"{tmp_path}/config.json: ", *fragments, seconds=2):
        read_model_config(tmp_path)


def test_containers_bound_holds_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_CONTAINERS", 3)
    assert json_file.parse_json('[{}, {"a": 1}]', "x") == [{}, {"a": 1}]
    with pytest.raises(CheckpointError, match="more than 3 lists and objects"):
        json_file.parse_json("[{}, {}, []]", "x")


def test_sampling_parameters_are_read(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig()
    values = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
    }
    other_values = {"do_sample": True, "eos_token_id": [5, 3], "x": 1}
    write_json(tmp_path, "generation_config.json", {**values, **other_values})
    assert read_generation_config(tmp_path) == GenerationConfig(
        eos_token_ids=(5, 3),
        temperature=0.6,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.05,
        top_k=20,
        do_sample=True,
    )
    write_json(tmp_path, "generation_config.json", {"eos_token_id": 7, "temperature": None})
    assert read_generation_config(tmp_path) == GenerationConfig((7,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "0.5", True, 1e9)),
        *(("top_p", value) for value in (0, 1.5, -0.1)),
        *(("top_k", value) for value in (-5, 2.0, 2**40)),
        *(("eos_token_id", value) for value in (-1, [1.0], "3")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("min_p", 2),
        ("do_sample", 1),
    ],
)
def test_wrong_sampling_parameters_are_refused(tmp_path: Path, field: str, value: object) -> None:
    write_json(tmp_path, "generation_config.json", {field: value})
    with raises_spd_error(CheckpointError, "generation_config.json: ", field):
        read_generation_config(tmp_path)


def test_ids_beyond_the_vocabulary_are_logged_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are defaults of classes with a larger vocabulary; no text has them."""
    write_json(tmp_path, "generation_config.json", {"eos_token_id": [3, 300]})
    assert read_generation_config(tmp_path, vocab_size=301).eos_token_ids == (3, 300)
    assert not caplog.text
    assert read_generation_config(tmp_path, vocab_size=300).eos_token_ids == (3,)
    assert "generation_config.json: eos_token_id: no text has id 300" in caplog.text
    config = read_config(tmp_path, {**LLAMA, "bos_token_id": 128000, "eos_token_id": [2, 2**70]})
    assert (config.bos_token_id, config.eos_token_ids) == (None, (2,))
