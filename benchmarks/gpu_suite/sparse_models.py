"""Probe: whole rounds at the shapes of models with latent attention, experts, MTP layers and FP8
blocks.

A folder holds `config.json` and a checkpoint of the right names and shapes whose values take no
disk: the file is one hole. Weights are random, made on the device. Byte floors count the experts
that rows were seen to go to.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.end_to_end import READ_GIB, attempt
from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.room import needed_bytes, plan_anyway, usable_bytes
from benchmarks.gpu_suite.round_times import Load, Recorder, measure_load, with_engine
from spd.formats.folder import ModelFolder
from spd.formats.mtp import MtpSource
from spd.formats.mtp_layout import MTP_FAMILIES, MtpLayout
from spd.runtime import Engine, EngineConfig
from spd.runtime.models import family_layout
from spd.runtime.models.layouts import MoeLayout
from spd.runtime.models.moe import MoeMlp
from spd.runtime.models.mtp_weights import count_module_bytes, module_layer, module_parts
from spd.runtime.models.parameters import Shape
from spd.runtime.models.weight_forms import DTYPE_BYTES
from spd.runtime.models.weights import expected_tensors, iterate_parameters
from spd.runtime.plan.memory import page_bytes, tensor_bytes
from spd.runtime.plan.memory_fit import find_largest
from spd.runtime.round.limits import PAGE_SIZE

CODES = {"bfloat16": "BF16", "float32": "F32"}
LENGTHS = {1: 1.8, 3: 2.6}
"""Tokens a round that are imposed, by k."""
LOAD = Load()
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
BASE = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32, "beta_slow": 1}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class Published:
    """One model's configuration, in as many layers as are measured at most, and its number of MTP
    layers."""

    name: str
    config: Mapping[str, Any]
    modules: int = 0

    @property
    def layers(self) -> int:
        """Return the configuration's layers without MTP layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def fewest_layers(self) -> int:
        """Return the layers that include one of each kind."""
        return int(self.config.get("first_k_dense_replace", 0)) + 1

    def shortened(self, layers: int) -> Published:
        """Return the model with fewer layers."""
        return replace(self, config={**self.config, "num_hidden_layers": layers})

    def family(self) -> str:
        """Return the name of the MTP layout."""
        return {"MiMoForCausalLM": "mimo"}.get(self.config["architectures"][0], "deepseek")


