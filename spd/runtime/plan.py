"""What will be done: every `auto` resolved, before any weight is loaded.

Each rule is a small function. The plan is printed by `inspect`, logged with `-v`, and part of every
JSON result.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spd.errors import IncompatibleError, ResourceError, UsageError
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.model_config import ModelConfig, read_model_config
from spd.formats.tokenizer import Tokenizer
from spd.runtime.config import EngineConfig
from spd.runtime.memory import (
    ATTENTION_BLOCK,
    AUTO_CTX,
    CHUNK,
    DEFAULT_DRAFT_MAX,
    PAGE_SIZE,
    MemoryShape,
    at_context,
    fewest_pages,
    largest,
    measure,
    refusal,
)
from spd.runtime.page_table import NUM_RESERVED


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
    draft_tiers: tuple[int, ...]
    draft_ctx: int
    adaptive: bool
    ngram_min: int
    ngram_max: int
    verify: str
    synthetic_acceptance: float | None
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
    workspace_bytes: int
    graph_bytes: int
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


def _kernels(wish: str, device: str, dtype: str) -> str:
    """Triton where there is a GPU; asked for on CPU, only in Triton's interpreter, which is for tests."""
    if wish == "torch" or (wish == "auto" and device == "cpu"):
        return "torch"
    try:
        from triton import knobs
    except ImportError as error:
        if wish == "auto":
            return "torch"
        raise ResourceError(
            "--kernels triton, but triton is not installed", fix=["--kernels torch"]
        ) from error
    if device != "cpu":
        return "triton"
    if not knobs.runtime.interpret:
        raise ResourceError(
            "--kernels triton needs a CUDA device",
            reason=["Without one they run only in Triton's interpreter: set TRITON_INTERPRET=1 (very slow)."],
            fix=["--kernels torch"],
        )
    if dtype == "bfloat16":
        raise IncompatibleError(
            "Triton's interpreter gets bfloat16 products wrong", fix=["--dtype float32", "--kernels torch"]
        )
    return "triton"


def _graphs(wish: bool | None, device: str, kernels: str) -> bool:
    """Rounds are captured where their kernels ask nothing of the host."""
    possible = device != "cpu" and kernels == "triton"
    if wish and not possible:
        raise IncompatibleError(
            "--graphs on needs a CUDA device and Triton kernels",
            reason=[f"device {device}, kernels {kernels}"],
            fix=["--graphs off"],
        )
    return possible and wish is not False


def _synthetic_acceptance(length: float | None, draft_max: int) -> float | None:
    if length is not None and not 1 <= length <= draft_max + 1:
        raise UsageError(
            f"--synthetic-acceptance {length:g} is out of range",
            reason=[f"valid: 1 to {draft_max + 1}: a round commits its accepted drafts and one token more"],
            fix=["--draft-max K with a larger K"],
        )
    return length


def _draft_tiers(draft_max: int, graphs: bool) -> tuple[int, ...]:
    """The values of k that adapting may choose: few where each is a graph of its own."""
    if not graphs:
        return tuple(range(draft_max + 1))
    return tuple(sorted({0, draft_max, *(k for k in (1, 2, 4, 6, 8, 12, 16, 24) if k < draft_max)}))


def _physical_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _free_memory(device: str) -> int:
    """Bytes that can be had on a device; beyond all bounds where nobody can say."""
    if device != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is handed out before anything new.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 2**62
    return available


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


def _shape(
    config: EngineConfig,
    model: ModelConfig,
    draft: ModelConfig | None,
    dtype: str,
    kernels: str,
    graphs: bool,
    draft_max: int,
    on_cpu: bool,
) -> MemoryShape:
    """What is asked for in numbers; an automatic context is as long as it may become."""
    if config.ctx is not None and config.ctx > model.max_positions:
        raise IncompatibleError(
            f"--ctx {config.ctx} is more than the model's {model.max_positions} positions",
            fix=[f"--ctx {model.max_positions}"],
        )
    ctx = config.ctx or max(2, min(model.max_positions, AUTO_CTX))
    return MemoryShape(
        target=model,
        draft=draft if draft_max else None,
        dtype=dtype,
        slots=config.slots,
        ctx=ctx,
        draft_ctx=min(draft.max_positions if draft else ctx, config.draft_ctx or ctx, ctx),
        draft_max=draft_max,
        chunk=CHUNK[kernels],
        kernels=kernels,
        graphs=graphs,
        on_cpu=on_cpu,
        pages=config.cache_pages,
        keep_laws=config.verify != "coupled",
    )


