"""Puts one engine's parts together from its plan: models, caches, state, sampler, proposer, round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spd.formats.hub import own_cache
from spd.formats.model_config import ModelConfig, read_model_config
from spd.formats.mtp_folder import MtpSource
from spd.kernels.dispatch import Kernels, load_kernels
from spd.runtime.eagle3_loader import Place, load_eagle3
from spd.runtime.graphs import CapturedRounds
from spd.runtime.imposed import ImposedAcceptance
from spd.runtime.kv_cache import KvCache
from spd.runtime.loader import load_model
from spd.runtime.memory import CATCH_UP, TAIL_ROWS, pages_a_slot, tensor_bytes
from spd.runtime.model_runner import ModelRunner
from spd.runtime.models.base import CausalModel
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.mtp_weights import module_bytes
from spd.runtime.models.shards import Shard
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.mtp_loader import load_modules
from spd.runtime.out_of_memory import memory_phase
from spd.runtime.parallel.communicator import Communicator
from spd.runtime.parallel.groups import Ranks
from spd.runtime.plan import EnginePlan
from spd.runtime.progress import LoadMeter, Progress
from spd.runtime.proposers import build_proposer
from spd.runtime.proposers.base import Proposer
from spd.runtime.round import Round
from spd.runtime.round_queue import RoundQueue
from spd.runtime.sampler import Sampler
from spd.runtime.state import RoundState
from spd.runtime.transfer import use_device
from spd.runtime.weight_choice import choose_form


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


def _runner(
    plan: EnginePlan,
    kernels: Kernels,
    folder: str,
    positions: int,
    meter: LoadMeter,
    ranks: Communicator | None,
) -> ModelRunner:
    form, _ = choose_form(read_model_config(Path(folder)), Path(folder), plan)
    with memory_phase(f"loading the weights of {Path(folder).name}"):
        model = load_model(
            Path(folder),
            dtype=plan.dtype,
            device=plan.device,
            positions=positions,
            kernels=kernels,
            load=plan.load,
            meter=meter,
            rows=max(TAIL_ROWS[kernels.name], plan.slots * (CATCH_UP + plan.draft_max + 1)),
            form=form,
            ranks=ranks,
        )
    return _with_cache(plan, kernels, model, ranks)


def _with_cache(
    plan: EnginePlan, kernels: Kernels, model: CausalModel, ranks: Communicator | None
) -> ModelRunner:
    with memory_phase("making room for keys and values"):
        dtype = getattr(torch, plan.dtype)
        cache = KvCache(model.cache_shapes, plan.num_pages, plan.page_size, dtype, plan.device)
    with memory_phase("trying the first layers"):
        return ModelRunner(model, cache, plan.chunk, plan.device, kernels, alone=ranks is None)


def _eagle3_runner(
    plan: EnginePlan,
    kernels: Kernels,
    folder: Path,
    target: ModelRunner,
    usable_vocab: int,
    meter: LoadMeter,
    ranks: Ranks | None,
) -> ModelRunner:
    """The EAGLE-3 head of a folder, which its target feeds from then on."""
    assert isinstance(target.model, Decoder)
    form, _ = choose_form(read_model_config(folder), folder, plan)
    drafting, apart = (None, False) if ranks is None else (ranks.draft, ranks.apart)
    dtype = getattr(torch, plan.dtype)
    place = Place(target.model, Path(plan.model), usable_vocab, dtype, plan.device, kernels, drafting, apart)
    rows = max(TAIL_ROWS[kernels.name], plan.slots * (CATCH_UP + plan.draft_max + 1))
    with memory_phase("loading the EAGLE-3 head"):
        head = load_eagle3(
            folder, place, positions=plan.draft_ctx, load=plan.load, meter=meter, rows=rows, form=form
        )
    return _with_cache(plan, kernels, head, drafting)


def _module_runners(
    plan: EnginePlan,
    kernels: Kernels,
    source: MtpSource,
    target: ModelRunner,
    meter: LoadMeter,
    ranks: Ranks | None,
) -> list[ModelRunner]:
    """One for each module of the MTP head that is used, with a cache of its own."""
    assert isinstance(target.model, Decoder)
    form, _ = choose_form(source.config, source.folder, plan)
    drafting = None if ranks is None else ranks.draft
    with memory_phase("loading the MTP head"):
        modules = load_modules(
            source,
            plan.mtp_modules,
            target.model,
            Path(plan.model),
            dtype=plan.dtype,
            device=plan.device,
            positions=plan.draft_ctx,
            kernels=kernels,
            load=plan.load,
            meter=meter,
            rows=max(TAIL_ROWS[kernels.name], plan.slots * (CATCH_UP + plan.draft_max + 1)),
            form=form,
            ranks=drafting,
            apart=ranks is not None and ranks.apart,
        )
    return [_with_cache(plan, kernels, module, drafting) for module in modules]


def _meter(plan: EnginePlan, config: ModelConfig, draft: str | None, progress: Progress | None) -> LoadMeter:
    models = [(config, plan.model, plan.tp)]
    models += [(read_model_config(Path(draft)), draft, plan.draft_tp)] if draft else []
    source, total = plan.mtp_source(config), 0
    for model, folder, ranks in models:
        total += tensor_bytes(model, plan.dtype, _read_form(model, Path(folder), plan), ranks)
    if source is not None:
        form = _read_form(source.config, source.folder, plan)
        shard = Shard(0, plan.draft_tp) if plan.draft_tp > 1 else None
        total += sum(module_bytes(source, i, plan.dtype, form, shard) for i in range(plan.mtp_modules))
    return LoadMeter(progress, total)


def _read_form(config: ModelConfig, folder: Path, plan: EnginePlan) -> WeightForm:
    """The form that weights are read into: what is rounded at load is read as it is."""
    return WIDE if plan.quantize == "int8" else choose_form(config, folder, plan)[0]


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
    kernels = load_kernels(plan.kernels, own_cache)
    use_device(plan.device)
    draft = plan.drafting_model
    meter = _meter(plan, config, draft, progress)
    together, drafting = (None, None) if ranks is None else (ranks.target, ranks.draft)
    runner = _runner(plan, kernels, plan.model, plan.ctx, meter, together)
    own = kernels if plan.draft_kernels == plan.kernels else load_kernels(plan.draft_kernels)
    drafters = []
    if draft and read_model_config(Path(draft)).eagle3 is not None:
        drafters = [_eagle3_runner(plan, own, Path(draft), runner, usable_vocab, meter, ranks)]
    elif draft:
        drafters = [_runner(plan, own, draft, plan.draft_ctx, meter, drafting)]
    source = plan.mtp_source(config)
    if source is not None:
        drafters = _module_runners(plan, own, source, runner, meter, ranks)
    state = RoundState(plan.slots, plan.ctx, plan.draft_max, pages_a_slot(plan.ctx), plan.device)
    sampler = Sampler(state, config.vocab_size, usable_vocab, kernels)
    proposer = build_proposer(plan, kernels, state, sampler, drafters)
    if plan.verify != "coupled" and proposer is not None and proposer.draws:
        sampler.keep_draft_laws()
    imposed = None
    if plan.synthetic_acceptance is not None:
        imposed = ImposedAcceptance(plan.synthetic_acceptance, plan.draft_max, plan.device)
    share = None if ranks is None or ranks.share is None or not drafters else ranks.share.broadcast
    round_ = Round(state, runner, sampler, proposer, kernels, imposed, plan.verify, share)
    queue = RoundQueue(round_, CapturedRounds(round_) if plan.graphs else None)
    pages_per_block = max(each.pages_per_block for each in (runner, *drafters))
    return Assembly(state, runner, sampler, proposer, queue, pages_per_block)
