"""Puts one engine's device side together from its plan: models, caches, state, sampler, proposer, round."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from spd.formats.folder import ModelFolder
from spd.formats.hub import spd_cache_folder
from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.kernels.native.library import NativeKernels
from spd.runtime.load.loader import Head, load_model
from spd.runtime.load.progress import LoadMeter, Progress
from spd.runtime.models import assistant, family_layout
from spd.runtime.models.builder import Place
from spd.runtime.models.eagle3 import head_parts
from spd.runtime.models.mtp_weights import module_bytes, module_parts
from spd.runtime.models.weights import WIDE
from spd.runtime.plan.memory import pages_per_slot, tensor_bytes
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers import build_proposer
from spd.runtime.ranks.communicator import Ranks
from spd.runtime.round.cpu_load import AdaptiveThreads, thread_counts
from spd.runtime.round.graphs import CapturedRounds, RecordedRounds
from spd.runtime.round.imposed_acceptance import ImposedAcceptance
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import CATCH_UP, PAGE_SIZE, ring_depth
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.round import Round
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.snapshot_store import SnapshotStore
from spd.runtime.round.state import RoundState


def _runners(
    plan: EnginePlan,
    folder: ModelFolder,
    place: Place,
    meter: LoadMeter,
    head: Head | None = None,
    shared: KvCache | None = None,
) -> list[ModelRunner]:
    """The model of a folder, or each part of a head that is used, with a cache of its own or the `shared`."""
    shape = plan.shape
    runners = []
    rows = max(place.kernels.capabilities.tail_rows, shape.slots * (CATCH_UP + shape.draft_max + 1))
    place = replace(place, rows=rows)
    pool = (shape.num_pages, PAGE_SIZE, place.dtype, plan.device)
    depth = ring_depth(shape.draft_max)
    for model in load_model(folder, place, load=plan.config.load, meter=meter, head=head):
        cache = shared or KvCache(model.caches, *pool, slots=shape.slots, depth=depth)
        given = (shape.chunk, plan.device, place.kernels)
        runners.append(ModelRunner(model, cache, *given, alone=place.ranks is None))
    return runners


def _drafters(
    plan: EnginePlan, place: Place, runner: ModelRunner, apart: bool, meter: LoadMeter
) -> list[ModelRunner]:
    """A draft model, or the parts of a head that share with the target; nothing where no model drafts."""
    draft = plan.drafting_model
    mtp = plan.shape.mtp
    target = runner.model
    if mtp is not None:
        find = partial(module_parts, mtp, plan.shape.mtp_modules)
        head = Head(mtp.config, find, target, plan.model, apart)
        return _runners(plan, mtp.folder, place, meter, head)
    if draft is None:
        return []
    found: Any = {
        "eagle3": partial(head_parts, draft.config),
        "assistant": partial(assistant.parts, draft.config, family_layout(plan.model.config)),
    }.get(draft.config.head_kind or "")
    own = None if found is None else Head(draft.config, found, target, plan.model, apart)
    shared = runner.cache if draft.config.assistant is not None else None
    return _runners(plan, draft, place, meter, own, shared)


def _meter(plan: EnginePlan, progress: Progress | None) -> LoadMeter:
    """Counts the bytes that are read: weights that are rounded at load are read as they are."""
    shape = plan.shape
    rounded = plan.config.quantize != "none"
    form, draft_form = (WIDE, WIDE) if rounded else (shape.form, shape.draft_form)
    total = tensor_bytes(shape.target, shape.dtype, form, shape.tp)
    if shape.draft is not None:
        total += tensor_bytes(shape.draft, shape.dtype, draft_form, shape.draft_tp)
    if shape.mtp is not None:
        given = (shape.dtype, draft_form, shape.draft_shard)
        total += sum(module_bytes(shape.mtp, i, *given) for i in range(shape.mtp_modules))
    return LoadMeter(progress, total)


def assemble(
    plan: EnginePlan,
    usable_vocab: int,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> LocalRoundQueue:
    """Load and allocate everything that the plan names, or this rank's part of it."""
    kernels = load_kernels(plan.shape.kernels, spd_cache_folder, plan.token_tiles, plan.shape.dtype)
    threads = _threads(plan, kernels)
    if plan.device != "cpu":  # streams, events and captures are the current device's
        torch.cuda.set_device(torch.device(plan.device).index or 0)
    shape, meter, dtype = plan.shape, _meter(plan, progress), getattr(torch, plan.shape.dtype)
    target, draft, share = (
        (None, None, None) if ranks is None else (ranks.target, ranks.draft, ranks.broadcast_group)
    )
    place = Place(dtype, plan.device, kernels, shape.form, target, positions=shape.ctx)
    (runner,) = _runners(plan, plan.model, place, meter)
    own = kernels if plan.draft_kernels == shape.kernels else load_kernels(plan.draft_kernels)
    place = Place(dtype, plan.device, own, shape.draft_form, draft, positions=shape.draft_ctx)
    drafters = _drafters(plan, place, runner, share is not None, meter)
    state = RoundState(
        shape.slots, shape.ctx, shape.draft_max, pages_per_slot(shape.ctx), plan.device
    )
    sampler = Sampler(state, plan.model.config.vocab_size, usable_vocab, kernels)
    proposer = build_proposer(plan, sampler, drafters)
    if plan.config.verify != "coupled" and proposer is not None and proposer.samples_drafts:
        sampler.allocate_draft_distributions()
    imposed = None
    if plan.config.synthetic_acceptance is not None:
        imposed = ImposedAcceptance(plan.config.synthetic_acceptance, shape.draft_max, plan.device)
    hand_out = share.broadcast if share is not None and drafters else None
    round_ = Round(state, runner, sampler, proposer, kernels, imposed, plan.config.verify, hand_out)
    captured = CapturedRounds(round_) if shape.graphs else None
    if (
        isinstance(kernels.native, NativeKernels)
        and own is kernels
        and ranks is None
        and plan.config.graphs is not False
    ):
        captured = RecordedRounds(round_, kernels.native)
    own_caches = [each for each in drafters if each.cache is not runner.cache]
    states = SnapshotStore([runner, *own_caches], proposer)
    return LocalRoundQueue(round_, captured, states, threads, shape.draft_ctx, alone=ranks is None)


def _threads(plan: EnginePlan, kernels: Kernels) -> AdaptiveThreads:
    """The threads of the kernels' own pool, which follow the load; or torch's, whose number stays.

    Beside a pool torch's operations are too small to share: its threads would only be in the way.
    """
    pooled = kernels.native is not None and plan.draft_kernels == plan.shape.kernels
    torch.set_num_threads(1 if pooled else plan.threads)
    if kernels.native is None:
        return AdaptiveThreads((plan.threads,), torch.set_num_threads)
    kernels.native.threads = plan.threads
    counts = thread_counts(plan.threads) if plan.threads_follow else (plan.threads,)
    return AdaptiveThreads(counts, partial(setattr, kernels.native, "threads"))
