"""Loads a checkpoint into a model: check every name and shape, allocate fused, fill, build.

On CUDA all of a decoder is allocated and filled in the order of the files; on CPU it is built a
layer at a time, since the unpacked form of a layer is not needed once it is packed. Heads that
draft are loaded after their target, and share its tables where they are equal. No code of a folder
is executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.gguf.model import GgufCheckpoint
from spd.formats.model_config import ModelConfig
from spd.formats.names import EMBEDDING, HEAD
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.kernels.seeded import seeded_generator
from spd.runtime.layers.linear import AnyEmbedding, OutputHead
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.load.gguf_weights import make_gguf_filler, read_values
from spd.runtime.load.packed_weights import make_unpacking_filler, unpack_matrix
from spd.runtime.load.progress import LoadMeter
from spd.runtime.load.weight_reader import read_tensors
from spd.runtime.models import family_layout, weights
from spd.runtime.models.allocator import (
    BlockTensors,
    ExecutionConfig,
    LayerTensors,
    TensorFiller,
    WeightAllocator,
)
from spd.runtime.models.assistant_model import AssistantModel
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.block_model import BlockModel
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder import (
    AuxStateFuser,
    Decoder,
    DecoderParts,
    HeadModel,
)
from spd.runtime.models.decoder_layer import DecoderLayer, build_layer
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.parameters import Cut, Cuts
from spd.runtime.models.weights import HeadPart, HeadRules, ModelLayout, SharedTable


def read_rank_part(checkpoint: Checkpoint, name: str, cut: Cut) -> Tensor:
    """Read a rank's part of a tensor.

    Of cut rows only they are read; for cut columns the tensor is read.
    """
    if cut.dim:
        return torch.cat(cut.slices(checkpoint.read(name)), cut.dim)
    return torch.cat([checkpoint.read(name, rows) for rows in cut.ranges])


def make_direct_filler(checkpoint: Checkpoint, meter: LoadMeter, cuts: Cuts) -> TensorFiller:
    """Return a function that reads one tensor at a time into its view, or the part in `cuts`."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if (cut := cuts.get(name)) is not None:
                view.copy_(read_rank_part(checkpoint, name, cut))
            else:
                checkpoint.read(name, into=view)
            meter.advance(view.nbytes)

    return fill


def make_checkpoint_filler(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layout: ModelLayout,
    execution: ExecutionConfig,
    meter: LoadMeter,
) -> TensorFiller:
    """Return the function that fills views with a checkpoint's tensors, or a rank's part of them.

    It suits the device, the file's format and its quantization.
    """
    sources = weights.source_tensors(config, layout.sharded(execution.shard))
    cuts = {name: source.cut for name, source in sources.items() if source.cut is not None}
    if isinstance(checkpoint, GgufCheckpoint):
        return make_gguf_filler(checkpoint, meter, cuts)
    fill = make_direct_filler(checkpoint, meter, cuts)
    if not cuts and torch.device(execution.device).type == "cuda":
        fill = partial(read_tensors, checkpoint, advance=meter.advance)
    if config.quantization is None:
        return fill
    shapes = weights.expected_tensors(config, layout)
    return make_unpacking_filler(
        checkpoint=checkpoint,
        fill=fill,
        quantization=config.quantization,
        shapes=shapes,
        meter=meter,
        cuts=cuts,
    )


DUMMY_BIAS_STD = 0.02
"""The standard deviation of a dummy model's vectors other than norms."""
DUMMY_LOGIT_GAIN = 3.0
"""The standard deviation of a dummy model's logits: far from uniform, far from certain."""
DUMMY_DOWN_GAIN = 4.0
"""The ratio of an MLP's output to attention's: with less, the model repeats one token for ever."""


def make_dummy_filler(device: str, is_tied: bool, meter: LoadMeter) -> TensorFiller:
    """Return a function that fills views with normal numbers, the same ones each time on one
    device.

    Norms are ones, and products have the size of their inputs, so that nothing overflows however
    deep the model is, and the likeliest token depends on the text.
    """
    generator = cache(lambda: seeded_generator(device))  # made when a dummy model is

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if name.endswith("norm.weight"):
                view.fill_(1)
            else:
                view.normal_(0.0, _dummy_std(name, view, is_tied), generator=generator())
            meter.advance(view.nbytes)

    return fill


