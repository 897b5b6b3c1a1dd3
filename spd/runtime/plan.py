"""What will be done: every `auto` resolved, before any weight is loaded.

Each rule is a small function. The plan is printed by `inspect`, logged with `-v`, and part of every
JSON result.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spd.errors import IncompatibleError, ResourceError, UsageError
from spd.formats.checkpoint import Checkpoint
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.model_config import ModelConfig, read_model_config
from spd.formats.tokenizer import Tokenizer
from spd.runtime.config import EngineConfig
from spd.runtime.page_table import NUM_RESERVED

PAGE_SIZE = 64
CHUNK = {"cpu": 64, "cuda": 512}
DEFAULT_DRAFT_MAX = {"draft": 4, "ngram": 8}
AUTO_CTX = 32768
"""Context that `auto` stops at; longer ones are had by asking."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class EnginePlan:
    """One engine's resolved decisions; sizes in tokens, pages and bytes as named."""

    model: str
    architecture: str
    device: str
    dtype: str
    spec: str
    spec_reason: str
    draft_model: str | None
    draft_max: int
    draft_ctx: int
    adaptive: bool
    ngram_min: int
    ngram_max: int
    verify: str
    lag: int
    graphs: bool
    kernels: str
    slots: int
    ctx: int
    page_size: int
    num_pages: int
    chunk: int
    prefix_sharing: bool
    threads: int
    load: str
    weight_bytes: int
    draft_weight_bytes: int
    cache_bytes: int
    memory_budget_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return asdict(self)


def _device(wish: str) -> str:
    if wish in ("auto", "cpu"):
        return "cuda" if wish == "auto" and torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise ResourceError(f"--device {wish}, but torch sees no CUDA device", fix=["--device cpu"])
    if wish != "cuda" and int(wish[5:]) >= torch.cuda.device_count():
        raise ResourceError(f"--device {wish}, but there are {torch.cuda.device_count()} CUDA devices")
    return wish


def cpu_has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AMX or AVX512-BF16)."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def _dtype(wish: str, device: str, config: ModelConfig) -> str:
    if wish != "auto":
        return wish
    if device == "cpu":
        return "bfloat16" if config.dtype != "float32" and cpu_has_fast_bfloat16() else "float32"
    return config.dtype


def _physical_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _memory_budget(device: str, fraction: float) -> int:
    if device != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * fraction)
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 2**62
    return int(available * fraction)