MIMO = Published(
    "MiMo-7B",
    {
        **BASE,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151680,
        "attention_bias": True,
        "rope_theta": 640000,
        "max_position_embeddings": 32768,
    },
    modules=1,
)
V2_LITE = Published(
    "DeepSeek-V2-Lite",
    {
        **BASE,
        **LATENT,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
        "attention_bias": False,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "rope_theta": 10000.0,
        "max_position_embeddings": 163840,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    modules=1,
)
QWEN3_30B = Published(
    "Qwen3-30B-A3B",
    {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    },
)
GLM_AIR = Published(
    "GLM-4.5-Air",
    {
        **BASE,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151552,
        "attention_bias": True,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "max_position_embeddings": 131072,
    },
    modules=1,
)
V3 = Published(
    "DeepSeek-V3 in 4 layers, FP8",
    {
        **BASE,
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_theta": 10000,
        "max_position_embeddings": 163840,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": FP8,
    },
    modules=1,
)
MODELS = (V3, MIMO, QWEN3_30B, V2_LITE, GLM_AIR)
"""What has a gate or nothing like it first: a probe that is stopped keeps what came before."""


def write_hollow(model: Published, parent: Path) -> Path:
    """Write a model's folder.

    Its checkpoint has every name and shape, and zeros that are stored nowhere.
    """
    folder = parent / model.name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    config = ModelFolder(folder).config
    code = CODES[config.dtype]
    layouts = [family_layout(config)]
    if model.modules:
        family = next(candidate for candidate in MTP_FAMILIES if candidate.name == model.family())
        head = MtpLayout(family, model.modules, config.num_layers)
        source = MtpSource(ModelFolder(folder), head, config)
        layouts += [part.layout for part in module_parts(source, model.modules, None)]
    shapes: dict[str, Shape] = {}
    matrices: set[str] = set()
    for layout in layouts:
        shapes |= expected_tensors(config, layout)
        matrices |= {
            prefix + source.name
            for prefix, parameter in iterate_parameters(config, layout)
            if prefix and len(parameter.shape) == 2 and not parameter.is_float32
            for source in parameter.sources
        }
    entries: dict[str, tuple[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        fp8 = config.quantization is not None and name in matrices
        entries[name] = ("F8_E4M3" if fp8 else code, shape)
        if fp8:
            entries[f"{name}_scale_inv"] = ("F32", [-(-size // 128) for size in shape])
    _write_hole(folder / "model.safetensors", entries)
    return folder


def _write_hole(path: Path, entries: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Write a safetensors file with a header and a hole."""
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    offset = 0
    header = {}
    for name, (code, shape) in entries.items():
        size = sizes[code]
        for dimension in shape:
            size *= dimension
        header[name] = {
            "dtype": code,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def touched_experts(engine: Engine, load: Load, vocab: int) -> float:
    """Return the mean number of a layer's experts in one verification. Synchronizes: not timed."""
    counts: list[int] = []
    rows = engine.plan.shape.slots * (engine.plan.shape.draft_max + 1)
    max_experts = max(
        4 * rows, 16 if engine.plan.shape.kernels == "torch" else 0
    )  # torch's form fills rows up
    layers: Any = getattr(engine.round_queue.runner.model, "layers")  # noqa: B009
    for block in (layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)):
        honest = block.router

        def noted(x: Any, tile: int, honest: Any = honest) -> Any:
            chosen = honest(x, tile)
            if x.shape[0] <= max_experts:
                counts.append(int(chosen[0][:rows].unique().numel()))
            return chosen

        setattr(block, "router", noted)  # noqa: B010
    measure_load(engine, Recorder.of(engine), load, vocab)
    return sum(counts) / len(counts) if counts else 0.0


def floor_parts(engine: Engine, context: float, touched: float) -> dict[str, float]:
    """Return the bytes that a round must read: matrices once, `touched` experts a layer, contexts,
    k drafts.

    A draft pass reads the module's own matrices, of experts those of one token, and the head.
    """
    plan = engine.plan
    config = plan.model.config
    form = plan.shape.form
    width = DTYPE_BYTES[plan.shape.dtype]
    table = config.vocab_size * config.hidden_size
    weights = float(tensor_bytes(config, plan.shape.dtype, form)) - table * width
    for prefix, layer in (
        (f"model.layers.{i}.", block) for i, block in enumerate(family_layout(config).layers)
    ):
        if isinstance(layer.mlp, MoeLayout):
            weights -= _unread(
                layout=layer.mlp, prefix=prefix, form=form, dtype=plan.shape.dtype, touched=touched
            )
    positions = plan.shape.slots * context * page_bytes(config, plan.shape.dtype) / PAGE_SIZE
    drafts = plan.shape.draft_max * _draft_bytes(engine, config)
    return {
        "target layers": weights - table * width,
        "target head": float(table * width),
        "target keys and values": float(positions),
        **({"drafts": float(drafts)} if plan.shape.draft_max else {}),
    }


def _unread(layout: MoeLayout, prefix: str, form: Any, dtype: str, touched: float) -> float:
    """Return the bytes of a layer's experts that no token uses."""
    sizes = layout.parameters()
    stored = sum(
        form.bytes_of(sizes[n], prefix, dtype) for n in ("experts_gate_up", "experts_down")
    )
    return float(stored * (1 - min(1.0, touched / layout.experts.num_experts)))


def _draft_bytes(engine: Engine, config: Any) -> float:
    source = engine.plan.shape.mtp
    if source is None:
        return 0.0
    form = engine.plan.shape.draft_form
    layer = module_layer(config, source.layout.family)
    total = count_module_bytes(source, 0, engine.plan.shape.dtype, form)
    if isinstance(layer.mlp, MoeLayout):
        chosen = layer.mlp.experts.router.per_token * engine.plan.shape.slots
        total -= int(
            _unread(
                layout=layer.mlp,
                prefix=source.layout.layer_prefix(0),
                form=form,
                dtype=engine.plan.shape.dtype,
                touched=chosen,
            )
        )
    return float(
        total + config.vocab_size * config.hidden_size * DTYPE_BYTES[engine.plan.shape.dtype]
    )


def measure_model(engine: Engine, load: Load, rate: float, touched: float) -> dict[str, Any]:
    """Measure steady rounds of one engine, their floor and its share of the wall time."""
    vocab = engine.plan.model.config.vocab_size
    result = measure_load(engine, Recorder.of(engine), load, vocab)
    parts = floor_parts(engine, result["context"], touched)
    floor_us = 1e6 * sum(parts.values()) / rate
    stated = {"bytes": parts, "weights": engine.plan.weights, "touched_experts": touched}
    return {
        **result,
        **stated,
        "floor_us": floor_us,
        "share_of_floor": floor_us / result["wall_us"],
    }


def options_at(folder: Path, load: Load, k: int) -> dict[str, Any]:
    """Return the options of an engine on random weights that drafts k tokens at imposed
    acceptance."""
    options: dict[str, Any] = {"model": folder, "load": "dummy", "prefix_sharing": False}
    options |= {"ctx": load.context(k), "spec": "off"}
    if k:
        options |= {"spec": "mtp", "draft_max": k, "adaptive": False}
        options |= {"synthetic_acceptance": LENGTHS[k]}
    return options


def lengths_of(model: Published) -> tuple[int, ...]:
    """Return every k that the model is measured at."""
    return (0, *(LENGTHS if model.modules else ()))


def shorten_to_fit(model: Published, parent: Path, load: Load, **options: Any) -> Published:
    """Return the model with the layers that memory holds at every k, at least `fewest_layers`."""

    def fits(layers: int) -> bool:
        if layers < model.fewest_layers:
            return True
        folder = write_hollow(model.shortened(layers), parent)
        config = EngineConfig(**{**options_at(folder, load, max(lengths_of(model))), **options})
        plan = plan_anyway(config)
        return needed_bytes(plan) <= usable_bytes(config, plan.device)

    return model.shortened(max(model.fewest_layers, find_largest(fits, model.layers, 1)))


def run(
    models: Sequence[Published] = MODELS,
    load: Load = LOAD,
    read_rate: float | None = None,
    **overrides: Any,
) -> Iterator[dict[str, Any]]:
    """Measure each model plain and, with MTP layers, drafting 1 and 3 tokens at imposed
    acceptance."""
    rate = read_rate or float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    results: dict[str, Any] = {}
    report: dict[str, Any] = {"read_bytes_per_second": rate, "models": results}
    short_load = Load(load.slots, load.prompt, 2, 4, load.params)
    with tempfile.TemporaryDirectory() as place:
        for model in models:
            free_memory()
            chosen = shorten_to_fit(model, Path(place), load, **overrides)
            folder = write_hollow(chosen, Path(place))
            rows = results.setdefault(model.name, {})
            for k in lengths_of(model):
                options = {**options_at(folder, load, k), **overrides}

                def rounds(options: dict[str, Any] = options) -> dict[str, Any]:
                    eager = EngineConfig(**{**options, "graphs": False})
                    vocab = ModelFolder(options["model"]).config.vocab_size
                    touched = with_engine(
                        eager, partial(touched_experts, load=short_load, vocab=vocab)
                    )
                    free_memory()
                    work = partial(measure_model, load=load, rate=rate, touched=touched)
                    return with_engine(EngineConfig(**options), work)

                rows[f"k={k}"] = {"layers": chosen.layers, "of": model.layers, **attempt(rounds)}
                yield report
