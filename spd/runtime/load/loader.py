"""Checkpoint to model: check every name and shape, allocate fused, fill, finish.

On CUDA a decoder is allocated whole and filled in the order of the files; on CPU it is built a layer at a
time, since packing a layer makes its unpacked form worthless. Heads that draft are loaded beside their
target, and share what they can with it. Nothing of a folder is executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.load.dummy_weights import dummy_fill
from spd.runtime.load.fp8_blocks import scaling_fill
from spd.runtime.load.progress import LoadMeter
from spd.runtime.load.weight_reader import read_tensors
from spd.runtime.models import family_layout, weights
from spd.runtime.models.builder import Fill, LayerBuilder, LayerTensors, Place, WeightSpace
from spd.runtime.models.decoder import Decoder, Parts, build_layer
from spd.runtime.models.destinations import NOTHING, Cut, Cuts
from spd.runtime.models.head_model import HeadModel, aux_states
from spd.runtime.models.weights import (
    HeadPart,
    ModelLayout,
    SharedTable,
    check_weights,
    cuts_of,
    table_destinations,
    tell_unused,
)


def read_part(checkpoint: Checkpoint, name: str, cut: Cut) -> Tensor:
    """The part of a tensor that is wanted: of rows only they are read; all rows have some columns."""
    if cut.dim:
        return torch.cat(cut.of(checkpoint.read(name)), cut.dim)
    return torch.cat([checkpoint.read(name, rows) for rows in cut.ranges])


def direct_fill(checkpoint: Checkpoint, meter: LoadMeter, cuts: Cuts = NOTHING) -> Fill:
    """Fill a tensor at a time, each read to where it belongs, or of those in `cuts` a part."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if name in cuts:
                view.copy_(read_part(checkpoint, name, cuts[name]))
            else:
                checkpoint.read(name, into=view)
            meter.advance(view.nbytes)

    return fill


def threaded_fill(checkpoint: Checkpoint, meter: LoadMeter) -> Fill:
    """Fill by reading threads and asynchronous copies."""
    return lambda views: read_tensors(checkpoint, views, advance=meter.advance)


def checkpoint_fill(
    checkpoint: Checkpoint, config: ModelConfig, layout: ModelLayout, device: str, meter: LoadMeter
) -> Fill:
    """The fill that suits a device, with scales applied where the configuration speaks of FP8 blocks."""
    cuts = cuts_of(config, layout)
    if cuts or torch.device(device).type != "cuda":
        fill, scales = direct_fill(checkpoint, meter, cuts), direct_fill(checkpoint, LoadMeter())
    else:
        fill, scales = threaded_fill(checkpoint, meter), threaded_fill(checkpoint, LoadMeter())
    if config.fp8_block is None:
        return fill
    return scaling_fill(checkpoint, fill, scales, config.fp8_block, cuts)


def same_tensor(one: Checkpoint, name: str, other: Checkpoint, its_name: str) -> bool:
    """Whether two stored tensors are equal, read a part at a time."""
    shape, step = one.meta(name).shape, 4096
    parts = [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]
    return shape == other.meta(its_name).shape and all(
        torch.equal(one.read(name, part), other.read(its_name, part)) for part in parts
    )


def _filled(space: WeightSpace, fill: Fill, layout: ModelLayout) -> None:
    """Fill what was allocated; scales of norms that are stored as their distance from 1 become whole."""
    views = space.take()
    fill(views)
    if layout.centred_norm:
        for name, view in views.items():
            if "norm" in name and view.dim() == 1:
                view.add_(1)


def _parts(
    config: ModelConfig,
    layout: ModelLayout,
    builder: LayerBuilder,
    fill: Fill,
    positions: int,
    *,
    at_once: bool = False,
    meter: LoadMeter | None = None,
    target: Decoder | None = None,
    given: Mapping[str, Tensor] | None = None,
    ids: Tensor | None = None,
) -> Parts:
    """Allocate, fill and build; `given` are tables that come another way, and `target` has what is missing.

    ids: see `LayerBuilder.head`.
    """
    place, space = builder.place, WeightSpace(builder.place)
    tables = space.block(table_destinations(config, layout))
    allocated: deque[LayerTensors] = deque()
    if at_once:
        allocated.extend(space.layer(each, layout.prefix.format(i)) for i, each in enumerate(layout.layers))
    _filled(space, fill, layout)
    tables |= given or {}
    if target is None:
        tables.setdefault("head", tables["embedding"])
    embedding, head = (None, None) if target is None else (target.embedding, target.head)
    if "embedding" in tables:
        embedding = builder.embedding(tables["embedding"], config.vocab_size)
    if "head" in tables:
        head = builder.head(tables.pop("head"), config.vocab_size, ids)
    assert embedding is not None and head is not None
    layers = []
    for index, layer in enumerate(layout.layers):
        if not at_once:
            allocated.append(space.layer(layer, layout.prefix.format(index)))
            _filled(space, fill, layout)
        tensors = allocated.popleft()
        nbytes = sum(tensor.nbytes for block in tensors for tensor in block.values())
        layers.append(build_layer(layer, tensors, builder))
        del tensors  # packed, and not needed twice
        if at_once and meter is not None:
            meter.advance(nbytes, "pack")
    attention = layout.layers[0].attention
    # Kernels round the rotated head once, so that they can use exact tables.
    exact = torch.float32 if place.kernels.facts.exact_rotary else place.dtype
    turning = partial(RotaryTable, dims=attention.rotary, max_positions=positions, dtype=exact)
    rotary = turning(config.rope, device=place.device, shift=layout.shift)
    if config.local_rope is not None:
        rotary.local = turning(config.local_rope, device=place.device, shift=layout.shift)
    heads = AttentionHeads(*attention.heads, first_key=layout.shift, sliding=layout.sliding)
    return Parts(tables, embedding, head, layers, rotary, heads)


