"""Writes the tables of parallel.md: `python docs/parallel_tables.py`. A model's figures, not measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spd.formats.model_config import ModelConfig, read_model_config
from spd.runtime.models import family_layout
from spd.runtime.plan import rank_cost as cost

SIZES = (1, 2, 4, 8, 16)
LINKS = (cost.NVLINK, cost.PCIE, cost.NODES)
WIDTH = 2
DRAFTS = 4


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
        return read_model_config(Path(folder))


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


def _mtp_cost() -> cost.DraftCost:
    layer, hidden = family_layout(DEEPSEEK).layers[-1], DEEPSEEK.hidden_size
    around = (DEEPSEEK.vocab_size + 2 * hidden) * hidden * WIDTH
    return cost.DraftCost(hidden, 1, cost.layer_bytes(layer, WIDTH) + around, WIDTH)


def _draft_cost(config: ModelConfig) -> cost.DraftCost:
    nbytes = cost.streamed_bytes(config, WIDTH)
    return cost.DraftCost(config.hidden_size, config.num_layers, nbytes, WIDTH)


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
            found = cost.pass_exchange(config, size, DRAFTS + 1, WIDTH) + cost.draw_exchange(size, DRAFTS + 1)
            cells.append(f"{found.collectives} · {found.bytes / 2**20:.2f} MiB")
        yield _row(name, *cells)


def verify_table() -> Iterator[str]:
    """Milliseconds of a verification."""
    yield from _head("target", "link", *(f"TP {size}" for size in SIZES))
    for name, config in TARGETS.items():
        nbytes = cost.streamed_bytes(config, WIDTH)
        for link in LINKS:
            speeds = cost.Speeds(cost.GPU_READ, link)
            cells = []
            for size in SIZES:
                found = cost.pass_exchange(config, size, DRAFTS + 1, WIDTH)
                found += cost.draw_exchange(size, DRAFTS + 1)
                cells.append(f"{1000 * speeds.seconds(nbytes, size, size, found):.1f}")
            yield _row(name, link.name, *cells)


def draft_table() -> Iterator[str]:
    """Milliseconds a draft token, the least of a row in bold."""
    yield from _head("drafter", "link", *(f"draft TP {size}" for size in SIZES))
    drafters = {name: (config, _draft_cost(config)) for name, config in MODELS.items()}
    drafters["DeepSeek-V3's MTP"] = (DEEPSEEK, _mtp_cost())
    for name, (config, each) in drafters.items():
        possible = cost.possible_sizes(family_layout(config).layers, config.vocab_size, SIZES[-1])
        for link in LINKS:
            speeds = cost.Speeds(cost.GPU_READ, link)
            times = {size: 1000 * each.seconds(speeds, size, SIZES[-1]) for size in possible}
            least = min(times.values())
            cells = [
                ""
                if size not in times
                else f"**{times[size]:.2f}**"
                if times[size] == least
                else f"{times[size]:.2f}"
                for size in SIZES
            ]
            yield _row(name, link.name, *cells)


def tables() -> dict[str, str]:
    """Every table by its name."""
    made = {"exchange": exchange_table(), "verify": verify_table(), "draft": draft_table()}
    return {name: "\n".join(lines) for name, lines in made.items()}


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"<!-- {name} -->\n{table}\n")
