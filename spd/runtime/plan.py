"""What will be done: every `auto` resolved, before any weight is loaded.

Each rule is a small function. The plan is printed by `inspect`, logged with `-v`, and part of every
JSON result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spd.errors import IncompatibleError, ResourceError, UsageError
from spd.formats.hub import own_cache
from spd.formats.model_config import ModelConfig, read_model_config
from spd.formats.mtp_folder import MtpSource, find_source
from spd.runtime.config import LONG_MATCH, NGRAM_MIN, EngineConfig, split_spec
from spd.runtime.drafter import Drafter, choose_drafter
from spd.runtime.fitting import check_pages, fitted, shape_of
from spd.runtime.free_memory import free_memory
from spd.runtime.kernel_choice import choose_kernels, native_obstacle
from spd.runtime.memory import DEFAULT_DRAFT_MAX, PAGE_SIZE, measure
from spd.runtime.models import family_layout
from spd.runtime.models.mtp_weights import module_layer
from spd.runtime.parallel.choice import divide
from spd.runtime.weight_choice import Wishes, choose_forms


@dataclass(frozen=True)
class EnginePlan:
    """One engine's resolved decisions; sizes in tokens, pages and bytes as named."""

    model: str
    architecture: str
    device: str
    dtype: str
    quantize: str
    weights: str
    """The form that the matrices of the target's layers are kept in: a dtype, int8 or fp8."""
    weights_reason: str
    spec: str
    spec_reason: str
    draft_model: str | None
    mtp_head: str | None
    mtp_layout: str | None
    mtp_modules: int
    draft_max: int
    model_drafts: int
    """Of `draft_max`, those that a model or a head may make: lookup beside it may make more, alone."""
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
    kernels_reason: str
    draft_kernels: str
    """Of a draft model or a head."""
    slots: int
    ctx: int
    page_size: int
    num_pages: int
    chunk: int
    prefix_sharing: bool
    threads: int
    load: str
    tp: int
    draft_tp: int
    draft_tp_reason: str
    weight_bytes: int
    draft_weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    graph_bytes: int
    memory_budget_bytes: int

    @property
    def copying(self) -> int:
        """Drafts of a round that lookup makes alone where a request copies text; 0 where it never does."""
        return self.draft_max if self.draft_max > self.model_drafts else 0

    @property
    def drafting_model(self) -> str | None:
        """The folder of the draft model or EAGLE-3 head that drafts; None where none does."""
        return self.draft_model if self.spec != "off" else None

    def mtp_source(self, target: ModelConfig) -> MtpSource | None:
        """Where the MTP head that is used comes from, read again."""
        if self.mtp_head is None:
            return None
        apart = Path(self.mtp_head) if self.mtp_head != self.model else None
        return find_source(Path(self.model), target, apart)

    def weight_words(self) -> str:
        """The dtype, and the form of the weights where it is another."""
        if self.quantize == "none" and self.weights == self.dtype:
            return self.dtype
        return f"{self.dtype}, weights {self.weights} ({self.weights_reason})"

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


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _kernels(
    config: EngineConfig,
    device: str,
    dtype: str,
    model: ModelConfig,
    draft: ModelConfig | None,
    drafter: Drafter,
) -> tuple[str, str, str]:
    """The form of the kernels, why, and that of what drafts: the target's own never depends on a drafter."""
    asked = (device, dtype, config.quantize)
    layers = family_layout(model).layers
    kernels, why = choose_kernels(config.kernels, *asked, layers, own_cache, _interpreted)
    layers = family_layout(draft).layers if draft is not None else ()
    if drafter.mtp is not None:
        layers = (module_layer(drafter.mtp.config, drafter.mtp.layout.family),)
    others = kernels == "native" and native_obstacle(*asked, layers) is not None
    return kernels, why, "torch" if others else kernels


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


def _draft_lengths(config: EngineConfig, method: str, adaptive: bool) -> tuple[str, int, int]:
    """What `spec` comes to, how many tokens a model or a head drafts at most, and how many anybody does.

    Lookup beside a model copies more at a time than the model drafts, where k follows what is accepted: the
    model keeps to its usual number then.
    """
    usual, asked = DEFAULT_DRAFT_MAX.get(method, 0), config.draft_max
    if method == "off" or asked == 0:
        return "off", 0, 0
    if method == "ngram" or not split_spec(config.spec)[1]:
        most = usual if asked is None else asked
        return method, most, most
    most = max(usual, DEFAULT_DRAFT_MAX["ngram"] if adaptive else 0) if asked is None else asked
    return f"{method}+ngram", min(most, usual) if adaptive else most, most