def _dummy_std(name: str, view: Tensor, is_tied: bool) -> float:
    """Return 1 / sqrt(columns), by which a product is as large as its input, times the gains above."""
    if view.dim() == 1:
        return DUMMY_BIAS_STD
    gain = DUMMY_DOWN_GAIN if name.endswith("down_proj.weight") else 1.0
    if name == (EMBEDDING if is_tied else HEAD):
        gain = DUMMY_LOGIT_GAIN
    return float(gain * view.shape[1] ** -0.5)


def _fill_tensors(allocator: WeightAllocator, fill: TensorFiller, layout: ModelLayout) -> None:
    """Fill the tensors allocated since the last call; add 1 to norms' scales that are stored minus
    1.
    """
    views = allocator.take_views()
    fill(views)
    if layout.centred_norm:
        for name, view in views.items():
            if "norm" in name and view.dim() == 1 and not name.endswith(layout.plain_norm):
                view.add_(1)


def decoder_part(config: ModelConfig, checkpoint: Checkpoint | None = None) -> HeadPart:
    """Return a full decoder as a `HeadPart`, which shares no tables, checked against a checkpoint.

    Logs warnings of unused tensors. Raises CheckpointError for missing or misshapen ones.
    """
    layout = family_layout(config)
    if checkpoint is not None:
        weights.warn_index_notes(checkpoint)
        weights.warn_unused_tensors(
            weights.check_weights(checkpoint, config, layout), checkpoint.folder
        )
    return HeadPart(layout, HeadRules(), {})


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the parts of a folder's model, or of its head."""

    config: ModelConfig
    builder: LayerBuilder
    allocates_first: bool = False
    """True if all tensors are allocated before one call of `fill`.

    Otherwise layers one at a time.
    """
    meter: LoadMeter | None = None

    def build(
        self,
        part: HeadPart,
        fill: TensorFiller,
        target: Decoder | None = None,
        extra_tables: Mapping[str, Tensor] | None = None,
    ) -> Decoder:
        """Allocate the tensors of a decoder, or of a part of a head of `target`, have `fill` write
        them, and return the model.

        extra_tables: tables from another source; the target's are used for missing ones.
        """
        config = self.config
        layout = part.layout
        execution = self.builder.execution
        ids = None if part.ids is None else part.ids.to(execution.device)
        allocator = WeightAllocator(execution)
        tables = allocator.allocate_block(weights.table_destinations(config, layout))
        allocated: deque[LayerTensors] = deque()
        if self.allocates_first:
            allocated.extend(
                allocator.allocate_layer(layer, layout.prefix.format(index))
                for index, layer in enumerate(layout.layers)
            )
        _fill_tensors(allocator, fill, layout)
        if layout.logit_scale != 1.0:
            tables["final_norm"].mul_(layout.logit_scale)
        tables |= extra_tables or {}
        embedding, head = self._make_embedding_and_head(tables, ids, target)
        layers = []
        for index, layer in enumerate(layout.layers):
            if not self.allocates_first:
                allocated.append(allocator.allocate_layer(layer, layout.prefix.format(index)))
                _fill_tensors(allocator, fill, layout)
            layers.append(self._build_layer(layer, allocated.popleft()))
        parts = DecoderParts(
            tables=tables,
            embedding=embedding,
            head=head,
            layers=layers,
            rotary=_make_rotary_table(config, layout, execution),
            heads=_attention_heads(layout),
            layout=layout,
            logit_softcap=config.logit_softcap,
        )
        if target is None:
            return Decoder(parts, self.builder)
        return self._make_head_model(part, parts, target, ids)

    def _make_head_model(
        self, part: HeadPart, parts: DecoderParts, target: Decoder, ids: Tensor | None
    ) -> Decoder:
        """Return the model of a part of a head of `target`, whose `state_fuser` may be set."""
        config = self.config
        if config.assistant is not None:
            suppressed = part.rules.suppressed_ids
            return AssistantModel(
                config=config.assistant,
                parts=parts,
                build=self.builder,
                target=target,
                token_order=ids,
                suppressed_ids=suppressed,
            )
        if config.stream_reader is not None:
            fuser = AuxStateFuser(config, parts.tables, self.builder, len(target.layers))
            target.state_fuser = fuser
        if config.block is not None:
            return BlockModel(config.block, parts, self.builder, ids)
        return HeadModel(part.rules, parts, self.builder, ids)

    def _make_embedding_and_head(
        self, tables: BlockTensors, ids: Tensor | None, target: Decoder | None
    ) -> tuple[AnyEmbedding, OutputHead]:
        """Return the embedding and the output head made of `tables`, or the target's where these
        have none.

        Tables that the results have are removed from `tables`. ids: the token of each row,
        for a head over some of the target's ids.
        """
        vocab_size = self.config.vocab_size
        is_tied = target is None and "head" not in tables
        embedding, head = (None, None) if target is None else (target.embedding, target.head)
        stored = {
            key: self.builder.rounded_weight(tables, key)
            for key in ("embedding", "head")
            if key in tables
        }
        if "head" in stored or is_tied:
            head = self.builder.head(stored["embedding" if is_tied else "head"], vocab_size, ids)
        if (table := stored.get("embedding")) is not None:
            embedding = self.builder.embedding(table, vocab_size, head if is_tied else None)
        for key in stored:
            tables.take_matrix(key)
        assert embedding is not None and head is not None
        return embedding, head

    def _build_layer(self, layout: LayerLayout, tensors: LayerTensors) -> DecoderLayer:
        """Return a layer of filled tensors, which are packed afterwards."""
        layer = build_layer(layout, tensors, self.builder)
        if self.allocates_first and self.meter is not None:
            nbytes = sum(tensor.nbytes for block in tensors for tensor in block.values())
            self.meter.advance(nbytes, "pack")
        return layer