def same_vocabulary(target: Path, draft: Path) -> bool:
    """Whether two folders' tokenizers agree on every id; True where neither has a tokenizer."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if not any(file.exists() for file in files):
        return True
    if not all(file.exists() for file in files):
        return False
    return Tokenizer.open(target).fingerprint() == Tokenizer.open(draft).fingerprint()


def _require_same_vocabulary(target: Path, draft: Path) -> None:
    if not same_vocabulary(target, draft):
        raise IncompatibleError(
            "the draft model does not share the target's vocabulary",
            reason=[
                f"target {target}",
                f"draft  {draft}",
                "Accepted tokens would be other text than proposed.",
            ],
            fix=["--spec ngram", "--draft-model FOLDER with the same tokenizer.json"],
            code="vocab_mismatch",
        )


def _method(config: EngineConfig) -> tuple[str, Path | None, str]:
    """(method, draft folder, why) of the speculation that will be done."""
    draft = config.draft_model
    if draft is None and config.spec in ("auto", "draft") and config.model == demo_folder():
        draft = demo_draft_folder() if demo_draft_folder().exists() else None
    if config.spec == "off":
        return "off", None, "asked for"
    if config.spec == "ngram":
        return "ngram", None, "asked for"
    if config.spec == "draft" and draft is None:
        raise UsageError("--spec draft needs a draft model", fix=["--draft-model FOLDER", "--spec ngram"])
    if draft is not None:
        _require_same_vocabulary(config.model, draft)
        return "draft", draft, "asked for" if config.draft_model else "the model's own draft"
    return "ngram", None, "no draft model is known for this model"


def _page_bytes(config: ModelConfig, dtype: str) -> int:
    return 2 * config.num_layers * PAGE_SIZE * config.num_kv_heads * config.head_dim * DTYPE_BYTES[dtype]


def _weight_bytes(folder: Path, config: ModelConfig, dtype: str, load: str) -> int:
    if load == "dummy":
        per_layer = config.hidden_size * (
            2 * config.num_heads * config.head_dim
            + 2 * config.num_kv_heads * config.head_dim
            + 3 * config.intermediate_size
        )
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        return (config.num_layers * per_layer + tables) * DTYPE_BYTES[dtype]
    with Checkpoint.open(folder) as checkpoint:
        sizes = {"F32": 4, "F64": 8}
        return sum(
            meta.nbytes * DTYPE_BYTES[dtype] // sizes.get(meta.dtype, 2)
            for meta in checkpoint.tensors.values()
        )


def _context(config: EngineConfig, model: ModelConfig, page_bytes: int, memory: int) -> int:
    if config.ctx is not None:
        if config.ctx > model.max_positions:
            raise IncompatibleError(
                f"--ctx {config.ctx} is more than the model's {model.max_positions} positions",
                fix=[f"--ctx {model.max_positions}"],
            )
        return config.ctx
    fitting = max(0, memory) // max(1, page_bytes * config.slots) * PAGE_SIZE
    return (
        max(min(model.max_positions, AUTO_CTX), 2)
        if fitting >= AUTO_CTX
        else min(model.max_positions, fitting)
    )


def _pages(ctx: int, slots: int) -> int:
    """Pages for every slot at full length, in whole attention blocks, and the reserved ones."""
    block = 512
    return NUM_RESERVED + slots * (-(-(ctx + 64) // block)) * (block // PAGE_SIZE)


def make_plan(config: EngineConfig) -> EnginePlan:
    """Resolve every `auto`. Reads configurations and headers only.

    Raises the error of whatever cannot be honoured; ResourceError names the flag that frees memory.
    """
    model = read_model_config(config.model)
    device = _device(config.device)
    kind = "cpu" if device == "cpu" else "cuda"
    dtype = _dtype(config.dtype, device, model)
    method, draft_folder, reason = _method(config)
    draft = read_model_config(draft_folder) if draft_folder else None
    weights = _weight_bytes(config.model, model, dtype, config.load)
    draft_weights = _weight_bytes(draft_folder, draft, dtype, config.load) if draft and draft_folder else 0
    budget = _memory_budget(device, config.memory_fraction)
    page_bytes = _page_bytes(model, dtype) + (_page_bytes(draft, dtype) if draft else 0)
    ctx = _context(config, model, page_bytes, budget - weights - draft_weights)
    num_pages = _pages(ctx, config.slots)
    need = weights + draft_weights + (num_pages * page_bytes if ctx >= 2 else 0)
    if ctx < 2 or need > budget:
        gib = 2**30
        raise ResourceError(
            f"not enough memory on {device}",
            reason=[
                f"need {need / gib:.2f} GiB (weights {weights / gib:.2f}, draft {draft_weights / gib:.2f}, "
                f"kv {num_pages * page_bytes / gib:.2f} for {ctx} tokens), usable {budget / gib:.2f} GiB"
            ],
            fix=[
                "--ctx N with a smaller context",
                "--spec ngram (frees the draft model)",
                "--memory-fraction 1.0",
            ],
        )
    draft_max = DEFAULT_DRAFT_MAX.get(method, 0) if config.draft_max is None else config.draft_max
    draft_ctx = min(draft.max_positions if draft else ctx, config.draft_ctx or ctx, ctx)
    return EnginePlan(
        model=str(config.model),
        architecture=model.architecture,
        device=device,
        dtype=dtype,
        spec=method if draft_max else "off",
        spec_reason=reason,
        draft_model=str(draft_folder) if draft_folder else None,
        draft_max=draft_max if method != "off" else 0,
        draft_ctx=draft_ctx,
        adaptive=config.adaptive,
        ngram_min=config.ngram_min,
        ngram_max=config.ngram_max,
        verify=config.verify,
        lag=config.lag if config.lag is not None else (0 if kind == "cpu" else 1),
        graphs=False,
        kernels="torch",
        slots=config.slots,
        ctx=ctx,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        chunk=CHUNK[kind],
        prefix_sharing=config.prefix_sharing,
        threads=config.threads or _physical_cores(),
        load=config.load,
        weight_bytes=weights,
        draft_weight_bytes=draft_weights,
        cache_bytes=num_pages * page_bytes,
        memory_budget_bytes=budget,
    )
