"""The memory of an engine, part by part. No torch here.

The parts are bounds from shapes alone, so a plan can refuse before anything is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.kernels.attention.attention_chunks import KV_BLOCK, num_chunks
from spd.kernels.capabilities import CAPABILITIES
from spd.kernels.recurrent.state_blocks import BLOCK
from spd.runtime.models import family_layout
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.layouts import AttentionLayout, MixerLayout
from spd.runtime.models.mtp_weights import count_module_bytes, module_layer
from spd.runtime.models.parameters import Shard
from spd.runtime.models.weight_forms import DTYPE_BYTES, WIDE, WeightForm
from spd.runtime.models.weights import ModelLayout, count_layout_bytes
from spd.runtime.plan.config import format_size
from spd.runtime.round.limits import (
    CATCH_UP_TOKENS,
    NUM_RESERVED_PAGES,
    PAGE_SIZE,
    POOL_ENTRIES,
    draft_window_rows,
    pool_buckets,
    recurrent_ring_depth,
    state_ring_depth,
)

LOGIT_COPIES = {"torch": 16, "native": 16, "triton": 4}
"""Float32 copies of the logits alive at once: torch's sampler sorts, sums and draws in tensors."""
SCALE_BYTES = 2
"""Bytes of the scale of a row in eight bits."""
GRAPH_BYTES = 2**29
"""Bytes left free for captured graphs and their private pools."""


@dataclass(frozen=True)
class EngineShape:
    """Everything that decides how much memory an engine takes; all lengths are in tokens."""

    target: ModelConfig
    draft: (
        ModelConfig | None
    )  # a draft model, EAGLE-3 head, assistant or block drafter that is used
    dtype: str
    slots: int
    ctx: int
    draft_ctx: int
    draft_max: int
    kernels: str
    graphs: bool
    on_cpu: bool
    pages: int | None = None
    """Pages of each cache without the reserved ones; None: as many as all slots need at full
    length.
    """
    has_minimal_pages: bool = False
    """True: where `pages` is None, there are only those of one slot at full length."""
    stores_distributions: bool = False
    """True: the distribution that each draft was drawn from is stored until its verification."""
    model_drafts: int = 0
    """The most tokens that a draft model or head drafts; lookup may draft `draft_max`."""
    mtp: MtpSource | None = None
    head_holds_embedding: bool = False
    """True: an EAGLE-3 head holds embeddings, which may not be the target's."""
    form: WeightForm = WIDE
    draft_form: WeightForm = WIDE  # of the draft model or the MTP head
    tp: int = 1
    """Ranks that share the target; all sizes are those of the first rank, which are the largest."""
    draft_tp: int = 1  # ranks of each group that runs the drafter
    num_snapshots: int = 0  # snapshots of recurrent states, in the host's memory
    rounds_cache: bool = False
    """True: entries of all caches have eight bits, those of a drafter too."""
    pool_tokens: int = 0
    """Tokens of other texts that lookup drafts from."""

    @property
    def chunk(self) -> int:
        """Return the tokens of a prompt that go through a model together."""
        return CAPABILITIES[self.kernels].chunk

    @property
    def kv(self) -> str:
        """Return the form of the caches' entries: the dtype, or int8."""
        return "int8" if self.rounds_cache else self.dtype

    @property
    def num_pages(self) -> int:
        """Return the pages of each cache, the reserved ones included."""
        default_pages = (
            min_pages(self.ctx) if self.has_minimal_pages else self.slots * pages_per_slot(self.ctx)
        )
        return NUM_RESERVED_PAGES + (default_pages if self.pages is None else self.pages)

    @property
    def mtp_modules(self) -> int:
        """Return how many modules of an MTP head are used: no more than there are drafts."""
        return 0 if self.mtp is None else min(self.mtp.layout.modules, self.model_drafts)

    @property
    def block_drafts(self) -> int:
        """Return the rows that a block drafter runs behind the newest token; 0 for another one."""
        block = None if self.draft is None else self.draft.block
        return 0 if block is None else block.block_size - 1

    def ring_depth(self, is_target: bool) -> int:
        """Return the rows of a slot's rings in the recurrent layers of the target, or of the draft
        model.
        """
        return recurrent_ring_depth(
            self.draft_max + 1 if is_target else draft_window_rows(self.draft_max)
        )

    def rows_ahead(self, next_k: int) -> int:
        """Return the positions behind the newest token that drafting next_k tokens may write."""
        return max(next_k, self.block_drafts) if next_k else 0

    @property
    def draft_shard(self) -> Shard:
        """Return the first rank's shard of the drafter."""
        return Shard(0, self.draft_tp)


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that each part of an engine takes, on one rank."""

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
def first_rank_layout(config: ModelConfig, ranks: int) -> ModelLayout:
    """Return the first of `ranks` ranks' shard of a model's layout."""
    return family_layout(config).sharded(Shard(0, ranks))


@lru_cache
def tensor_bytes(config: ModelConfig, dtype: str, form: WeightForm = WIDE, ranks: int = 1) -> int:
    """Return the bytes of the model's tensors on the first of `ranks` ranks, in their form in
    memory.
    """
    return count_layout_bytes(config, first_rank_layout(config, ranks), dtype, form)


def pages_per_slot(ctx: int) -> int:
    """Return the number of pages of a slot at full length `ctx`, in whole blocks of attention."""
    return -(-(ctx + PAGE_SIZE) // KV_BLOCK) * (KV_BLOCK // PAGE_SIZE)


def min_pages(ctx: int) -> int:
    """Return the number of pages of one request at full length: with fewer it could never end."""
    return -(-ctx // PAGE_SIZE)


def page_bytes(config: ModelConfig, kv: str, ranks: int = 1) -> int:
    """Return the bytes of one page over all layers, on one of `ranks`; kv: as in
    `position_bytes`.
    """
    return PAGE_SIZE * position_bytes(config, kv, ranks)


def position_bytes(config: ModelConfig, kv: str, ranks: int = 1) -> int:
    """Return the bytes of one position in the caches of all layers, on one of `ranks`.

    kv: the form of its entries, a dtype or int8.
    """
    layers = first_rank_layout(config, ranks).layers
    return sum(entry_bytes(layer.attention, kv) for layer in layers)


def entry_bytes(layout: MixerLayout, kv: str) -> int:
    """Return the bytes of a position's entry in one layer, of the form `kv`, scales included."""
    size = sum(math.prod(shape) for shape in layout.cache)
    if kv != "int8":
        return size * DTYPE_BYTES[kv]
    if not isinstance(layout, AttentionLayout):
        return size
    return size + SCALE_BYTES * sum(math.prod(shape) for shape in layout.cache_scales)