def _attention_heads(layout: ModelLayout) -> tuple[AttentionHeads, ...]:
    """Return the heads of every shape among the layers, by what rows of a block attend to."""
    kinds = dict.fromkeys((block.heads, block.sees_block) for block in layout.attention_blocks)
    return tuple(
        AttentionHeads(
            *sizes,
            first_key=max(0, layout.shift),
            sliding=layout.windows(sizes, sees_block),
            sees_block=sees_block,
        )
        for sizes, sees_block in kinds
    )


def _make_rotary_table(
    config: ModelConfig, layout: ModelLayout, execution: ExecutionConfig
) -> RotaryTable:
    """Return the rotary table of a layout, with one for layers with local angles where there are
    any.
    """
    # Kernels that round the rotated head once can use exact tables.
    dtype = torch.float32 if execution.kernels.capabilities.float32_rotary else execution.dtype
    dims_by_locality = {
        isinstance(block, GqaLayout) and block.rotation.is_local: block.rotary
        for block in layout.attention_blocks
    }
    make_table = partial(
        RotaryTable,
        max_positions=execution.max_positions,
        dtype=dtype,
        device=execution.device,
        shift=layout.shift,
    )
    # All layers of a head may be sliding ones: then the main table is theirs.
    has_global = False in dims_by_locality
    rope = config.rope if has_global or config.local_rope is None else config.local_rope
    table = make_table(rope, dims_by_locality[not has_global])
    if config.local_rope is not None:
        local_dims = dims_by_locality[True in dims_by_locality]
        table.local = make_table(config.local_rope, local_dims)
    return table