def _shortest_match(config: EngineConfig, spec: str) -> int:
    """Tokens of a match that lookup follows."""
    if config.ngram_min is not None:
        return config.ngram_min
    return min(LONG_MATCH, config.ngram_max) if split_spec(spec)[1] else NGRAM_MIN


def _draft_tiers(draft_max: int, graphs: bool, modules: int = 0) -> tuple[int, ...]:
    """The values of k that adapting may choose: few where each is a graph of its own.

    With several MTP modules none below their number, for all of them run in every draft pass.
    """
    tiers: Iterable[int] = range(draft_max + 1)
    if graphs:
        tiers = {0, draft_max, *(k for k in (1, 2, 4, 6, 8, 12, 16, 24) if k < draft_max)}
    return tuple(sorted({0, *(k for k in tiers if k >= modules)}))


def _physical_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def make_plan(config: EngineConfig) -> EnginePlan:
    """Resolve every `auto` from configurations and vocabularies. Raises the errors of what cannot be."""
    model = read_model_config(config.model)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device, model)
    drafter = choose_drafter(config, model)
    draft = read_model_config(drafter.folder) if drafter.folder else None
    kernels, why_kernels, draft_kernels = _kernels(config, device, dtype, model, draft, drafter)
    graphs = _graphs(config.graphs, device, kernels)
    adaptive = config.verify == "coupled" if config.adaptive is None else config.adaptive
    spec, model_drafts, draft_max = _draft_lengths(config, drafter.method, adaptive)
    wishes = Wishes(config.quantize, kernels, device, dtype, config.load, config.tp)
    form, draft_form, why = choose_forms((model, config.model), drafter.source(draft), wishes)
    shape = shape_of(config, model, draft, dtype, kernels, graphs, draft_max, device == "cpu", *drafter.head)
    drafting = (draft, drafter.mtp) if draft_max else (None, None)
    ranks = divide(config.tp, config.draft_tp, model, *drafting, dtype, device)
    shape = replace(shape, form=form, draft_form=draft_form, tp=ranks.tp, draft_tp=ranks.draft_tp)
    shape = replace(shape, model_drafts=model_drafts)
    beside = ranks.tp if device == "cpu" else 1  # ranks that share this machine's memory and cores
    free = free_memory(device) // beside
    shape = fitted(config, shape, device, free)
    check_pages(shape)
    need = measure(shape)
    return EnginePlan(
        model=str(config.model),
        architecture=model.architecture,
        device=device,
        dtype=dtype,
        quantize=config.quantize,
        weights=dtype if form.kind == "wide" or form.widened else form.kind,
        weights_reason=why,
        spec=spec,
        spec_reason=drafter.reason,
        draft_model=str(drafter.folder) if drafter.folder else None,
        mtp_head=str(shape.mtp.folder) if shape.mtp else None,
        mtp_layout=shape.mtp.layout.words() if shape.mtp else None,
        mtp_modules=shape.mtp_modules,
        draft_max=draft_max,
        model_drafts=model_drafts,
        draft_tiers=_draft_tiers(model_drafts, graphs, shape.mtp_modules),
        draft_ctx=shape.draft_ctx,
        adaptive=adaptive,
        ngram_min=_shortest_match(config, spec),
        ngram_max=config.ngram_max,
        verify=config.verify,
        synthetic_acceptance=_synthetic_acceptance(config.synthetic_acceptance, draft_max),
        lag=config.lag if config.lag is not None else int(device != "cpu"),
        graphs=graphs,
        kernels=kernels,
        kernels_reason=why_kernels,
        draft_kernels=draft_kernels,
        slots=config.slots,
        ctx=shape.ctx,
        page_size=PAGE_SIZE,
        num_pages=shape.num_pages,
        chunk=shape.chunk,
        prefix_sharing=config.prefix_sharing,
        threads=config.threads or max(1, _physical_cores() // beside),
        load=config.load,
        tp=ranks.tp,
        draft_tp=ranks.draft_tp,
        draft_tp_reason=ranks.reason,
        weight_bytes=need.weights,
        draft_weight_bytes=need.draft_weights,
        cache_bytes=need.cache + need.draft_cache,
        workspace_bytes=need.workspace,
        graph_bytes=need.graphs,
        memory_budget_bytes=int(free * config.memory_fraction),
    )