def position_elements(config: ModelConfig, ranks: int = 1) -> int:
    """Return the number of elements of one position in all layers' caches, on one of `ranks`."""
    layers = first_rank_layout(config, ranks).layers
    return sum(math.prod(shape) for layer in layers for shape in layer.attention.cache)


def state_bytes(config: ModelConfig, ranks: int = 1) -> int:
    """Return the bytes of one slot's recurrent states on one of `ranks`, without their rings."""
    return sum(
        4 * math.prod(block.state_shape)
        for block in first_rank_layout(config, ranks).recurrent_blocks
    )


def recurrent_slot_bytes(config: ModelConfig, shape: EngineShape, ranks: int) -> int:
    """Return the bytes of a slot's states and rings in recurrent layers, on one of `ranks`."""
    width = DTYPE_BYTES[shape.dtype]
    depth = shape.ring_depth(config is shape.target)
    total = 0
    for block in first_rank_layout(config, ranks).recurrent_blocks:
        for sizes, exact in block.slot_shapes(depth):
            total += math.prod(sizes) * (4 if exact else width)
    return total


def snapshot_nbytes(shape: EngineShape) -> int:
    """Return the bytes of one snapshot of recurrent states, the drafter's included.

    That is the states, the blocks of rings behind them, the latest inputs and a page.
    """
    width = DTYPE_BYTES[shape.dtype]
    total = 0
    for config, ranks in ((shape.target, shape.tp), (shape.draft, shape.draft_tp)):
        if config is not None:
            inputs = 0
            for block in first_rank_layout(config, ranks).recurrent_blocks:
                inputs += (block.kernel - 1) * block.channels
                exact = sum(
                    math.prod(sizes) for sizes, is_exact in block.slot_shapes(BLOCK) if is_exact
                )
                total += 4 * exact
            captured = 0 if config.eagle3 is None else config.hidden_size
            total += page_bytes(config, shape.kv, ranks) + (inputs + captured) * width
    if (mtp := shape.mtp) is not None:
        total += shape.mtp_modules * (_module_page_bytes(shape) + mtp.config.hidden_size * width)
    return total


