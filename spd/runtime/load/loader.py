"""Checkpoint to model: check every name and shape, allocate fused, fill, finish.

On CUDA a decoder is allocated whole and filled in the order of the files; on CPU it is built a layer at a
time, since packing a layer makes its unpacked form worthless. Heads that draft are loaded beside their
target, and share what they can with it. Nothing of a folder is executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.gguf.model import GgufCheckpoint
from spd.formats.model_config import ModelConfig
from spd.formats.names import EMBEDDING, HEAD
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.runtime.layers.linear import AnyEmbedding, AnyHead
from spd.runtime.layers.native_linear import PackedEmbedding
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.load.gguf_weights import gguf_fill, read_values
from spd.runtime.load.packed_weights import unpacking_fill
from spd.runtime.load.progress import LoadMeter
from spd.runtime.load.weight_reader import read_tensors
from spd.runtime.models import family_layout, weights
from spd.runtime.models.assistant_model import AssistantModel
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.builder import (
    Fill,
    LayerBuilder,
    LayerTensors,
    Place,
    Tensors,
    WeightSpace,
)
from spd.runtime.models.decoder import (
    AuxStates,
    Decoder,
    DecoderLayer,
    HeadModel,
    Parts,
    build_layer,
)
from spd.runtime.models.destinations import Cut, Cuts
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.weights import HeadPart, HeadRules, ModelLayout


def read_part(checkpoint: Checkpoint, name: str, cut: Cut) -> Tensor:
    """The part of a tensor that is wanted: of rows only they are read; all rows have some columns."""
    if cut.dim:
        return torch.cat(cut.of(checkpoint.read(name)), cut.dim)
    return torch.cat([checkpoint.read(name, rows) for rows in cut.ranges])


def direct_fill(checkpoint: Checkpoint, meter: LoadMeter, cuts: Cuts) -> Fill:
    """Fill a tensor at a time, each read to where it belongs, or of those in `cuts` a part."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if (cut := cuts.get(name)) is not None:
                view.copy_(read_part(checkpoint, name, cut))
            else:
                checkpoint.read(name, into=view)
            meter.advance(view.nbytes)

    return fill


def checkpoint_fill(
    checkpoint: Checkpoint, config: ModelConfig, whole: ModelLayout, place: Place, meter: LoadMeter
) -> Fill:
    """The fill that suits a device and quantized weights, of a rank's part of the whole."""
    parts = weights.parts_of(config, whole.sharded(place.shard)).items()
    cuts = {name: part.cut for name, part in parts if part.cut is not None}
    if isinstance(checkpoint, GgufCheckpoint):
        return gguf_fill(checkpoint, meter, cuts)
    fill = direct_fill(checkpoint, meter, cuts)
    if not cuts and torch.device(place.device).type == "cuda":
        fill = partial(read_tensors, checkpoint, advance=meter.advance)
    if config.quantization is None:
        return fill
    shapes = weights.expected_tensors(config, whole)
    return unpacking_fill(checkpoint, fill, config.quantization, shapes, meter, cuts)


DUMMY_BIAS = 0.02
DUMMY_LOGITS = (
    3.0  # standard deviation of a dummy model's logits: far from uniform, far from certain
)
DUMMY_DOWN = (
    4.0  # how much larger an MLP's output is than attention's: else one token is said for ever
)


def dummy_fill(device: str, tied: bool, meter: LoadMeter) -> Fill:
    """Fill with normal numbers, the same ones each time on one kind of device.

    Norms are ones, and products keep the size of what they are given, so that nothing overflows however
    deep the model is, and the likeliest token depends on the text.
    """
    generator = torch.Generator(device).manual_seed(0)

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if name.endswith("norm.weight"):
                view.fill_(1)
            else:
                view.normal_(0.0, _dummy_std(name, view, tied), generator=generator)
            meter.advance(view.nbytes)

    return fill


def _dummy_std(name: str, view: Tensor, tied: bool) -> float:
    """1 / sqrt(columns), so that a product is as large as its input, but for the two named above."""
    if view.dim() == 1:
        return DUMMY_BIAS
    gain = DUMMY_DOWN if name.endswith("down_proj.weight") else 1.0
    if name == (EMBEDDING if tied else HEAD):
        gain = DUMMY_LOGITS
    return float(gain * view.shape[1] ** -0.5)


