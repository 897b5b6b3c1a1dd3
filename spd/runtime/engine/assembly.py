"""Puts one engine's parts together from its plan: models, caches, state, sampler, proposer, round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from spd.formats.folder import ModelFolder
from spd.formats.hub import own_cache
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.kernels.dispatch import Kernels, load_kernels
from spd.runtime.layers.base import Communicator
from spd.runtime.load.loader import FindParts, load_head, load_model
from spd.runtime.load.progress import LoadMeter, Progress
from spd.runtime.models.builder import Place
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.destinations import Shard
from spd.runtime.models.eagle3 import head_parts
from spd.runtime.models.mtp_weights import module_bytes, module_parts
from spd.runtime.models.weight_form import WIDE
from spd.runtime.plan.memory import pages_a_slot, tensor_bytes
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.proposers import build_proposer
from spd.runtime.proposers.base import Proposer
from spd.runtime.ranks.groups import Ranks
from spd.runtime.round.cpu_load import FollowedThreads, fewer_threads
from spd.runtime.round.graphs import CapturedRounds
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import CATCH_UP, PAGE_SIZE
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.out_of_memory import memory_phase
from spd.runtime.round.round import Round
from spd.runtime.round.round_queue import RoundQueue
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.state import RoundState
from spd.runtime.round.synthetic_acceptance import ImposedAcceptance
from spd.runtime.round.transfer import use_device


@dataclass(frozen=True)
class Assembly:
    """The device side of one engine."""

    state: RoundState
    runner: ModelRunner
    sampler: Sampler
    proposer: Proposer | None
    queue: RoundQueue
    pages_per_block: int
    """Pages by which a slot grows: whole blocks of context for the target and for the drafter."""
    threads: FollowedThreads


def _runner(
    plan: EnginePlan,
    kernels: Kernels,
    folder: ModelFolder,
    positions: int,
    meter: LoadMeter,
    ranks: Communicator | None,
    threads: FollowedThreads | None = None,
) -> ModelRunner:
    form = plan.shape.form if folder is plan.model else plan.shape.draft_form
    with memory_phase(f"loading the weights of {folder.path.name}"):
        model = load_model(
            folder,
            Place(getattr(torch, plan.shape.dtype), plan.device, kernels, form, ranks),
            positions=positions,
            load=plan.wishes.load,
            meter=meter,
            rows=_most_rows(plan, kernels),
        )
    return _with_cache(plan, kernels, model, ranks, threads if plan.threads_follow else None)


def _with_cache(
    plan: EnginePlan,
    kernels: Kernels,
    model: Decoder,
    ranks: Communicator | None,
    threads: FollowedThreads | None = None,
) -> ModelRunner:
    with memory_phase("making room for keys and values"):
        dtype = getattr(torch, plan.shape.dtype)
        cache = KvCache(model.cache_shapes, plan.shape.num_pages, PAGE_SIZE, dtype, plan.device)
    with memory_phase("trying the first layers"):
        alone = ranks is None
        return ModelRunner(model, cache, plan.shape.chunk, plan.device, kernels, alone=alone, threads=threads)


def _head_runners(
    plan: EnginePlan,
    kernels: Kernels,
    source: MtpSource | ModelFolder,
    target: ModelRunner,
    usable_vocab: int,
    meter: LoadMeter,
    ranks: Ranks | None,
) -> list[ModelRunner]:
    """One for each part of a target's head that is used, with a cache of its own."""
    assert isinstance(target.model, Decoder)
    if isinstance(source, ModelFolder):
        folder, config, what = source, source.config, "EAGLE-3"
        find: FindParts = partial(head_parts, config, usable_vocab)
    else:
        folder, config, what = source.folder, source.config, "MTP"
        find = partial(module_parts, source, plan.shape.mtp_modules)
    drafting, apart = (None, False) if ranks is None else (ranks.draft, ranks.apart)
    with memory_phase(f"loading the {what} head"):
        parts = load_head(
            config,
            folder,
            find,
            Place(getattr(torch, plan.shape.dtype), plan.device, kernels, plan.shape.draft_form, drafting),
            target.model,
            plan.model,
            apart=apart,
            positions=plan.shape.draft_ctx,
            load=plan.wishes.load,
            meter=meter,
            rows=_most_rows(plan, kernels),
        )
    return [_with_cache(plan, kernels, part, drafting) for part in parts]


