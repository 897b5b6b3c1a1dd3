"""Writes the tables of parallel.md: `python docs/parallel_tables.py`. A model's figures, not measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig
from spd.runtime.models import family_layout
from spd.runtime.models.layouts import LayerLayout, MoeLayout
from spd.runtime.plan.plan import possible_rank_counts

SIZES = (1, 2, 4, 8, 16)
WIDTH = 2
DRAFTS = 4
READ_RATE = 0.8 * 3.35e12
"""Bytes a rank reads a second: 0.8 of an H100 SXM's data sheet."""
Exchange = list[int]
"""Of each all-gather the bytes of one rank's part: with N ranks each receives N - 1 times as many."""


def pass_exchange(layers: int, hidden: int, rows: int, width: int) -> Exchange:
    """A forward pass over rows of `hidden` elements of `width` bytes: the embedding, two sums a layer."""
    return [rows * hidden * width] * (2 * layers + 1)


def logits_exchange(rows: int, vocab_size: int, ranks: int) -> Exchange:
    """Float32 logits of rows: each rank's own ids."""
    return [rows * 4 * -(-vocab_size // ranks)]


@dataclass(frozen=True)
class Speeds:
    """Seconds before a collective's first byte, and its bytes a second."""

    latency: float
    rate: float

    def seconds(self, nbytes: float, group: int, exchange: Exchange) -> float:
        """A pass of a model of `nbytes`, divided among each group of ranks."""
        reading = nbytes / group / READ_RATE
        if group == 1:
            return reading
        return reading + (len(exchange) * self.latency + sum(exchange) * (group - 1) / self.rate)


def draft_seconds(
    speeds: Speeds, config: ModelConfig, group: int, module: LayerLayout | None
) -> float:
    """One draft token for one request; module: see `streamed_bytes`."""
    layers = config.num_layers if module is None else 1
    exchange = pass_exchange(layers, config.hidden_size, 1, WIDTH)
    exchange += logits_exchange(1, config.vocab_size, group)
    return speeds.seconds(streamed_bytes(config, module), group, exchange)


def streamed_bytes(config: ModelConfig, module: LayerLayout | None = None) -> float:
    """Weights that a pass over one row reads: all but the embedding's table and the experts not chosen.

    module: the one layer of an MTP head that drafts for this model; a projection stands before it.
    """
    layout = family_layout(config)
    hidden = config.hidden_size
    around = config.vocab_size * hidden + (0 if module is None else 2 * hidden * hidden)
    total = 0.0
    for layer in layout.layers if module is None else (module,):
        own = float(sum(destination.size for destination in layer.destinations()))
        if isinstance(layer.mlp, MoeLayout):
            routed = layer.mlp.destinations()
            experts = layer.mlp.experts
            every = routed["experts_gate_up"].size + routed["experts_down"].size
            own -= every * (1 - experts.router.per_token / experts.num_experts)
        total += own
    return WIDTH * (around + total)


LINKS = {
    "NVLink": Speeds(10e-6, 360e9),
    "PCIe": Speeds(25e-6, 40e9),
    "two nodes": Speeds(40e-6, 40e9),
}
"""Latencies are assumed; rates are 0.8 of one direction of 450 GB/s (NVLink 4) and of 50 GB/s (PCIe 5.0 x16
after its protocol; NDR InfiniBand, 400 Gb/s)."""


def _config(architecture: str, **fields: Any) -> ModelConfig:
    """A model of these shapes; names of fields as in config.json."""
    whole = {
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        **fields,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(whole))
        return ModelFolder(Path(folder)).config


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return _config(
        "LlamaForCausalLM",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32000,
    )


DEEPSEEK = _config(
    "DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    vocab_size=129280,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
TARGETS = {"70B": _llama(8192, 28672, 80, 64, 8), "DeepSeek-V3": DEEPSEEK}
MODELS = {
    "68M": _llama(768, 3072, 2, 12, 12),
    "160M": _llama(768, 3072, 12, 12, 12),
    "1B": _llama(2048, 5632, 22, 32, 4),
    "7B": _llama(4096, 11008, 32, 32, 32),
}


def _verification(config: ModelConfig, ranks: int) -> Exchange:
    """What ranks exchange while the target verifies."""
    rows = DRAFTS + 1
    logits = logits_exchange(rows, config.vocab_size, ranks)
    return pass_exchange(config.num_layers, config.hidden_size, rows, WIDTH) + logits


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*("---" for _ in cells))


def exchange_table() -> Iterator[str]:
    """What a rank takes part in and receives while the target verifies."""
    yield from _head("target", *(f"TP {size}" for size in SIZES))
    for name, config in TARGETS.items():
        cells = []
        for size in SIZES:
            found = _verification(config, size) if size > 1 else []
            cells.append(f"{len(found)} · {sum(found) * (size - 1) / 2**20:.2f} MiB")
        yield _row(name, *cells)


def verify_table() -> Iterator[str]:
    """Milliseconds of a verification."""
    yield from _head("target", "link", *(f"TP {size}" for size in SIZES))
    for name, config in TARGETS.items():
        nbytes = streamed_bytes(config)
        for link, speeds in LINKS.items():
            times = [speeds.seconds(nbytes, size, _verification(config, size)) for size in SIZES]
            yield _row(name, link, *(f"{1000 * seconds:.1f}" for seconds in times))


def draft_table() -> Iterator[str]:
    """Milliseconds a draft token, the least of a row in bold."""
    yield from _head("drafter", "link", *(f"draft TP {size}" for size in SIZES))
    drafters: dict[str, tuple[ModelConfig, LayerLayout | None]] = {
        name: (config, None) for name, config in MODELS.items()
    }
    drafters["DeepSeek-V3's MTP"] = (DEEPSEEK, family_layout(DEEPSEEK).layers[-1])
    for name, (config, module) in drafters.items():
        possible = possible_rank_counts(config, SIZES)
        for link, speeds in LINKS.items():
            times = {size: 1000 * draft_seconds(speeds, config, size, module) for size in possible}
            least = min(times.values())
            cells = [
                ""
                if size not in times
                else f"**{times[size]:.2f}**"
                if times[size] == least
                else f"{times[size]:.2f}"
                for size in SIZES
            ]
            yield _row(name, link, *cells)


def tables() -> dict[str, str]:
    """Every table by its name."""
    made = {"exchange": exchange_table(), "verify": verify_table(), "draft": draft_table()}
    return {name: "\n".join(lines) for name, lines in made.items()}


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"<!-- {name} -->\n{table}\n")
