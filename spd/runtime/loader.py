"""Checkpoint to model: check every name and shape, allocate fused, fill, finish.

On CUDA everything is allocated first and filled in the order of the files; on CPU the model is built a
layer at a time from the memory-mapped shards, since packing a layer makes its unpacked form worthless.
Nothing of the folder is executed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import ModelConfig, read_model_config
from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.runtime.dummy_weights import dummy_fill
from spd.runtime.fp8_blocks import scaling_fill
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models import family_layout
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.destinations import NOTHING
from spd.runtime.models.layer_builder import LayerBuilder, share_products
from spd.runtime.models.shards import Cuts, Shard
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.models.weights import ModelLayout, check_weights, cuts_of, layer_prefix, table_destinations
from spd.runtime.parallel.communicator import Communicator
from spd.runtime.progress import LoadMeter
from spd.runtime.sliced_reader import SlicedReader, TensorSource
from spd.runtime.weight_reader import read_tensors
from spd.runtime.weight_space import Fill, LayerTensors, WeightSpace, centre_norms

logger = logging.getLogger(__name__)


def mapped_fill(checkpoint: TensorSource, meter: LoadMeter) -> Fill:
    """Fill through memory-mapped files, a tensor at a time."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            view.copy_(checkpoint.read(name))
            meter.advance(view.nbytes)

    return fill


def threaded_fill(checkpoint: Checkpoint, meter: LoadMeter) -> Fill:
    """Fill by reading threads and asynchronous copies."""
    return lambda views: read_tensors(checkpoint, views, advance=meter.advance)


def checkpoint_fill(
    checkpoint: Checkpoint, config: ModelConfig, device: str, meter: LoadMeter, cuts: Cuts = NOTHING
) -> Fill:
    """The fill that suits a device, with scales applied where the configuration speaks of FP8 blocks.

    Who takes some tensors in part (`cuts`) reads through memory-mapped files.
    """
    if cuts:
        fill = mapped_fill(SlicedReader(checkpoint, cuts), meter)
        if config.fp8_block is None:
            return fill
        scales = mapped_fill(checkpoint, LoadMeter())
        return scaling_fill(checkpoint, fill, scales, config.fp8_block, cuts)
    way = threaded_fill if torch.device(device).type == "cuda" else mapped_fill
    fill = way(checkpoint, meter)
    if config.fp8_block is None:
        return fill
    return scaling_fill(checkpoint, fill, way(checkpoint, LoadMeter()), config.fp8_block)


def build_decoder(
    config: ModelConfig,
    fill: Fill,
    positions: int,
    dtype: torch.dtype,
    device: str,
    kernels: Kernels,
    *,
    at_once: bool = False,
    fold_norms: bool = False,
    meter: LoadMeter | None = None,
    rows: int = 64,
    form: WeightForm = WIDE,
    ranks: Communicator | None = None,
) -> Decoder:
    """A decoder whose tensors `fill` writes, with rotary tables for `positions` positions.

    With `at_once` everything is allocated before `fill` is called, once; without, a layer at a time.
    With `fold_norms` the norms inside the layers are folded into the matrices behind them, as Triton's
    linear layers want them. form: how the layers' matrices are kept. With `ranks` it is one rank's part,
    which exchanges with the others.
    """
    layout, space = rank_layout(config, ranks), WeightSpace(dtype, device, form)
    builder = LayerBuilder(kernels, config.rms_norm_eps, dtype, fold_norms=fold_norms, form=form, ranks=ranks)
    meter = meter or LoadMeter()
    tables = space.block(table_destinations(config, layout))
    allocated: deque[LayerTensors] = deque()
    if at_once:
        allocated.extend(space.layer(layer, layer_prefix(i)) for i, layer in enumerate(layout.layers))
    fill(space.take())
    if layout.centred_norm:
        centre_norms(tables)
    table, final_norm = tables["embedding"], tables["final_norm"]
    embedding = builder.embedding(table, config.vocab_size)
    head = builder.head(tables.pop("head", table), config.vocab_size)
    layers = []
    for index, layer in enumerate(layout.layers):
        if not at_once:
            allocated.append(space.layer(layer, layer_prefix(index)))
            fill(space.take())
        tensors = allocated.popleft()
        nbytes = tensors.nbytes
        layers.append(builder.layer(layer, tensors))
        del tensors  # packed, and not needed twice
        if at_once:
            meter.advance(nbytes, "pack")
    share_products(layers, rows)
    attention = layout.layers[0].attention
    # Kernels round the rotated head once, so that they can use exact tables.
    exact = torch.float32 if kernels.name == "triton" else dtype
    rotary = RotaryTable(config.rope, attention.rotary, positions, exact, device)
    if config.local_rope is not None:
        rotary.local = RotaryTable(config.local_rope, attention.rotary, positions, exact, device)
    heads = AttentionHeads(*attention.heads, sliding=layout.sliding)
    return Decoder(
        embedding,
        layers,
        final_norm,
        head,
        rotary,
        heads,
        config.rms_norm_eps,
        kernels,
        embedding_scale=rounded(layout.embedding_scale, dtype),
        logit_softcap=config.logit_softcap,
    )


def rank_layout(config: ModelConfig, ranks: Communicator | None) -> ModelLayout:
    """A family's layout, or a rank's part of it."""
    layout = family_layout(config)
    return layout if ranks is None else layout.sharded(Shard(ranks.rank, ranks.size))


def rounded(value: float | None, dtype: torch.dtype) -> float | None:
    """The nearest number that dtype has."""
    return None if value is None else float(torch.tensor(value, dtype=dtype))


@torch.inference_mode()
def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    positions: int,
    kernels: Kernels,
    load: str = "auto",
    meter: LoadMeter | None = None,
    rows: int = 64,
    form: WeightForm = WIDE,
    ranks: Communicator | None = None,
) -> Decoder:
    """Load a folder's weights, or random ones of its shapes when load is "dummy".

    rows: the most rows of a forward pass other than a prompt chunk. form: see `weight_choice`. With `ranks`
    only this rank's part is read.

    Raises CheckpointError with every missing or mis-shaped tensor in one message.
    """
    config, meter = read_model_config(folder), meter or LoadMeter()
    kind: torch.dtype = getattr(torch, dtype)
    build = partial(
        build_decoder,
        config,
        positions=positions,
        dtype=kind,
        device=device,
        kernels=kernels,
        fold_norms=kernels.name == "triton",
        meter=meter,
        rows=rows,
        form=form,
        ranks=ranks,
    )
    if load == "dummy":
        return build(dummy_fill(device, config.tie_embeddings, meter))
    with Checkpoint.open(folder) as checkpoint:
        unexpected = check_weights(checkpoint, config, family_layout(config))
        if unexpected:
            logger.warning("%d tensors of %s are not used, %s first", len(unexpected), folder, unexpected[0])
        on_cuda = torch.device(device).type == "cuda"
        cuts = cuts_of(config, rank_layout(config, ranks))
        fill = checkpoint_fill(checkpoint, config, device, meter, cuts)
        # What is rounded at load would be there twice, and whole.
        model = build(fill, at_once=on_cuda and form.kind != "int8")
        checkpoint.check_unchanged()
        if on_cuda:
            torch.cuda.empty_cache()  # the readers' streams would keep their scratch memory to themselves
        return model