def _most_rows(plan: EnginePlan, kernels: Kernels) -> int:
    """The most rows of a forward pass other than a prompt chunk."""
    return max(kernels.facts.tail_rows, plan.shape.slots * (CATCH_UP + plan.shape.draft_max + 1))


def _meter(plan: EnginePlan, progress: Progress | None) -> LoadMeter:
    """Counts the bytes that are read: weights that are rounded at load are read as they are."""
    shape, rounded = plan.shape, plan.wishes.quantize == "int8"
    form, draft_form = (WIDE, WIDE) if rounded else (shape.form, shape.draft_form)
    total = tensor_bytes(shape.target, shape.dtype, form, shape.tp)
    if shape.draft is not None:
        total += tensor_bytes(shape.draft, shape.dtype, draft_form, shape.draft_tp)
    if shape.mtp is not None:
        shard = Shard(0, shape.draft_tp) if shape.draft_tp > 1 else None
        modules = range(shape.mtp_modules)
        total += sum(module_bytes(shape.mtp, i, shape.dtype, draft_form, shard) for i in modules)
    return LoadMeter(progress, total)


def assemble(
    plan: EnginePlan,
    config: ModelConfig,
    usable_vocab: int,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Assembly:
    """Load and allocate everything that the plan names, or this rank's part of it.

    Raises OutOfMemory naming the phase.
    """
    kernels = load_kernels(plan.shape.kernels, own_cache, plan.token_tiles)
    threads = _threads(plan, kernels)
    use_device(plan.device)
    shape, draft = plan.shape, plan.drafting_model
    meter = _meter(plan, progress)
    together, drafting = (None, None) if ranks is None else (ranks.target, ranks.draft)
    runner = _runner(plan, kernels, plan.model, shape.ctx, meter, together, threads)
    own = kernels if plan.draft_kernels == shape.kernels else load_kernels(plan.draft_kernels)
    drafters = []
    if draft is not None and draft.config.eagle3 is not None:
        drafters = _head_runners(plan, own, draft, runner, usable_vocab, meter, ranks)
    elif draft is not None:
        drafters = [_runner(plan, own, draft, shape.draft_ctx, meter, drafting)]
    if shape.mtp is not None:
        drafters = _head_runners(plan, own, shape.mtp, runner, usable_vocab, meter, ranks)
    state = RoundState(shape.slots, shape.ctx, shape.draft_max, pages_a_slot(shape.ctx), plan.device)
    sampler = Sampler(state, config.vocab_size, usable_vocab, kernels)
    proposer = build_proposer(plan, kernels, state, sampler, drafters)
    if plan.wishes.verify != "coupled" and proposer is not None and proposer.draws:
        sampler.keep_draft_laws()
    imposed = None
    if plan.wishes.synthetic_acceptance is not None:
        imposed = ImposedAcceptance(plan.wishes.synthetic_acceptance, shape.draft_max, plan.device)
    share = None if ranks is None or ranks.share is None or not drafters else ranks.share.broadcast
    round_ = Round(state, runner, sampler, proposer, kernels, imposed, plan.wishes.verify, share)
    queue = RoundQueue(round_, CapturedRounds(round_) if shape.graphs else None)
    pages_per_block = max(each.pages_per_block for each in (runner, *drafters))
    return Assembly(state, runner, sampler, proposer, queue, pages_per_block, threads)


def _threads(plan: EnginePlan, kernels: Kernels) -> FollowedThreads:
    """The threads of the kernels' own pool; or torch's, which change where the target's arithmetic allows it.

    Beside a pool torch's operations are too small to share: its threads would only be in the way.
    """
    pooled = kernels.native is not None and plan.draft_kernels == plan.shape.kernels
    torch.set_num_threads(1 if pooled else plan.threads)
    if kernels.native is None:
        return FollowedThreads((plan.threads,), torch.set_num_threads)
    kernels.native.threads = plan.threads
    counts = fewer_threads(plan.threads) if plan.threads_follow else (plan.threads,)
    return FollowedThreads(counts, partial(setattr, kernels.native, "threads"))