def measure_memory(shape: EngineShape) -> MemoryNeed:
    """Return the bytes that an engine of this shape takes, part by part; computed, not measured."""
    target = shape.target
    draft = shape.draft
    ranks = shape.draft_tp
    pages = shape.num_pages
    rows = shape.slots * (shape.draft_max + 1)
    window = rows + shape.slots * CATCH_UP_TOKENS
    draft_weights = draft_cache = 0
    states = shape.slots * recurrent_slot_bytes(target, shape, shape.tp)
    workspace = _workspace_bytes(
        shape=shape, model=target, ctx=shape.ctx, rows=rows, sampled=rows, ranks=shape.tp
    )
    workspace += pool_bytes(shape.pool_tokens)
    if shape.stores_distributions:
        workspace += shape.slots * shape.draft_max * target.vocab_size * 4
    if draft is not None:
        draft_weights = _weight_bytes(draft, shape, shape.draft_form, ranks)
        # The same page numbers serve both models, so both have as many pages.
        draft_cache = pages * page_bytes(draft, shape.kv, ranks)
        states += shape.slots * recurrent_slot_bytes(draft, shape, ranks)
        block_rows = shape.slots * (shape.block_drafts + 1)
        workspace += _workspace_bytes(
            shape=shape,
            model=draft,
            ctx=shape.draft_ctx,
            rows=max(window, block_rows),
            sampled=block_rows if shape.block_drafts else shape.slots,
            ranks=ranks,
        )
        workspace += _eagle3_bytes(shape, draft) + _block_bytes(shape, draft)
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
        cache=pages * page_bytes(target, shape.kv, shape.tp),
        draft_cache=draft_cache,
        states=states,
        workspace=workspace,
        graphs=GRAPH_BYTES if shape.graphs and not shape.on_cpu else 0,
        checkpoints=shape.num_snapshots * snapshot_nbytes(shape)
        if shape.num_snapshots and shape.on_cpu
        else 0,
    )


def pool_bytes(tokens: int) -> int:
    """Return the bytes of a pool of so many tokens: these, the buckets of its index, their counts."""
    buckets = pool_buckets(tokens)
    return tokens and 8 * tokens + 4 * POOL_ENTRIES * (buckets + 1) + 8 * buckets


def _count_stream_states(shape: EngineShape, modules: int) -> int:
    """Return how many hidden states a head stores for a stream: one a page, and a ring a slot."""
    return shape.num_pages + shape.slots * (
        state_ring_depth(shape.chunk, shape.draft_max, modules) + 1
    )