def build_decoder(
    config: ModelConfig,
    builder: LayerBuilder,
    fill: Fill,
    positions: int,
    *,
    at_once: bool = False,
    meter: LoadMeter | None = None,
    rows: int = 64,
) -> Decoder:
    """A decoder whose tensors `fill` writes, with rotary tables for `positions` positions.

    With `at_once` everything is allocated before `fill` is called, once; without, a layer at a time.
    """
    place, layout = builder.place, builder.place.part_of(family_layout(config))
    parts = _parts(config, layout, builder, fill, positions, at_once=at_once, meter=meter)
    builder.share_workspace(rows)
    scale = layout.embedding_scale
    return Decoder(
        parts,
        builder,
        embedding_scale=None if scale is None else float(torch.tensor(scale, dtype=place.dtype)),
        logit_softcap=config.logit_softcap,
    )


@torch.inference_mode()
def load_model(
    folder: ModelFolder,
    place: Place,
    *,
    positions: int,
    load: str = "auto",
    meter: LoadMeter | None = None,
    rows: int = 64,
) -> Decoder:
    """Load a folder's weights, or random ones of its shapes when load is "dummy".

    rows: the most rows of a forward pass other than a prompt chunk. Of several ranks each reads its part.

    Raises CheckpointError with every missing or mis-shaped tensor in one message.
    """
    config, meter = folder.config, meter or LoadMeter()
    builder = LayerBuilder(place, config.rms_norm_eps)
    if load == "dummy":
        fill = dummy_fill(place.device, config.tie_embeddings, meter)
        return build_decoder(config, builder, fill, positions, meter=meter, rows=rows)
    with folder.checkpoint as checkpoint:
        layout = family_layout(config)
        tell_unused(check_weights(checkpoint, config, layout), folder.path)
        on_cuda = torch.device(place.device).type == "cuda"
        fill = checkpoint_fill(checkpoint, config, place.part_of(layout), place.device, meter)
        # What is rounded at load would be there twice, and whole.
        at_once = on_cuda and place.form.kind != "int8"
        model = build_decoder(config, builder, fill, positions, at_once=at_once, meter=meter, rows=rows)
        checkpoint.check_unchanged()
        if on_cuda:
            torch.cuda.empty_cache()  # the readers' streams would keep their scratch memory to themselves
        return model


FindParts = Callable[[Checkpoint | None], Sequence[HeadPart]]
"""The parts of a head, seen to be in its checkpoint. Raises CheckpointError."""


@torch.inference_mode()
def load_head(
    config: ModelConfig,
    folder: ModelFolder,
    find: FindParts,
    place: Place,
    target: Decoder,
    target_folder: ModelFolder,
    *,
    apart: bool,
    positions: int,
    load: str,
    meter: LoadMeter,
    rows: int,
) -> list[HeadModel]:
    """The parts of a head that drafts for a target, or random ones of its shapes when load is "dummy".

    Where it reads the target's streams, that feeds it from then on. apart: other ranks than the target's
    share the head, so that what it takes from the target is read again. For the rest see `load_model`.
    """
    builder, made, dummy = LayerBuilder(place, config.rms_norm_eps), list[HeadModel](), load == "dummy"
    fill = dummy_fill(place.device, False, meter)
    with ExitStack() as files:
        own = None if dummy else files.enter_context(folder.checkpoint)
        theirs = None if dummy else files.enter_context(target_folder.checkpoint)
        tied = target_folder.config.tie_embeddings
        names = {"embedding": weights.EMBEDDING, "head": weights.EMBEDDING if tied else weights.HEAD}
        for part in find(own):
            layout = place.part_of(part.layout)
            given = {}
            for key, shared in part.shared.items():
                first, end = place.ids(shared.rows)
                if own is None or theirs is None:
                    table = torch.randn(end - first, config.hidden_size) if apart else None
                else:
                    table = _table(shared, own, theirs, names[key], (first, end), apart=apart)
                if table is not None:
                    given[key] = table.to(place.device, place.dtype)
            if own is not None:
                fill = checkpoint_fill(own, config, layout, place.device, meter)
            ids = None if part.ids is None else part.ids.to(place.device)
            found = _parts(config, layout, builder, fill, positions, target=target, given=given, ids=ids)
            made.append(HeadModel(part.rules, found, builder, ids))
            if "fuse" in found.tables:
                target.reader = aux_states(config, found.tables, builder, len(target.layers))
        if own is not None:
            own.check_unchanged()
    builder.share_workspace(rows)
    return made


def _table(
    shared: SharedTable,
    own: Checkpoint,
    theirs: Checkpoint,
    its_name: str,
    rows: tuple[int, int],
    *,
    apart: bool,
) -> Tensor | None:
    """Some rows of a table of the head's own; of one that equals the target's, only where that is apart."""
    if shared.order is not None:
        return own.read(shared.own)[shared.order][slice(*rows)]
    if shared.own in own.tensors and not same_tensor(own, shared.own, theirs, its_name):
        return own.read(shared.own, rows)
    return theirs.read(its_name, rows) if apart else None