def _fitted(config: EngineConfig, shape: MemoryShape, device: str, free: int) -> MemoryShape:
    """The shape, with an automatic context and page number cut to what fits.

    Pages are cut first, down to what one request needs. Raises ResourceError if nothing fits.
    """
    usable = int(free * config.memory_fraction)

    def least(ctx: int) -> MemoryShape:
        return replace(at_context(shape, ctx), squeezed=shape.slots > 1)

    def fits(ctx: int) -> bool:
        return measure(least(ctx)).total <= usable

    ctx = shape.ctx if config.ctx else largest(fits, shape.ctx, PAGE_SIZE)
    if not ctx or not fits(ctx):
        smallest = least(ctx or min(shape.ctx, PAGE_SIZE))
        raise refusal(smallest, device, free, config.memory_fraction, config.draft_model is not None)
    whole = at_context(shape, ctx)
    if whole.pages is not None or measure(whole).total <= usable:
        return whole
    step = ATTENTION_BLOCK // PAGE_SIZE
    pages = largest(lambda n: measure(replace(whole, pages=n)).total <= usable, whole.num_pages, step)
    return replace(whole, pages=max(pages, fewest_pages(ctx)))


def _check_pages(shape: MemoryShape) -> None:
    if shape.num_pages - NUM_RESERVED < fewest_pages(shape.ctx):
        raise UsageError(
            f"{shape.pages} cache pages hold {(shape.pages or 0) * PAGE_SIZE:,} positions, "
            f"but the context is {shape.ctx:,}",
            reason=["A request at full length could never end."],
            fix=[f"cache_pages={fewest_pages(shape.ctx)} or more", "a smaller ctx"],
        )


def make_plan(config: EngineConfig) -> EnginePlan:
    """Resolve every `auto`. Reads configurations and vocabularies only.

    Raises the error of whatever cannot be honoured; ResourceError names the flag that frees memory.
    """
    model = read_model_config(config.model)
    device = _device(config.device)
    kind = "cpu" if device == "cpu" else "cuda"
    dtype = _dtype(config.dtype, device, model)
    method, draft_folder, reason = _method(config)
    draft = read_model_config(draft_folder) if draft_folder else None
    kernels = _kernels(config.kernels, device, dtype)
    graphs = _graphs(config.graphs, device, kernels)
    wanted = DEFAULT_DRAFT_MAX.get(method, 0) if config.draft_max is None else config.draft_max
    draft_max = wanted if method != "off" else 0
    shape = _shape(config, model, draft, dtype, kernels, graphs, draft_max, device == "cpu")
    free = _free_memory(device)
    shape = _fitted(config, shape, device, free)
    _check_pages(shape)
    need = measure(shape)
    return EnginePlan(
        model=str(config.model),
        architecture=model.architecture,
        device=device,
        dtype=dtype,
        spec=method if draft_max else "off",
        spec_reason=reason,
        draft_model=str(draft_folder) if draft_folder else None,
        draft_max=draft_max,
        draft_tiers=_draft_tiers(draft_max, graphs),
        draft_ctx=shape.draft_ctx,
        adaptive=config.verify == "coupled" if config.adaptive is None else config.adaptive,
        ngram_min=config.ngram_min,
        ngram_max=config.ngram_max,
        verify=config.verify,
        synthetic_acceptance=_synthetic_acceptance(config.synthetic_acceptance, draft_max),
        lag=config.lag if config.lag is not None else (0 if kind == "cpu" else 1),
        graphs=graphs,
        kernels=kernels,
        slots=config.slots,
        ctx=shape.ctx,
        page_size=PAGE_SIZE,
        num_pages=shape.num_pages,
        chunk=shape.chunk,
        prefix_sharing=config.prefix_sharing,
        threads=config.threads or _physical_cores(),
        load=config.load,
        weight_bytes=need.weights,
        draft_weight_bytes=need.draft_weights,
        cache_bytes=need.cache + need.draft_cache,
        workspace_bytes=need.workspace,
        graph_bytes=need.graphs,
        memory_budget_bytes=int(free * config.memory_fraction),
    )
