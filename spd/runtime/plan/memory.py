"""The memory of an engine, part by part: what fits, and which options free how much. No torch here.

The parts are bounds from shapes alone, so a plan can refuse before anything is loaded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from spd.errors import ResourceError, UsageError
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.formats.names import EMBEDDING
from spd.kernels.attention.attention_chunks import KV_BLOCK, num_chunks
from spd.kernels.capabilities import CAPABILITIES
from spd.runtime.models import family_layout
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.mtp_weights import count_module_bytes, module_position_size
from spd.runtime.models.parameters import Shard
from spd.runtime.models.weights import (
    DTYPE_BYTES,
    WIDE,
    ModelLayout,
    WeightForm,
    count_layout_bytes,
    int4_form,
)
from spd.runtime.plan.config import METHODS, EngineConfig, format_size
from spd.runtime.round.limits import CATCH_UP, NUM_RESERVED, PAGE_SIZE, ring_depth, state_depth

LOGIT_COPIES = {"torch": 16, "native": 16, "triton": 4}
"""Float32 copies of the logits alive at once: torch's sampler sorts, sums and draws in tensors."""
GRAPH_BYTES = 2**29
"""Bytes left free for captured graphs and their private pools."""
SHARE_OF_SNAPSHOTS = 8
"""Snapshots of recurrent states take at most one part in so many of the usable memory."""
WORTH_NAMING = 0.01
"""A remedy that frees a smaller share of the total is not mentioned, unless it suffices."""


@dataclass(frozen=True)
class EngineShape:
    """Everything that decides how much memory an engine takes; lengths in tokens."""

    target: ModelConfig
    draft: ModelConfig | None  # a draft model, EAGLE-3 head or assistant that is used
    dtype: str
    slots: int
    ctx: int
    draft_ctx: int
    draft_max: int
    kernels: str
    graphs: bool
    on_cpu: bool
    pages: int | None = None
    """Pages of the caches; None: for all slots at full length, for one where `minimal_pages`."""
    minimal_pages: bool = False
    stores_distributions: bool = False
    """True: the distribution that each draft was drawn from is stored until its verification."""
    model_drafts: int = 0
    """The most tokens that a draft model or head drafts; lookup may draft `draft_max`."""
    mtp: MtpSource | None = None
    head_embedding: bool = False
    """True: an EAGLE-3 head holds embeddings, which may not be the target's."""
    form: WeightForm = WIDE
    draft_form: WeightForm = WIDE  # of the draft model or the MTP head
    tp: int = 1
    """Ranks that share the target; all sizes are those of the first rank, which are the largest."""
    draft_tp: int = 1  # ranks of each group that runs the drafter
    snapshots: int = 0  # snapshots of recurrent states, in the host's memory

    @property
    def chunk(self) -> int:
        """Return the tokens of a prompt that go through a model together."""
        return CAPABILITIES[self.kernels].chunk

    @property
    def num_pages(self) -> int:
        """Return the pages of each cache, the reserved ones included."""
        default_pages = (
            min_pages(self.ctx) if self.minimal_pages else self.slots * pages_per_slot(self.ctx)
        )
        return NUM_RESERVED + (default_pages if self.pages is None else self.pages)

    @property
    def mtp_modules(self) -> int:
        """Return the modules of an MTP head that are used: no more than there are drafts."""
        return 0 if self.mtp is None else min(self.mtp.layout.modules, self.model_drafts)

    @property
    def draft_shard(self) -> Shard:
        """Return the first rank's shard of the drafter."""
        return Shard(0, self.draft_tp)


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes of each part of an engine."""

    weights: int
    draft_weights: int
    cache: int
    draft_cache: int
    states: int  # the slots' states and rings of recurrent layers, of the target and a draft model
    workspace: int
    graphs: int
    checkpoints: int = 0  # snapshots, by the name of JSON; on the host, no part of a GPU's memory

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return sum(vars(self).values())

    @property
    def caches(self) -> int:
        """Return the bytes of the target's and the drafter's caches, and of states."""
        return self.cache + self.draft_cache + self.states

    def summary(self) -> str:
        """Return every non-empty part as text, such as `weights 15.26 GiB + cache 4.50 GiB`."""
        sizes = {name.replace("_", " "): size for name, size in vars(self).items()}
        return " + ".join(f"{name} {format_size(size)}" for name, size in sizes.items() if size)


@lru_cache
def rank_layout(config: ModelConfig, ranks: int) -> ModelLayout:
    """Return the first rank's part of a model's layout."""
    return family_layout(config).sharded(Shard(0, ranks))


@lru_cache
def tensor_bytes(config: ModelConfig, dtype: str, form: WeightForm = WIDE, ranks: int = 1) -> int:
    """Return the bytes of the tensors that a rank reads, in the form they are stored in memory."""
    return count_layout_bytes(config, rank_layout(config, ranks), dtype, form)


def pages_per_slot(ctx: int) -> int:
    """Return the pages of a slot at full length, in whole blocks of attention."""
    return -(-(ctx + PAGE_SIZE) // KV_BLOCK) * (KV_BLOCK // PAGE_SIZE)


def min_pages(ctx: int) -> int:
    """Return the pages of one request at full length: with fewer it could never end."""
    return -(-ctx // PAGE_SIZE)


def page_bytes(config: ModelConfig, dtype: str, ranks: int = 1) -> int:
    """Return the bytes of one page over all layers, on one of `ranks`."""
    return PAGE_SIZE * position_size(config, ranks) * DTYPE_BYTES[dtype]


def position_size(config: ModelConfig, ranks: int = 1) -> int:
    """Return the elements of one position in the caches of all layers, on one of `ranks`."""
    layers = rank_layout(config, ranks).layers
    return sum(math.prod(shape) for layer in layers for shape in layer.attention.cache)


def state_bytes(config: ModelConfig, ranks: int = 1) -> int:
    """Return the bytes of one slot's recurrent states on one of `ranks`, without their rings."""
    return sum(
        4 * math.prod(block.state_shape) for block in rank_layout(config, ranks).recurrent_blocks
    )