def _eagle3_bytes(shape: EngineShape, draft: ModelConfig) -> int:
    """Return the bytes of an EAGLE-3 head's states, read streams and own embeddings; 0 for
    others.
    """
    if (head := draft.eagle3) is None:
        return 0
    rows = max(
        shape.chunk, CAPABILITIES[shape.kernels].tail_rows, shape.slots * (shape.draft_max + 1)
    )
    embedding_elements = 0
    if head.target_hidden_size == draft.hidden_size and (
        shape.head_holds_embedding or shape.draft_tp != shape.tp
    ):
        embedding_elements = (
            -(-draft.vocab_size // shape.draft_tp) * draft.hidden_size
        )  # else it is among the weights
    streams = 2 * rows * head.num_aux_layers * head.target_hidden_size
    return (
        _count_stream_states(shape, 1) * draft.hidden_size + streams + embedding_elements
    ) * DTYPE_BYTES[shape.dtype]


def _block_bytes(shape: EngineShape, draft: ModelConfig) -> int:
    """Return the bytes of the streams that a block drafter reads, and of a block's tokens.

    With other ranks than the target's, of embedding and head too. 0 for other drafters.
    """
    block = draft.block
    if block is None:
        return 0
    rows = max(
        shape.chunk, CAPABILITIES[shape.kernels].tail_rows, shape.slots * (shape.draft_max + 1)
    )
    streams = 2 * rows * block.num_aux_layers * block.target_hidden_size
    context = rows * 2 * position_elements(draft, shape.draft_tp)
    tables = 0
    if shape.draft_tp != shape.tp:
        tables = 2 * -(-draft.vocab_size // shape.draft_tp) * draft.hidden_size
    tokens = shape.slots * shape.block_drafts * 8
    return (streams + context + tables) * DTYPE_BYTES[shape.dtype] + tokens


def _mtp_bytes(shape: EngineShape, mtp: MtpSource) -> tuple[int, int]:
    """Return the bytes of an MTP head's weights, and of its cache and states."""
    config = mtp.config
    modules = shape.mtp_modules
    width = DTYPE_BYTES[shape.dtype]
    shard = shape.draft_shard
    states = _count_stream_states(shape, modules) * config.hidden_size * width
    pages = shape.num_pages * _module_page_bytes(shape)
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
    return weights, modules * (pages + states)


def _module_page_bytes(shape: EngineShape) -> int:
    """Return the bytes of a page in the cache of one module of the shape's MTP head."""
    mtp = shape.mtp
    assert mtp is not None
    layer = module_layer(mtp.config, mtp.layout.family, shape.draft_shard)
    return PAGE_SIZE * entry_bytes(layer.attention, shape.kv)


def _weight_bytes(config: ModelConfig, shape: EngineShape, form: WeightForm, ranks: int) -> int:
    """Return the bytes of a model's weights on one of `ranks`, with the copy of a tied head that a
    CPU packs.

    float16 is not packed.
    """
    width = DTYPE_BYTES[shape.dtype]
    packed = shape.on_cpu and config.tie_embeddings and shape.dtype != "float16"
    if form.packs_embedding(config):
        packed = False
    ids = -(-config.vocab_size // ranks)
    return (
        tensor_bytes(config, shape.dtype, form, ranks) + packed * ids * config.hidden_size * width
    )


def _workspace_bytes(
    shape: EngineShape, model: ModelConfig, ctx: int, rows: int, sampled: int, ranks: int
) -> int:
    """Return the most bytes that passes of a model take besides weights and caches.

    ctx: its longest context. rows: rows of a pass. sampled: rows whose logits are computed. ranks:
    ranks that share the model.
    """
    rows = max(rows, CAPABILITIES[shape.kernels].tail_rows)
    width = DTYPE_BYTES[shape.dtype]
    widest = max(shape.chunk, rows)
    layout = first_rank_layout(model, ranks)
    shapes = {block.heads for block in layout.attention_blocks}
    logits = sampled * model.vocab_size * 4 * LOGIT_COPIES[shape.kernels]
    history = shape.slots * model.vocab_size * 9  # token counts, prompt marks, biases
    context = pages_per_slot(ctx) * PAGE_SIZE
    # Sums of the split softmax; torch also holds a mask for each head of a group and each window,
    # and scores where they are capped or have sinks.
    chunks = num_chunks(context, rounded=shape.rounds_cache and shape.kernels == "triton")
    attention = sum(heads * (size + 2) for heads, _, size in shapes) * rows * chunks * 4
    if shape.kernels == "torch":
        groups = sum(heads // keys for heads, keys, _ in shapes)
        attention += widest * groups * context * (width + 1) * len(layout.windows())
        sinks = any(
            isinstance(block, GqaLayout) and block.scores.has_sinks
            for block in layout.attention_blocks
        )
        is_rounded = shape.kv == "int8"
        if model.attention_softcap is not None or sinks or is_rounded:
            attention += widest * max(heads for heads, *_ in shapes) * context * 4 * 2
        if is_rounded:  # a slot's keys and values in float32
            attention += max(keys * size for _, keys, size in shapes) * context * 4 * 3
    inner = max(layer.mlp.widest + 2 * layer.attention.widest for layer in set(layout.layers))
    gathered = ranks + 2 if ranks > 1 else 0  # a part of the hidden state from every rank
    activations = widest * ((4 + gathered) * model.hidden_size + inner) * width
    # Tables of sines and cosines; layers with a sliding window may have other ones.
    tables = 2 if model.local_rope is None else 4
    rotary = tables * ctx * max(size for *_, size in shapes) * width
    return logits + history + attention + activations + rotary
