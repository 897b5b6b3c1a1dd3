"""Print the tables of parallel.md: `python docs/parallel_tables.py`. From a cost model, not measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
"""Bytes per second that a rank reads: 0.8 of an H100 SXM's data sheet."""
Exchange = list[int]
"""The bytes of one rank's part of each all-gather: of N ranks each receives N - 1 times as many."""


def pass_exchange(layers: int, hidden: int, rows: int, width: int) -> Exchange:
    """Return the exchange of a forward pass: the embedding and two sums per layer.

    rows: of `hidden` elements of `width` bytes.
    """
    return [rows * hidden * width] * (2 * layers + 1)


def logits_exchange(rows: int, vocab_size: int, ranks: int) -> Exchange:
    """Return the exchange of float32 logits of rows, of which each rank has its part of the ids."""
    return [rows * 4 * -(-vocab_size // ranks)]


@dataclass(frozen=True)
class Speeds:
    """The latency of a collective, seconds, and its rate, bytes per second."""

    latency: float
    rate: float

    def seconds(self, nbytes: float, group: int, exchange: Exchange) -> float:
        """Return the seconds of a pass of a model of `nbytes` that a group of ranks divides."""
        reading = nbytes / group / READ_RATE
        if group == 1:
            return reading
        return reading + (len(exchange) * self.latency + sum(exchange) * (group - 1) / self.rate)


def draft_seconds(
    speeds: Speeds, config: ModelConfig, group: int, module: LayerLayout | None
) -> float:
    """Return the seconds of one draft token for one request; module: see `streamed_bytes`."""
    layers = config.num_layers if module is None else 1
    exchange = pass_exchange(layers, config.hidden_size, 1, WIDTH)
    exchange += logits_exchange(1, config.vocab_size, group)
    return speeds.seconds(streamed_bytes(config, module), group, exchange)


def streamed_bytes(config: ModelConfig, module: LayerLayout | None = None) -> float:
    """Return the bytes of weights that a pass over one row reads.

    These are all but the embedding's table and the experts that are not routed to.
    module: the one layer of an MTP head of this model, which has a projection before it.
    """
    layout = family_layout(config)
    hidden = config.hidden_size
    outside_layers = config.vocab_size * hidden + (0 if module is None else 2 * hidden * hidden)
    total = 0.0
    for layer in layout.layers if module is None else (module,):
        layer_size = float(sum(parameter.size for parameter in layer.parameters()))
        if isinstance(layer.mlp, MoeLayout):
            routed = layer.mlp.parameters()
            experts = layer.mlp.experts
            experts_size = routed["experts_gate_up"].size + routed["experts_down"].size
            layer_size -= experts_size * (1 - experts.router.per_token / experts.num_experts)
        total += layer_size
    return WIDTH * (outside_layers + total)


LINKS = {
    "NVLink": Speeds(10e-6, 360e9),
    "PCIe": Speeds(25e-6, 40e9),
    "two nodes": Speeds(40e-6, 40e9),
}
"""Latencies are assumed. Rates are 0.8 of one direction of 450 GB/s (NVLink 4) and of 50 GB/s.

The latter is PCIe 5.0 x16 without its protocol, and NDR InfiniBand, 400 Gb/s.
"""


def _make_config(architecture: str, **fields: Any) -> ModelConfig:
    """Return the configuration of these fields, which have the names of config.json."""
    config = {
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
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelFolder(Path(folder)).config


def _make_llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return _make_config(
        "LlamaForCausalLM",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32000,
    )


DEEPSEEK = _make_config(
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
TARGETS = {"70B": _make_llama(8192, 28672, 80, 64, 8), "DeepSeek-V3": DEEPSEEK}
MODELS = {
    "68M": _make_llama(768, 3072, 2, 12, 12),
    "160M": _make_llama(768, 3072, 12, 12, 12),
    "1B": _make_llama(2048, 5632, 22, 32, 4),
    "7B": _make_llama(4096, 11008, 32, 32, 32),
}


def _verification_exchange(config: ModelConfig, ranks: int) -> Exchange:
    """Return the exchange of a verification by the target."""
    rows = DRAFTS + 1
    logits = logits_exchange(rows, config.vocab_size, ranks)
    return pass_exchange(config.num_layers, config.hidden_size, rows, WIDTH) + logits


def _format_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _header_rows(cells: Sequence[str]) -> Iterator[str]:
    """Yield the header of a Markdown table and the line below it."""
    yield _format_row(cells)
    yield _format_row(["---"] * len(cells))


def exchange_table() -> Iterator[str]:
    """Yield the table of collectives of a verification and the bytes that a rank receives."""
    yield from _header_rows(["target", *(f"TP {size}" for size in SIZES)])
    for name, config in TARGETS.items():
        cells = []
        for size in SIZES:
            exchange = _verification_exchange(config, size) if size > 1 else []
            cells.append(f"{len(exchange)} · {sum(exchange) * (size - 1) / 2**20:.2f} MiB")
        yield _format_row([name, *cells])


def verify_table() -> Iterator[str]:
    """Yield the table of milliseconds of a verification."""
    yield from _header_rows(["target", "link", *(f"TP {size}" for size in SIZES)])
    for name, config in TARGETS.items():
        nbytes = streamed_bytes(config)
        for link, speeds in LINKS.items():
            times = [
                speeds.seconds(nbytes, size, _verification_exchange(config, size)) for size in SIZES
            ]
            yield _format_row([name, link, *(f"{1000 * seconds:.1f}" for seconds in times)])


def draft_table() -> Iterator[str]:
    """Yield the table of milliseconds per draft token, the least of a row in bold."""
    yield from _header_rows(["drafter", "link", *(f"draft TP {size}" for size in SIZES)])
    drafters: dict[str, tuple[ModelConfig, LayerLayout | None]] = {
        name: (config, None) for name, config in MODELS.items()
    }
    drafters["DeepSeek-V3's MTP"] = (DEEPSEEK, family_layout(DEEPSEEK).layers[-1])
    for name, (config, module) in drafters.items():
        possible = possible_rank_counts(config, SIZES)
        for link, speeds in LINKS.items():
            times = {size: 1000 * draft_seconds(speeds, config, size, module) for size in possible}
            least = min(times.values())
            cells = []
            for size in SIZES:
                text = f"{times[size]:.2f}" if size in times else ""
                cells.append(f"**{text}**" if times.get(size) == least else text)
            yield _format_row([name, link, *cells])


def make_tables() -> dict[str, str]:
    """Return every table by its name."""
    lines_by_name = {"exchange": exchange_table(), "verify": verify_table(), "draft": draft_table()}
    return {name: "\n".join(lines) for name, lines in lines_by_name.items()}


if __name__ == "__main__":
    for name, table in make_tables().items():
        print(f"<!-- {name} -->\n{table}\n")