def slot_bytes(config: ModelConfig, shape: EngineShape, ranks: int) -> int:
    """Return the bytes of one slot in recurrent layers on a rank: states, and rings of rows."""
    width = DTYPE_BYTES[shape.dtype]
    depth = ring_depth(shape.draft_max)
    total = 0
    for block in rank_layout(config, ranks).recurrent_blocks:
        for sizes, exact in block.slot_shapes(depth):
            total += math.prod(sizes) * (4 if exact else width)
    return total


def snapshot_nbytes(shape: EngineShape) -> int:
    """Return the bytes of one snapshot: states, latest inputs and a page, drafter included."""
    width = DTYPE_BYTES[shape.dtype]
    total = 0
    for config, ranks in ((shape.target, shape.tp), (shape.draft, shape.draft_tp)):
        if config is not None:
            inputs = sum(
                (block.kernel - 1) * block.channels
                for block in rank_layout(config, ranks).recurrent_blocks
            )
            captured = 0 if config.eagle3 is None else config.hidden_size
            total += state_bytes(config, ranks) + page_bytes(config, shape.dtype, ranks)
            total += (inputs + captured) * width
    if (mtp := shape.mtp) is not None:
        page = PAGE_SIZE * module_position_size(mtp.config, mtp.layout.family, shape.draft_shard)
        total += shape.mtp_modules * (page + mtp.config.hidden_size) * width
    return total


def measure(shape: EngineShape) -> MemoryNeed:
    """Return the memory that an engine of this shape takes."""
    target = shape.target
    draft = shape.draft
    ranks = shape.draft_tp
    pages = shape.num_pages
    rows = shape.slots * (shape.draft_max + 1)
    window = rows + shape.slots * CATCH_UP
    draft_weights = draft_cache = 0
    states = shape.slots * slot_bytes(target, shape, shape.tp)
    workspace = _workspace_bytes(
        shape=shape, model=target, ctx=shape.ctx, rows=rows, sampled=rows, ranks=shape.tp
    )
    if shape.stores_distributions:
        workspace += shape.slots * shape.draft_max * target.vocab_size * 4
    if draft is not None:
        draft_weights = _weight_bytes(draft, shape, shape.draft_form, ranks)
        # The same page numbers serve both models, so both have as many pages.
        draft_cache = pages * page_bytes(draft, shape.dtype, ranks)
        states += shape.slots * slot_bytes(draft, shape, ranks)
        workspace += _workspace_bytes(
            shape=shape,
            model=draft,
            ctx=shape.draft_ctx,
            rows=window,
            sampled=shape.slots,
            ranks=ranks,
        )
        workspace += _eagle3_bytes(shape, draft)
    elif shape.mtp is not None and shape.mtp_modules:
        draft_weights, draft_cache = _mtp_bytes(shape, shape.mtp)
        workspace += _workspace_bytes(
            shape=shape,
            model=target,
            ctx=shape.draft_ctx,
            rows=window,
            sampled=shape.slots,
            ranks=ranks,
        )
    return MemoryNeed(
        weights=_weight_bytes(target, shape, shape.form, shape.tp),
        draft_weights=draft_weights,
        cache=pages * page_bytes(target, shape.dtype, shape.tp),
        draft_cache=draft_cache,
        states=states,
        workspace=workspace,
        graphs=GRAPH_BYTES if shape.graphs and not shape.on_cpu else 0,
        checkpoints=shape.snapshots * snapshot_nbytes(shape)
        if shape.snapshots and shape.on_cpu
        else 0,
    )