@dataclass(frozen=True)
class HeadSource:
    """A head that drafts for a target: the configuration of its layers, and the source of its
    parts.
    """

    config: ModelConfig
    find_parts: Callable[[Checkpoint | None], Sequence[HeadPart]]
    """Returns the head's parts, checked against a checkpoint."""
    target: Decoder
    target_folder: ModelFolder
    is_separate: bool
    """True if other ranks than the target's share the head: it reads the target's tables itself."""

    def read_tables(
        self, part: HeadPart, checkpoint: Checkpoint | None, execution: ExecutionConfig
    ) -> dict[str, Tensor]:
        """Read the tables that the head does not share with its target: a rank's rows, on the
        device.

        One that equals the target's is read only where the head is separate.
        """
        tables: dict[str, Tensor] = {}
        for key, shared in part.shared.items():
            table = self._read_table(key, shared, checkpoint, execution.shard.id_range(shared.rows))
            if table is not None:
                tables[key] = table.to(execution.device, execution.dtype)
        return tables

    def _read_table(
        self,
        key: str,
        shared: SharedTable,
        checkpoint: Checkpoint | None,
        rows: tuple[int, int],
    ) -> Tensor | None:
        """Read rows `rows[0]` to `rows[1]` of a table; return None if the head uses the target's.

        key: "embedding" or "head".
        """
        first, end = rows
        if checkpoint is None:
            if not self.is_separate:
                return None
            return torch.randn(end - first, self.config.hidden_size)
        name = shared.checkpoint_name
        if shared.order is not None:
            return checkpoint.read(name)[shared.order][first:end]
        target_checkpoint = self.target_folder.checkpoint
        is_tied = self.target_folder.config.tie_embeddings
        target_name = EMBEDDING if key == "embedding" or is_tied else HEAD
        if shared.target_ids is not None:
            return self._read_target_table(target_name)[shared.target_ids[first:end]]
        is_target_plain = target_name in target_checkpoint.tensors
        if name in checkpoint.tensors and not (
            is_target_plain and checkpoint.tensors_equal(name, target_checkpoint, target_name)
        ):
            return read_values(checkpoint, name, rows)
        return self._read_target_table(target_name, rows) if self.is_separate else None

    def _read_target_table(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read rows `rows[0]` to `rows[1]` of a table of the target, or all; those in codes are
        multiplied out.
        """
        checkpoint = self.target_folder.checkpoint
        config = self.target_folder.config
        shape = (config.vocab_size, config.hidden_size)
        quantization = config.quantization
        if quantization is None:
            return read_values(checkpoint, name, rows)
        module_scheme = quantization.module_scheme(name, shape, checkpoint.tensors)
        if module_scheme is None:
            return read_values(checkpoint, name, rows)
        values = unpack_matrix(checkpoint, *module_scheme, shape).dequantize()
        return values if rows is None else values[rows[0] : rows[1]]


@torch.inference_mode()
def load_model(
    folder: ModelFolder,
    execution: ExecutionConfig,
    *,
    load: str = "auto",
    meter: LoadMeter | None = None,
    head: HeadSource | None = None,
) -> list[Decoder]:
    """Load a folder's model or the parts of its head, or random weights of its shapes if load is
    "dummy".

    Each of several ranks reads its part. A head that reads its target's streams sets the target's
    `state_fuser`.
    """
    config = folder.config if head is None else head.config
    meter = meter or LoadMeter()
    builder = LayerBuilder(execution, config.rms_norm_eps / config.scales.residual**2)
    models: list[Decoder] = []
    on_cuda = torch.device(execution.device).type == "cuda"
    # Matrices in codes would be in memory twice, and before they are rounded or packed.
    is_wide = execution.form.kind == "wide"
    allocates_first = on_cuda and head is None and load != "dummy" and is_wide
    model_builder = ModelBuilder(config, builder, allocates_first, meter)
    fill = make_dummy_filler(execution.device, head is None and config.tie_embeddings, meter)
    with ExitStack() as files:
        checkpoint = None if load == "dummy" else files.enter_context(folder.checkpoint)
        if head is not None and checkpoint is not None:
            files.enter_context(head.target_folder.checkpoint)
        parts = [decoder_part(config, checkpoint)] if head is None else head.find_parts(checkpoint)
        for part in parts:
            if checkpoint is not None:
                fill = make_checkpoint_filler(
                    checkpoint=checkpoint,
                    config=config,
                    layout=part.layout,
                    execution=execution,
                    meter=meter,
                )
            part = replace(part, layout=part.layout.sharded(execution.shard))
            if head is None:
                models.append(model_builder.build(part, fill))
            else:
                tables = head.read_tables(part, checkpoint, execution)
                models.append(model_builder.build(part, fill, head.target, tables))
        if checkpoint is not None:
            checkpoint.check_unchanged()
            if on_cuda:
                # Scratch memory of the readers' streams would stay reserved for them.
                torch.cuda.empty_cache()
    builder.share_workspace(execution.max_rows)
    return models
