"""The plan of an engine: every `auto` resolved, before any weight is loaded.

A plan holds the config, the model folder, the drafter and the shape that it follows from. It is
printed by `inspect`, logged with `-v`, and part of every JSON result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spd.errors import IncompatibleError, UsageError
from spd.formats.block_config import DeltaConfig
from spd.formats.folder import ModelFolder
from spd.formats.hub import spd_cache_folder
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.runtime.models import family_layout
from spd.runtime.models.mtp_weights import module_layer
from spd.runtime.models.parameters import Shard
from spd.runtime.models.weight_forms import WIDE, WeightForm
from spd.runtime.plan.config import (
    LONG_MATCH,
    METHODS,
    NGRAM_MIN,
    POOL_TOKENS,
    EngineConfig,
    split_spec,
)
from spd.runtime.plan.drafter_choice import Drafter, choose_drafter
from spd.runtime.plan.kernel_choice import (
    check_activations,
    choose_form,
    choose_kernels,
    native_obstacle,
)
from spd.runtime.plan.machine import Machine, find_machine
from spd.runtime.plan.memory import (
    EngineShape,
    MemoryNeed,
    measure_memory,
    snapshot_nbytes,
    state_bytes,
)
from spd.runtime.plan.memory_fit import fit_to_memory
from spd.runtime.round.cpu_load import usable_cpus
from spd.runtime.round.limits import PAGE_SIZE

AUTO_CTX = 32768
"""The longest context that `auto` takes; --ctx may name a longer one."""
EXTRA_SNAPSHOTS = 8
"""Snapshots of recurrent states, besides two a slot."""
MAX_RANKS = 64
CONFIG_KEYS = ("quantize", "activations", "ngram_max", "verify", "synthetic_acceptance", "load")
SHAPE_KEYS = (
    "dtype",
    "mtp_modules",
    "draft_max",
    "model_drafts",
    "draft_ctx",
    "graphs",
    "kernels",
    "kv",
    "slots",
    "ctx",
    "num_pages",
    "chunk",
    "tp",
    "draft_tp",
)
"""The fields of the config and of the shape that `as_dict` lists."""


@dataclass(frozen=True)
class EnginePlan:
    """The resolved decisions of one engine."""

    config: EngineConfig
    model: ModelFolder
    drafter: Drafter
    shape: EngineShape
    device: str
    weights_reason: str
    spec: str  # the method, `+ngram` where lookup is arbitrated with it; off where nothing drafts
    draft_tiers: tuple[int, ...]
    adaptive: bool
    ngram_min: int
    lag: int
    kernels_reason: str
    token_tiles: Mapping[str, int]  # of Triton's products: see `token_tiles.TokenTileLimits`
    token_tiles_reason: str
    draft_kernels: str  # of a draft model or a head
    threads: int
    threads_follow: bool  # True: fewer are used while other programs need CPUs; for C kernels
    draft_tp_reason: str
    memory_budget_bytes: int

    @property
    def need(self) -> MemoryNeed:
        """Return the bytes that the engine takes, part by part."""
        return measure_memory(self.shape)

    @property
    def copy_draft_max(self) -> int:
        """Return the drafts of a round of lookup alone where text is copied; 0 if never."""
        return self.shape.draft_max if self.shape.draft_max > self.shape.model_drafts else 0

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of other texts that lookup drafts from; 0 where it does not."""
        return self.shape.pool_tokens

    @property
    def shares_prefixes(self) -> bool:
        """True if a request may begin with another's pages; states need snapshots."""
        recurrent = _any_recurrent(self.shape.target, self.shape.draft)
        return self.config.prefix_sharing and (self.shape.num_snapshots > 0 or not recurrent)

    @property
    def can_round_activations(self) -> bool:
        """True if `--activations int8` is possible and was not asked for."""
        form = self.shape.form
        return self.shape.on_cpu and form.has_integer_codes and not form.rounds_rows

    @property
    def drafter_is_recurrent(self) -> bool:
        """True if the drafter has recurrent states: drafts cannot be removed from them."""
        return _any_recurrent(self.shape.draft)

    @property
    def drafting_model(self) -> ModelFolder | None:
        """Return the folder of the drafting model, EAGLE-3 head or assistant, if any."""
        return self.drafter.folder if self.shape.draft is not None else None

    @property
    def weights(self) -> str:
        """Return the form of the target's matrices: a dtype, int8, or a kind of codes."""
        form = self.shape.form
        return self.shape.dtype if form.kind == "wide" or form.widened else form.main_kind

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as flat, plain JSON values; folders as their paths."""
        mtp = self.shape.mtp
        draft = self.drafter.folder
        need = self.need
        shape = self.shape
        nested = ("config", "model", "drafter", "shape")
        return {
            "model": str(self.model),
            "architecture": self.model.config.architecture,
            "weights": self.weights,
            "spec_reason": self.drafter.reason,
            "draft_model": None if draft is None else str(draft),
            "mtp_head": None if mtp is None else str(mtp.folder),
            "mtp_layout": None if mtp is None else mtp.layout.description,
            **{name: getattr(self.config, name) for name in CONFIG_KEYS},
            **{name: getattr(shape, name) for name in SHAPE_KEYS},
            **{name: value for name, value in vars(self).items() if name not in nested},
            "can_round_activations": self.can_round_activations,
            "pool_tokens": self.pool_tokens,
            "prefix_sharing": self.shares_prefixes,
            "checkpoint_bytes": shape.num_snapshots
            and shape.num_snapshots * snapshot_nbytes(shape),
            "page_size": PAGE_SIZE,
            "weight_bytes": need.weights,
            "draft_weight_bytes": need.draft_weights,
            "cache_bytes": need.caches,
            "state_bytes": state_bytes(shape.target, shape.tp),
            "workspace_bytes": need.workspace,
            "graph_bytes": need.graphs,
        }


def _any_recurrent(*models: ModelConfig | None) -> bool:
    """True if a model among them has recurrent states."""
    return any(model is not None and model.recurrent is not None for model in models)


def _resolve_context(requested: int | None, model: ModelConfig) -> int:
    """Return the requested context; an automatic one is as long as the model allows."""
    limit = model.max_positions
    if requested is not None and requested > limit:
        message = f"--ctx {requested} is more than the model's {limit} positions"
        raise IncompatibleError(message, fix=[f"--ctx {limit}"])
    return requested or max(2, min(limit, AUTO_CTX))


def draft_context(draft: ModelConfig | None, ctx: int) -> int:
    """Return the positions of a context that a drafter can store.

    A head that reads the target's states follows the target.
    """
    return ctx if draft is None or draft.head_kind is not None else min(draft.max_positions, ctx)


def _resolve_dtype(requested: str, machine: Machine, model: ModelConfig, kernels: str) -> str:
    """Return the dtype; `auto` is bfloat16 on a CPU where the kernels are fast at it."""
    if requested != "auto":
        return requested
    if not machine.on_cpu:
        return model.dtype
    quick = kernels in ("auto", "native") or machine.has_fast_bfloat16
    return "bfloat16" if model.dtype != "float32" and quick else "float32"


def _resolve_kernels(
    config: EngineConfig, machine: Machine, model: ModelConfig, drafter: Drafter
) -> tuple[str, ...]:
    """Return the dtype, the kernels, the reason for them, and the drafter's kernels.

    The drafter does not change the target's kernels.
    """
    layers = family_layout(model).layers
    dtype = _resolve_dtype(config.dtype, machine, model, config.kernels)
    kernels, reason = choose_kernels(config.kernels, machine, dtype, layers)
    dtype = _resolve_dtype(config.dtype, machine, model, kernels)
    drafting = () if drafter.folder is None else family_layout(drafter.folder.config).layers
    if drafter.mtp is not None:
        drafting = (module_layer(drafter.mtp.config, drafter.mtp.layout.family),)
    needs_torch = kernels == "native" and native_obstacle(machine, dtype, drafting) is not None
    return dtype, kernels, reason, "torch" if needs_torch else kernels


def _resolve_graphs(requested: bool | None, machine: Machine, kernels: str) -> bool:
    """True if rounds are captured: where the kernels need nothing of the host."""
    possible = not machine.on_cpu and kernels == "triton"
    if requested and not possible:
        reason = [f"device {machine.device}, kernels {kernels}"]
        message = "--graphs on needs a CUDA device and Triton kernels"
        raise IncompatibleError(message, reason=reason, fix=["--graphs off"])
    return possible and requested is not False


def _resolve_draft_lengths(
    config: EngineConfig, drafter: Drafter, adaptive: bool
) -> tuple[str, int, int]:
    """Return the resolved `spec`, the most drafts of a model or head in a round, and of any
    proposer.

    With adaptive k and two drafters, lookup may draft more at once than the model does. Raises
    UsageError where a block is shorter than the drafts that are requested.
    """
    method = drafter.method
    default = drafter.draft_max
    requested = config.draft_max
    if method == "block" and (requested or 0) > default:
        message = f"--draft-max {requested}: this drafter's block has {default} drafts"
        raise UsageError(message, fix=[f"--draft-max {default}", "leave --draft-max out"])
    if method == "off" or requested == 0:
        return "off", 0, 0
    if method == "ngram" or not split_spec(config.spec)[1]:
        limit = default if requested is None else requested
        return method, limit, limit
    if requested is not None:
        limit = requested
    else:
        limit = max(default, METHODS["ngram"].draft_max if adaptive else 0)
    return f"{method}+ngram", min(limit, default) if adaptive else limit, limit


def _resolve_pool(config: EngineConfig, spec: str) -> int:
    """Return the tokens of other texts that lookup drafts from; 0 where it does not."""
    method, beside_model = split_spec(spec)
    if method != "ngram" and not beside_model:
        return 0
    return config.pool_tokens or (POOL_TOKENS if config.lookup is not None else 0)


def _draft_tiers(draft_max: int, graphs: bool, modules: int = 0) -> tuple[int, ...]:
    """Return the values of k, ascending, that a round may have: 0, and those that adapting may
    choose.

    Few with graphs, none below the number of MTP modules, which all run.
    """
    candidates: Iterable[int] = range(draft_max + 1)
    if graphs:
        candidates = {0, draft_max, *(k for k in (1, 2, 4, 6, 8, 12, 16, 24) if k < draft_max)}
    return tuple(sorted({0, *(k for k in candidates if k >= modules)}))


def choose_draft_ranks(
    config: EngineConfig, model: ModelConfig, draft: ModelConfig | None, mtp: MtpSource | None
) -> tuple[int, str]:
    """Return how many ranks each group that runs the drafter has, and the reason.

    Raises IncompatibleError where a model cannot be divided among them, UsageError where there is
    no drafter to divide.
    """
    tp = config.tp
    draft_tp = config.draft_tp
    if tp == 1:
        return 1, "one rank"
    _check_ranks("--tp", tp, model, "the target")
    drafter = draft if mtp is None else mtp.config
    if drafter is None:
        if draft_tp is not None:
            message = (
                f"--draft-tp {draft_tp} says how many ranks share a drafter, "
                "and here no model drafts"
            )
            raise UsageError(
                message, fix=["leave --draft-tp out", "--spec draft --draft-model FOLDER"]
            )
        return 1, "nothing drafts with a model"
    if draft is not None and draft.assistant is not None:
        if draft_tp not in (None, tp):
            message = (
                f"--draft-tp {draft_tp}: an assistant reads its target's cache, on the same ranks"
            )
            raise IncompatibleError(message, fix=[f"--draft-tp {tp}"])
        _check_ranks("--tp", tp, draft, "the assistant")
        return tp, "as the target, whose cache an assistant reads"
    if draft_tp is not None:
        _check_ranks("--draft-tp", draft_tp, drafter, "the drafter")
        return draft_tp, "asked for"
    if mtp is not None and tp in possible_rank_counts(drafter, [tp]):
        return tp, "as the target, whose tables an MTP head then shares"
    return 1, "a small model is read sooner than its parts are exchanged"


def possible_rank_counts(config: ModelConfig, sizes: Iterable[int]) -> list[int]:
    """Return those numbers of ranks among which a model can be divided."""
    layout = family_layout(config)
    counts = []
    for size in sizes:
        with suppress(IncompatibleError):
            layout.sharded(Shard(0, size))
            counts.append(size)
    return counts


def _check_ranks(flag: str, ranks: int, config: ModelConfig, divided_model: str) -> None:
    """Raise IncompatibleError where a model cannot be divided among `ranks` ranks.

    flag: the option that asks for them. divided_model: the model's role in the message.
    """
    possible = possible_rank_counts(config, range(1, MAX_RANKS + 1))
    if ranks in possible:
        return
    reason = f"{config.num_heads} heads"
    if config.latent is None:
        reason += f", {config.num_kv_heads} of keys and values"
    if isinstance(config.recurrent, DeltaConfig):
        reason += f", {config.recurrent.key_heads} recurrent key heads"
    reason += f", MLPs {config.intermediate_size:,}"
    if config.experts:
        reason += f" and {config.experts.intermediate_size:,}"
    message = f"{flag} {ranks} does not divide {divided_model}"
    fix = [f"{flag} {n}" for n in possible[:6]]
    raise IncompatibleError(message, reason=[f"{reason} wide"], fix=fix, code="tensor_parallel")


def _check_synthetic_acceptance(length: float | None, draft_max: int) -> None:
    """Raise UsageError where rounds of `draft_max` drafts cannot commit that many tokens."""
    if length is None or 1 <= length <= draft_max + 1:
        return
    reason = f"valid: 1 to {draft_max + 1}: a round commits its accepted drafts and one token more"
    message = f"--synthetic-acceptance {length:g} is out of range"
    raise UsageError(message, reason=[reason], fix=["--draft-max K with a larger K"])


def _draft_form(
    drafter: Drafter, form_of: Callable[[ModelConfig, ModelFolder], tuple[WeightForm, str]]
) -> WeightForm:
    """Return the form of the drafting weights; wide where no weights draft."""
    source = drafter.weights_source()
    if source is None:
        return WIDE
    config, folder = source
    form, _ = form_of(config, folder)
    return form


def _snapshot_count(config: EngineConfig, has_states: bool) -> int:
    """Return how many snapshots of recurrent states are stored for shared prefixes."""
    return EXTRA_SNAPSHOTS + 2 * config.slots if config.prefix_sharing and has_states else 0


def _resolve_ngram_min(config: EngineConfig, spec: str) -> int:
    """Return the tokens of a match from which lookup drafts."""
    if config.ngram_min is not None:
        return config.ngram_min
    return min(LONG_MATCH, config.ngram_max) if split_spec(spec)[1] else NGRAM_MIN


def resolve_plan(config: EngineConfig, machine: Machine) -> EnginePlan:
    """Return the plan for a machine, before context and pages are cut to its free memory."""
    target = ModelFolder.from_path(config.model)
    model = target.config
    drafter = choose_drafter(config, target)
    dtype, kernels, why_kernels, draft_kernels = _resolve_kernels(config, machine, model, drafter)
    adaptive = config.verify == "coupled" if config.adaptive is None else config.adaptive
    spec, model_drafts, draft_max = _resolve_draft_lengths(config, drafter, adaptive)
    form_of = partial(choose_form, config=config, machine=machine, kernels=kernels, dtype=dtype)
    form, weights_reason = form_of(model, target)
    ctx = _resolve_context(config.ctx, model)
    draft = None if drafter.folder is None or not draft_max else drafter.folder.config
    mtp = drafter.mtp if draft_max else None
    draft_tp, why_ranks = choose_draft_ranks(config, model, draft, mtp)
    shape = EngineShape(
        target=model,
        draft=draft,
        dtype=dtype,
        slots=config.slots,
        ctx=ctx,
        draft_ctx=min(draft_context(draft, ctx), config.draft_ctx or ctx),
        draft_max=draft_max,
        kernels=kernels,
        graphs=_resolve_graphs(config.graphs, machine, kernels),
        on_cpu=machine.on_cpu,
        pages=config.cache_pages,
        stores_distributions=config.verify != "coupled",
        model_drafts=model_drafts,
        mtp=mtp,
        head_holds_embedding=drafter.head_holds_embedding,
        form=form,
        draft_form=_draft_form(drafter, partial(form_of, kernels=draft_kernels)),
        tp=config.tp,
        draft_tp=draft_tp,
        num_snapshots=_snapshot_count(config, _any_recurrent(model, draft)),
        rounds_cache=config.kv == "int8",
        pool_tokens=_resolve_pool(config, spec),
    )
    sharing_ranks = machine.count_sharing_ranks(config.tp)
    return EnginePlan(
        config=config,
        model=target,
        drafter=drafter,
        shape=shape,
        device=machine.device,
        spec=spec,
        draft_tiers=_draft_tiers(model_drafts, shape.graphs, shape.mtp_modules),
        adaptive=adaptive,
        ngram_min=_resolve_ngram_min(config, spec),
        lag=config.lag if config.lag is not None else int(not machine.on_cpu),
        kernels_reason=why_kernels,
        token_tiles={},
        token_tiles_reason="narrow ones suffice",
        weights_reason=weights_reason,
        draft_kernels=draft_kernels,
        draft_tp_reason=why_ranks,
        threads=config.threads or max(1, len(usable_cpus()) // sharing_ranks),
        threads_follow=config.threads is None and kernels == "native",
        memory_budget_bytes=int(machine.free_bytes // sharing_ranks * config.memory_fraction),
    )


def make_plan(config: EngineConfig) -> EnginePlan:
    """Return the plan for this machine, with context and pages cut to the memory that is free now.

    Reads files and queries the device. Raises the errors of what cannot be honoured, ResourceError
    where memory is too small.
    """
    from spd.runtime.load.token_tiles import find_tile_limits

    machine = find_machine(config.device)
    plan = resolve_plan(config, machine)
    _check_synthetic_acceptance(config.synthetic_acceptance, plan.shape.draft_max)
    check_activations(config, machine, plan.shape.form)
    free_bytes = machine.free_bytes // machine.count_sharing_ranks(plan.shape.tp)
    tiles, tiles_reason = find_tile_limits(
        machine.device if plan.shape.kernels == "triton" else "cpu", spd_cache_folder
    )
    shape = fit_to_memory(plan.shape, config, machine.device, free_bytes)
    return replace(plan, shape=shape, token_tiles=tiles, token_tiles_reason=tiles_reason)
