"""Building an engine's device side from its plan: models, caches, state, sampler, proposer and round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.hub import spd_cache_folder
from spd.formats.model_config import ModelConfig
from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.kernels.native.library import NativeKernels
from spd.runtime.load.loader import HeadSource, load_model
from spd.runtime.load.progress import LoadMeter, Progress
from spd.runtime.models import assistant, block, family_layout
from spd.runtime.models.allocator import ExecutionConfig
from spd.runtime.models.eagle3 import head_parts
from spd.runtime.models.mtp_weights import count_module_bytes, module_parts
from spd.runtime.models.weight_forms import WIDE
from spd.runtime.models.weights import HeadPart
from spd.runtime.plan.memory import pages_per_slot, tensor_bytes
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers import build_lookup, build_proposer
from spd.runtime.ranks.communicator import Ranks
from spd.runtime.round.cpu_load import AdaptiveThreads, candidate_thread_counts
from spd.runtime.round.graphs import CapturedRounds, RecordedRounds
from spd.runtime.round.imposed_acceptance import ImposedAcceptance
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import CATCH_UP_TOKENS, PAGE_SIZE
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.round import Round
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.snapshot_store import SnapshotStore
from spd.runtime.round.state import RoundState

PartFinder = Callable[[Checkpoint | None], Sequence[HeadPart]]
"""Returns the parts of a head, checked against its checkpoint if there is one."""


def _load_runners(
    plan: EnginePlan,
    folder: ModelFolder,
    execution: ExecutionConfig,
    meter: LoadMeter,
    head: HeadSource | None = None,
    shared_cache: KvCache | None = None,
) -> list[ModelRunner]:
    """Load a folder's model, or the used parts of a head, and allocate their caches.

    Returns a runner for each. head: where the weights are those of a head. shared_cache: the cache
    that all runners use; None: each has its own.
    """
    shape = plan.shape
    runners = []
    max_rows = shape.slots * max(CATCH_UP_TOKENS + shape.draft_max + 1, shape.block_drafts + 1)
    execution = replace(execution, max_rows=max(execution.kernels.capabilities.tail_rows, max_rows))
    for model in load_model(folder, execution, load=plan.config.load, meter=meter, head=head):
        cache = shared_cache or KvCache(
            model.cache_layouts,
            num_pages=shape.num_pages,
            page_size=PAGE_SIZE,
            dtype=execution.dtype,
            device=plan.device,
            slots=shape.slots,
            depth=shape.ring_depth(folder is plan.model),
            rounded=shape.rounds_cache,
        )
        runner = ModelRunner(
            model,
            cache,
            chunk=shape.chunk,
            device=plan.device,
            kernels=execution.kernels,
            is_only_rank=execution.ranks is None,
        )
        runners.append(runner)
    return runners


def _load_drafters(
    plan: EnginePlan,
    execution: ExecutionConfig,
    runner: ModelRunner,
    is_separate: bool,
    meter: LoadMeter,
) -> list[ModelRunner]:
    """Load what drafts for the target of `runner`: a draft model, or the parts of a head.

    Returns no runner where no model drafts. is_separate: True if the ranks that draft together are
    not those that share the target.
    """
    draft = plan.drafting_model
    mtp = plan.shape.mtp
    target = runner.model
    if mtp is not None:
        find_modules = partial(module_parts, mtp, plan.shape.mtp_modules)
        head = HeadSource(
            config=mtp.config,
            find_parts=find_modules,
            target=target,
            target_folder=plan.model,
            is_separate=is_separate,
        )
        return _load_runners(
            plan=plan, folder=mtp.folder, execution=execution, meter=meter, head=head
        )
    if draft is None:
        return []
    find_parts = _head_part_finder(plan, draft.config)
    draft_head = None
    if find_parts is not None:
        draft_head = HeadSource(
            config=draft.config,
            find_parts=find_parts,
            target=target,
            target_folder=plan.model,
            is_separate=is_separate,
        )
    shared_cache = runner.cache if draft.config.assistant is not None else None
    return _load_runners(
        plan=plan,
        folder=draft,
        execution=execution,
        meter=meter,
        head=draft_head,
        shared_cache=shared_cache,
    )


def _head_part_finder(plan: EnginePlan, config: ModelConfig) -> PartFinder | None:
    """Return the function that finds the parts of a head; None for an independent draft model."""
    if config.head_kind == "eagle3":
        return partial(head_parts, config)
    if config.head_kind == "block":
        return partial(block.head_parts, config)
    if config.head_kind == "assistant":
        return partial(assistant.head_parts, config, family_layout(plan.model.config))
    return None


def _make_load_meter(plan: EnginePlan, progress: Progress | None) -> LoadMeter:
    """Return a meter of the bytes of weights that this rank will read, which reports to `progress`.

    Weights that are rounded at load are read in their unrounded form, so they count in that.
    """
    shape = plan.shape
    is_rounded = plan.config.quantize != "none"
    form = WIDE if is_rounded else shape.form
    draft_form = WIDE if is_rounded else shape.draft_form
    total = tensor_bytes(shape.target, shape.dtype, form, shape.tp)
    if shape.draft is not None:
        total += tensor_bytes(shape.draft, shape.dtype, draft_form, shape.draft_tp)
    if shape.mtp is not None:
        for module in range(shape.mtp_modules):
            total += count_module_bytes(
                source=shape.mtp,
                module=module,
                dtype=shape.dtype,
                form=draft_form,
                shard=shape.draft_shard,
            )
    return LoadMeter(progress, total)


def assemble_queue(
    plan: EnginePlan,
    usable_vocab: int,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> LocalRoundQueue:
    """Load and allocate all that the plan names, or this rank's part; return its queue."""
    shape = plan.shape
    kernels = load_kernels(shape.kernels, spd_cache_folder, plan.token_tiles, shape.dtype)
    threads = _set_threads(plan, kernels)
    if plan.device != "cpu":  # streams, events and captures belong to the current device
        torch.cuda.set_device(torch.device(plan.device).index or 0)
    meter = _make_load_meter(plan, progress)
    dtype = getattr(torch, shape.dtype)
    execution = ExecutionConfig(
        dtype=dtype,
        device=plan.device,
        kernels=kernels,
        form=shape.form,
        ranks=None if ranks is None else ranks.target,
        max_positions=shape.ctx,
        rounds_cache=shape.rounds_cache,
    )
    (runner,) = _load_runners(plan, plan.model, execution, meter)
    draft_kernels = kernels
    if plan.draft_kernels != shape.kernels:
        draft_kernels = load_kernels(plan.draft_kernels)
    draft_execution = ExecutionConfig(
        dtype=dtype,
        device=plan.device,
        kernels=draft_kernels,
        form=shape.draft_form,
        ranks=None if ranks is None else ranks.draft,
        max_positions=shape.draft_ctx,
        rounds_cache=shape.rounds_cache,
    )
    broadcast_group = None if ranks is None else ranks.broadcast_group
    drafters = _load_drafters(
        plan=plan,
        execution=draft_execution,
        runner=runner,
        is_separate=broadcast_group is not None,
        meter=meter,
    )
    round_ = _build_round(
        plan=plan, usable_vocab=usable_vocab, runner=runner, drafters=drafters, kernels=kernels
    )
    if broadcast_group is not None and drafters:
        round_.share_drafts = broadcast_group.broadcast
    can_record = draft_kernels is kernels and ranks is None
    separate_drafters = [drafter for drafter in drafters if drafter.cache is not runner.cache]
    snapshots = SnapshotStore([runner, *separate_drafters], round_.proposer)
    return LocalRoundQueue(
        round_=round_,
        captured=_make_captured_rounds(plan, round_, can_record),
        snapshots=snapshots,
        threads=threads,
        draft_limit=shape.draft_ctx,
        is_only_rank=ranks is None,
    )