def _filled(space: WeightSpace, fill: Fill, layout: ModelLayout) -> None:
    """Fill what was allocated; scales of norms that are stored as their distance from 1 become whole."""
    views = space.take()
    fill(views)
    if layout.centred_norm:
        for name, view in views.items():
            if "norm" in name and view.dim() == 1 and not name.endswith(layout.plain_norm):
                view.add_(1)


def decoder_part(config: ModelConfig, checkpoint: Checkpoint | None = None) -> HeadPart:
    """What loads a decoder, which shares nothing, seen to be in a checkpoint."""
    layout = family_layout(config)
    if checkpoint is not None:
        weights.tell_notes(checkpoint)
        weights.tell_unused(weights.check_weights(checkpoint, config, layout), checkpoint.folder)
    return HeadPart(layout, HeadRules(), {})


@dataclass(frozen=True)
class ModelLoading:
    """What every part of a folder's model, or of its head, is built with.

    With `at_once` everything is allocated before `fill` is called, once; without, a layer at a time.
    """

    config: ModelConfig
    builder: LayerBuilder
    at_once: bool = False
    meter: LoadMeter | None = None

    def build(
        self,
        part: HeadPart,
        fill: Fill,
        target: Decoder | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Decoder:
        """Return a decoder whose tensors `fill` writes, or a part of a head beside its target.

        given: tables that come another way; `target` has what is missing.
        """
        config = self.config
        layout = part.layout
        place = self.builder.place
        ids = None if part.ids is None else part.ids.to(place.device)
        space = WeightSpace(place)
        tables = space.block(weights.table_destinations(config, layout))
        allocated: deque[LayerTensors] = deque()
        if self.at_once:
            allocated.extend(
                space.layer(each, layout.prefix.format(i)) for i, each in enumerate(layout.layers)
            )
        _filled(space, fill, layout)
        if layout.logit_scale != 1.0:
            tables["final_norm"].mul_(layout.logit_scale)
        tables |= given or {}
        embedding, head = self._ends(tables, ids, target)
        layers = []
        for index, layer in enumerate(layout.layers):
            if not self.at_once:
                allocated.append(space.layer(layer, layout.prefix.format(index)))
                _filled(space, fill, layout)
            layers.append(self._layer(layer, allocated.popleft()))
        parts = Parts(
            tables=tables,
            embedding=embedding,
            head=head,
            layers=layers,
            rotary=_rotary(config, layout, place),
            heads=_attention_heads(layout),
            layout=layout,
            logit_softcap=config.logit_softcap,
        )
        if target is None:
            return Decoder(parts, self.builder)
        if config.assistant is not None:
            never = part.rules.never
            return AssistantModel(config.assistant, parts, self.builder, target, ids, never)
        if "fuse" in tables:
            target.reader = AuxStates(config, tables, self.builder, len(target.layers))
        return HeadModel(part.rules, parts, self.builder, ids)

    def _ends(
        self, tables: Tensors, ids: Tensor | None, target: Decoder | None
    ) -> tuple[AnyEmbedding, AnyHead]:
        """Return the embedding and the head of tables, which lose what is kept packed, or of a target.

        ids: of a head of some of the target's ids each row's.
        """
        vocab_size = self.config.vocab_size
        is_tied = target is None and "head" not in tables
        embedding, head = (None, None) if target is None else (target.embedding, target.head)
        if "head" in tables or is_tied:
            own = tables.kept("embedding" if is_tied else "head")
            head = self.builder.head(own, vocab_size, ids)
            tables.pop("head", None)
        if "embedding" in tables:
            same = head if is_tied else None
            embedding = self.builder.embedding(tables.kept("embedding"), vocab_size, same)
        assert embedding is not None and head is not None
        if isinstance(embedding, PackedEmbedding):
            # The codes are packed, and not needed twice.
            tables.grouped.clear()
            tables.pop("embedding")
        return embedding, head

    def _layer(self, layout: LayerLayout, tensors: LayerTensors) -> DecoderLayer:
        """Return a layer of filled tensors, which are packed then."""
        layer = build_layer(layout, tensors, self.builder)
        if self.at_once and self.meter is not None:
            nbytes = sum(tensor.nbytes for block in tensors for tensor in block.values())
            self.meter.advance(nbytes, "pack")
        return layer


def _attention_heads(layout: ModelLayout) -> tuple[AttentionHeads, ...]:
    """Return the heads of every shape that layers have."""
    return tuple(
        AttentionHeads(*sizes, first_key=max(0, layout.shift), sliding=layout.windows(sizes))
        for sizes in dict.fromkeys(block.heads for block in layout.attending)
    )


def _rotary(config: ModelConfig, layout: ModelLayout, place: Place) -> RotaryTable:
    # Kernels round the rotated head once, so that they can use exact tables.
    exact = torch.float32 if place.kernels.capabilities.float32_rotary else place.dtype
    dims = {
        isinstance(each, GqaLayout) and each.rotation.is_local: each.rotary
        for each in layout.attending
    }
    given = (place.positions, exact, place.device, layout.shift)
    alone = None if False in dims else config.local_rope  # of a head whose layers all slide
    table = RotaryTable(alone or config.rope, dims.get(False) or dims[True], *given)
    if config.local_rope is not None:
        table.local = RotaryTable(config.local_rope, dims.get(True) or dims[False], *given)
    return table


@dataclass(frozen=True)
class Head:
    """A head that drafts beside a target: the configuration of its layers, and where its parts are found."""

    config: ModelConfig
    find: Callable[
        [Checkpoint | None], Sequence[HeadPart]
    ]  # the parts, seen to be in what is given
    target: Decoder
    target_folder: ModelFolder
    apart: (
        bool  # other ranks than the target's share the head: what it takes from there is read again
    )

    def tables(self, part: HeadPart, own: Checkpoint | None, place: Place) -> dict[str, Tensor]:
        """Tables of ids of the head's own. One that equals the target's is read only where that is apart."""
        target = self.target_folder
        its_head = EMBEDDING if target.config.tie_embeddings else HEAD
        names = {"embedding": EMBEDDING, "head": its_head}
        found: dict[str, Tensor] = {}
        for key, shared in part.shared.items():
            first, end = place.shard.ids(shared.rows)
            if own is None:
                table = torch.randn(end - first, self.config.hidden_size) if self.apart else None
            elif shared.order is not None:
                table = own.read(shared.own)[shared.order][first:end]
            elif shared.own in own.tensors and not own.tensors_equal(
                shared.own, target.checkpoint, names[key]
            ):
                table = read_values(own, shared.own, (first, end))
            else:
                table = (
                    read_values(target.checkpoint, names[key], (first, end)) if self.apart else None
                )
            if table is not None:
                found[key] = table.to(place.device, place.dtype)
        return found


@torch.inference_mode()
def load_model(
    folder: ModelFolder,
    place: Place,
    *,
    load: str = "auto",
    meter: LoadMeter | None = None,
    head: Head | None = None,
) -> list[Decoder]:
    """Load a folder's model or the parts of its head, or random weights of its shapes when load is "dummy".

    Of several ranks each reads its part. A head that reads its target's streams feeds it from then on.
    """
    config = folder.config if head is None else head.config
    meter = meter or LoadMeter()
    builder = LayerBuilder(place, config.rms_norm_eps / config.scales.residual**2)
    made: list[Decoder] = []
    on_cuda = torch.device(place.device).type == "cuda"
    # What is rounded at load would be there twice, and whole.
    at_once = (
        on_cuda and head is None and load != "dummy" and place.form.kind not in ("int8", "int4")
    )
    loading = ModelLoading(config, builder, at_once, meter)
    fill = dummy_fill(place.device, head is None and config.tie_embeddings, meter)
    with ExitStack() as files:
        own = None if load == "dummy" else files.enter_context(folder.checkpoint)
        if head is not None and own is not None:
            files.enter_context(head.target_folder.checkpoint)
        for part in [decoder_part(config, own)] if head is None else head.find(own):
            if own is not None:
                fill = checkpoint_fill(own, config, part.layout, place, meter)
            part = replace(part, layout=part.layout.sharded(place.shard))
            if head is None:
                made.append(loading.build(part, fill))
            else:
                made.append(loading.build(part, fill, head.target, head.tables(part, own, place)))
        if own is not None:
            own.check_unchanged()
            if on_cuda:
                torch.cuda.empty_cache()  # the readers' streams would keep their scratch memory to themselves
    builder.share_workspace(place.rows)
    return made