def _stream_states(shape: EngineShape, modules: int) -> int:
    """Return the hidden states that a head's stream stores: one a page, and a ring a slot."""
    return shape.num_pages + shape.slots * (state_depth(shape.chunk, shape.draft_max, modules) + 1)


def _eagle3_bytes(shape: EngineShape, draft: ModelConfig) -> int:
    """Return the bytes of an EAGLE-3 head's states, read streams and own embeddings."""
    if (head := draft.eagle3) is None:
        return 0
    rows = max(
        shape.chunk, CAPABILITIES[shape.kernels].tail_rows, shape.slots * (shape.draft_max + 1)
    )
    embedding_elements = 0
    if head.target_hidden_size == draft.hidden_size and (
        shape.head_embedding or shape.draft_tp != shape.tp
    ):
        embedding_elements = (
            -(-draft.vocab_size // shape.draft_tp) * draft.hidden_size
        )  # else it is among the weights
    streams = 2 * rows * head.num_aux_layers * head.target_hidden_size
    return (
        _stream_states(shape, 1) * draft.hidden_size + streams + embedding_elements
    ) * DTYPE_BYTES[shape.dtype]


def _mtp_bytes(shape: EngineShape, mtp: MtpSource) -> tuple[int, int]:
    """Return the bytes of an MTP head's weights, and of its cache and states."""
    config = mtp.config
    modules = shape.mtp_modules
    width = DTYPE_BYTES[shape.dtype]
    shard = shape.draft_shard
    positions = shape.num_pages * PAGE_SIZE * module_position_size(config, mtp.layout.family, shard)
    states = _stream_states(shape, modules) * config.hidden_size
    weights = sum(
        count_module_bytes(
            source=mtp, module=i, dtype=shape.dtype, form=shape.draft_form, shard=shard
        )
        for i in range(modules)
    )
    # Tables of a module's own: both where the target's are divided among other ranks; the head
    # where a family writes no embedding (Step). Other copies count as equal to the target's.
    own_tables = 2 if shape.draft_tp != shape.tp else 0
    if own_tables == 0 and [*mtp.layout.family.private_tables] == ["head"]:
        own_tables = 1
    table_rows = -(-config.vocab_size // shape.draft_tp)
    weights += modules * own_tables * table_rows * config.hidden_size * width
    return weights, modules * (positions + states) * width


def _weight_bytes(config: ModelConfig, shape: EngineShape, form: WeightForm, ranks: int) -> int:
    """Return the bytes of the tensors, on a CPU with the packed copy of a tied head.

    float16 is not packed.
    """
    width = DTYPE_BYTES[shape.dtype]
    packed = shape.on_cpu and config.tie_embeddings and shape.dtype != "float16"
    if form.packs_tables and EMBEDDING in form.packed:
        packed = False
    ids = -(-config.vocab_size // ranks)
    return (
        tensor_bytes(config, shape.dtype, form, ranks) + packed * ids * config.hidden_size * width
    )


def _workspace_bytes(
    shape: EngineShape, model: ModelConfig, ctx: int, rows: int, sampled: int, ranks: int
) -> int:
    """Return the most bytes besides weights and cache of passes over `rows`, `sampled` of them."""
    rows = max(rows, CAPABILITIES[shape.kernels].tail_rows)
    width = DTYPE_BYTES[shape.dtype]
    widest = max(shape.chunk, rows)
    layout = rank_layout(model, ranks)
    shapes = {block.heads for block in layout.attention_blocks}
    logits = sampled * model.vocab_size * 4 * LOGIT_COPIES[shape.kernels]
    history = shape.slots * model.vocab_size * 9  # token counts, prompt marks, biases
    context = pages_per_slot(ctx) * PAGE_SIZE
    # Sums of the split softmax; torch also holds a mask for each head of a group and each window,
    # and scores where they are capped or have sinks.
    attention = (
        sum(heads * (size + 2) for heads, _, size in shapes) * rows * num_chunks(context) * 4
    )
    if shape.kernels == "torch":
        groups = sum(heads // keys for heads, keys, _ in shapes)
        attention += widest * groups * context * (width + 1) * len(layout.windows())
        sinks = any(
            isinstance(block, GqaLayout) and block.scores.has_sinks
            for block in layout.attention_blocks
        )
        if model.attention_softcap is not None or sinks:
            attention += widest * max(heads for heads, *_ in shapes) * context * 4 * 2
    inner = max(layer.mlp.widest + 2 * layer.attention.widest for layer in set(layout.layers))
    gathered = ranks + 2 if ranks > 1 else 0  # a part of the hidden state from every rank
    activations = widest * ((4 + gathered) * model.hidden_size + inner) * width
    # Tables of sines and cosines; layers with a sliding window may have other ones.
    tables = 2 if model.local_rope is None else 4
    rotary = tables * ctx * max(size for *_, size in shapes) * width
    return logits + history + attention + activations + rotary


def find_largest(fits: Callable[[int], bool], limit: int, step: int) -> int:
    """Return the largest multiple of `step` below `limit`, or `limit`, that fits; 0 if none."""
    if fits(limit):
        return limit
    counts = range(1, -(-limit // step))
    return step * bisect_left(counts, True, key=lambda count: not fits(count * step))


def fits(shape: EngineShape, usable: int | None) -> bool:
    """True if the shape takes no more than `usable` bytes; False where they are unknown."""
    return usable is not None and measure(shape).total <= usable


def fit_to_memory(
    shape: EngineShape, config: EngineConfig, device: str, free_bytes: int
) -> EngineShape:
    """Return the shape with an automatic context and number of pages cut to `free_bytes`.

    Pages are cut first, down to those of one request. Raises ResourceError, UsageError for fewer.
    """
    usable_bytes = int(free_bytes * config.memory_fraction)
    if shape.snapshots:
        snapshot_limit = usable_bytes // SHARE_OF_SNAPSHOTS // snapshot_nbytes(shape)
        shape = replace(shape, snapshots=min(snapshot_limit, shape.snapshots))

    def with_min_pages(ctx: int) -> EngineShape:
        return replace(at_context(shape, ctx), minimal_pages=shape.slots > 1)

    ctx = shape.ctx
    if not config.ctx:
        ctx = find_largest(lambda n: fits(with_min_pages(n), usable_bytes), ctx, PAGE_SIZE)
    if not ctx or not fits(with_min_pages(ctx), usable_bytes):
        smallest = with_min_pages(ctx or min(shape.ctx, PAGE_SIZE))
        raise refusal(
            shape=smallest,
            device=device,
            free=free_bytes,
            fraction=config.memory_fraction,
            draft_flag=bool(config.draft_model or config.mtp),
        )
    full = at_context(shape, ctx)
    if full.pages is not None:
        if full.pages < min_pages(ctx):
            capacity = f"{full.pages} cache pages hold {full.pages * PAGE_SIZE:,} positions"
            fix = [f"cache_pages={min_pages(ctx)} or more", "a smaller ctx"]
            reason = ["A request at full length could never end."]
            raise UsageError(f"{capacity}, but the context is {ctx:,}", reason=reason, fix=fix)
        return full
    if fits(full, usable_bytes):
        return full
    step = KV_BLOCK // PAGE_SIZE
    pages = find_largest(lambda n: fits(replace(full, pages=n), usable_bytes), full.num_pages, step)
    return replace(full, pages=max(pages, min_pages(ctx)))


def remedies(shape: EngineShape, usable: int | None, draft_flag: bool = False) -> list[str]:
    """Return every option that would free memory noticeably, and how much: sufficient ones first.

    usable: bytes that are there; None where only the device knows: contexts and slots are halved.
    draft_flag: the drafter was requested by --draft-model or --mtp, which other methods refuse.
    """
    now = measure(shape).total
    options = []
    for flag, changed in [*_shorter_or_fewer(shape, usable), *_other_options(shape, draft_flag)]:
        frees = now - measure(changed).total
        suffices = fits(changed, usable)
        if suffices or frees >= WORTH_NAMING * now:
            alone = "" if suffices or usable is None else ", not enough alone"
            order = (0, frees) if suffices else (1, -frees)
            options.append((order, f"{flag}  (frees {format_size(frees)}{alone})"))
    return [words for _, words in sorted(options)]


def _shorter_or_fewer(shape: EngineShape, usable: int | None) -> Iterator[tuple[str, EngineShape]]:
    """Yield options for fewer positions or slots: as many as fit, or half."""
    ctx = (
        find_largest(lambda n: fits(at_context(shape, n), usable), shape.ctx - 1, PAGE_SIZE)
        or shape.ctx // 2
    )
    ctx = ctx // 1024 * 1024 if ctx >= 4096 else ctx  # a round number
    if 2 <= ctx < shape.ctx:
        yield f"--ctx {ctx}", at_context(shape, ctx)
    slots = (
        find_largest(lambda n: fits(replace(shape, slots=n), usable), shape.slots - 1, 1)
        or shape.slots // 2
    )
    if slots:
        yield f"--concurrency {slots}", replace(shape, slots=slots)


def _other_options(shape: EngineShape, draft_flag: bool) -> Iterator[tuple[str, EngineShape]]:
    """Yield options for another method, dtype or way of running."""
    if shape.draft is not None or shape.mtp is not None:
        without = (
            f", without --{'mtp' if shape.draft is None else 'draft-model'}" if draft_flag else ""
        )
        ngram_draft_max = METHODS["ngram"].draft_max
        yield (
            f"--spec ngram{without}",
            replace(shape, draft=None, mtp=None, draft_max=ngram_draft_max),
        )
    elif shape.draft_max:
        yield "--spec off", replace(shape, draft_max=0)
    if shape.stores_distributions:
        yield "--verify coupled", replace(shape, stores_distributions=False)
    wide = (shape.form, shape.draft_form) == (WIDE, WIDE)
    models = (shape.target, shape.draft, shape.mtp.config if shape.mtp else None)
    stored = [model.quantization for model in models if model is not None]
    if wide and not any(stored):
        for form in (WeightForm("int8"), int4_form(shape.kernels, shape.dtype)):
            if not form.widened:
                yield f"--quantize {form.kind}", replace(shape, form=form, draft_form=form)
    if shape.dtype == "float32":
        yield "--dtype bfloat16", replace(shape, dtype="bfloat16")
    if shape.graphs:
        yield "--graphs off", replace(shape, graphs=False)


def refusal(
    shape: EngineShape, device: str, free: int, fraction: float, draft_flag: bool = False
) -> ResourceError:
    """Return the error for a shape that takes more than `fraction` of a device's `free` bytes."""
    need = measure(shape)
    usable = int(free * fraction)
    fix = remedies(shape, usable, draft_flag)
    percent = -(-100 * need.total // max(1, free))
    if percent <= 100:
        gained = free * percent // 100 - usable
        fix.append(f"--memory-fraction {percent / 100:g}  (allows {format_size(gained)} more)")
    message = f"not enough memory on {device} for a context of {shape.ctx:,} tokens"
    share = f"{fraction:g} of the {format_size(free)} that are free"
    reason = [
        f"needed are {format_size(need.total)}, usable {format_size(usable)}: {share}",
        need.summary(),
    ]
    return ResourceError(
        message, reason=reason, fix=fix or ["a smaller model, or a device with more memory"]
    )


def longest_context(shape: EngineShape, usable: int) -> int:
    """Return the longest context with which a shape fits into `usable` bytes; 0 if none does."""
    return find_largest(
        lambda ctx: fits(at_context(shape, ctx), usable), shape.target.max_positions, PAGE_SIZE
    )


def at_context(shape: EngineShape, ctx: int) -> EngineShape:
    """Return the shape with another context, and the draft model's no longer than it."""
    return replace(shape, ctx=ctx, draft_ctx=min(shape.draft_ctx, ctx))