def _make_captured_rounds(
    plan: EnginePlan, round_: Round, can_record: bool
) -> CapturedRounds | None:
    """Return what will capture rounds as CUDA graphs, or record C functions; None: rounds stay
    eager.

    can_record: True if this is the only rank, and all models run by the same kernels.
    """
    native = round_.kernels.native
    if isinstance(native, NativeKernels) and can_record and plan.config.graphs is not False:
        return RecordedRounds(round_, native)
    return CapturedRounds(round_) if plan.shape.graphs else None


def _build_round(
    plan: EnginePlan,
    usable_vocab: int,
    runner: ModelRunner,
    drafters: Sequence[ModelRunner],
    kernels: Kernels,
) -> Round:
    """Allocate the state, the sampler and the proposer; return the round that runs them."""
    shape = plan.shape
    state = RoundState(
        slots=shape.slots,
        max_len=shape.ctx,
        max_draft=shape.draft_max,
        pages=pages_per_slot(shape.ctx),
        device=plan.device,
    )
    sampler = Sampler(state, plan.model.config.vocab_size, usable_vocab, kernels)
    proposer = build_proposer(plan, sampler, drafters)
    if plan.config.verify != "coupled" and proposer is not None:
        sampler.allocate_draft_distributions()
    imposed = None
    if plan.config.synthetic_acceptance is not None:
        imposed = ImposedAcceptance(plan.config.synthetic_acceptance, shape.draft_max, plan.device)
    return Round(
        state=state,
        runner=runner,
        sampler=sampler,
        proposer=proposer,
        kernels=kernels,
        imposed_acceptance=imposed,
        verify_rule=plan.config.verify,
        lookup=build_lookup(plan, sampler),
    )


def _set_threads(plan: EnginePlan, kernels: Kernels) -> AdaptiveThreads:
    """Set the number of threads of torch and of the kernels' own pool; return what adapts it.

    The pool's number follows the load of other programs; torch's is fixed. Next to a pool, torch's
    operations are too small to share, and its threads would only be in the way.
    """
    uses_pool = kernels.native is not None and plan.draft_kernels == plan.shape.kernels
    torch.set_num_threads(1 if uses_pool else plan.threads)
    if kernels.native is None:
        return AdaptiveThreads((plan.threads,), torch.set_num_threads)
    kernels.native.threads = plan.threads
    counts = candidate_thread_counts(plan.threads) if plan.threads_follow else (plan.threads,)
    return AdaptiveThreads(counts, partial(setattr, kernels.native, "threads"))
