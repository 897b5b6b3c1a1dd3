"""Checkpoint to model: check every name and shape, allocate fused, fill, finish.

On CUDA everything is allocated first and filled in the order of the files; on CPU the model is built a
layer at a time from the memory-mapped shards, since packing a layer makes its unpacked form worthless.
Nothing of the folder is executed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.model_config import ModelConfig, read_model_config
from spd.kernels.dispatch import Kernels
from spd.runtime.dummy_weights import dummy_fill
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import Linear, SkinnyLinear, share_workspace
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models import family_differences
from spd.runtime.models.decoder import Decoder, DecoderLayer
from spd.runtime.models.weights import expected_tensors, is_ignorable
from spd.runtime.progress import LoadMeter
from spd.runtime.weight_reader import read_tensors
from spd.runtime.weight_space import Fill, Fused, LayerWeights, WeightSpace, fold_norm

logger = logging.getLogger(__name__)


def mapped_fill(checkpoint: Checkpoint, meter: LoadMeter) -> Fill:
    """Fill through memory-mapped files, a tensor at a time."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            view.copy_(checkpoint.read(name))
            meter.advance(view.nbytes)

    return fill


def threaded_fill(checkpoint: Checkpoint, meter: LoadMeter) -> Fill:
    """Fill by reading threads and asynchronous copies."""
    return lambda views: read_tensors(checkpoint, views, advance=meter.advance)


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
) -> Decoder:
    """A decoder whose tensors `fill` writes, with rotary tables for `positions` positions.

    With `at_once` everything is allocated before `fill` is called, once; without, a layer at a time.
    With `fold_norms` the norms inside the layers are folded into the matrices behind them, as Triton's
    linear layers want them.
    """
    space = WeightSpace(config, family_differences(config), dtype, device)
    meter = meter or LoadMeter()

    def finished(weights: LayerWeights) -> DecoderLayer:
        layer = _finish_layer(config, weights, kernels, fold_norms)
        if at_once:
            meter.advance(_layer_bytes(weights), "pack")
        return layer

    tables = space.tables()
    allocated: deque[LayerWeights] = deque()
    if at_once:
        allocated.extend(space.layer(layer) for layer in range(config.num_layers))
    fill(space.take())
    head = _linear(Fused(tables.head, None), kernels)
    embedding, final_norm = tables.embedding, tables.final_norm
    del tables  # the head may just have been packed, and is not needed twice
    layers = []
    for layer in range(config.num_layers):
        if not at_once:
            allocated.append(space.layer(layer))
            fill(space.take())
        layers.append(finished(allocated.popleft()))
    products = [p for layer in layers for p in layer.products() if isinstance(p, SkinnyLinear)]
    if products:
        share_workspace(products, rows)
    # Kernels round the rotated head once, so that they can use exact tables.
    exact = torch.float32 if kernels.name == "triton" else dtype
    rotary = RotaryTable(config.rope, config.head_dim, positions, exact, device)
    return Decoder(embedding, layers, final_norm, head, rotary, config.rms_norm_eps, kernels)


def _layer_bytes(weights: LayerWeights) -> int:
    return sum(f.weight.nbytes for f in (weights.qkv, weights.output, weights.gate_up, weights.down))


def _linear(fused: Fused, kernels: Kernels) -> Linear | SkinnyLinear:
    if kernels.name == "triton":
        return SkinnyLinear(fused.weight, fused.bias, kernels)
    return Linear(fused.weight, fused.bias)


def _finish_layer(
    config: ModelConfig, weights: LayerWeights, kernels: Kernels, fold_norms: bool
) -> DecoderLayer:
    """Fold, pack and put together one layer."""
    if fold_norms:
        fold_norm(weights.qkv.weight, weights.input_norm)
        fold_norm(weights.gate_up.weight, weights.post_norm)
    attention = Attention(
        weights.input_norm,
        _linear(weights.qkv, kernels),
        _linear(weights.output, kernels),
        config.head_dim,
        config.num_heads,
        config.num_kv_heads,
        weights.qk_norm,
        config.rms_norm_eps,
        kernels,
    )
    gate_up, down = _linear(weights.gate_up, kernels), _linear(weights.down, kernels)
    return DecoderLayer(attention, GatedMlp(weights.post_norm, gate_up, down, config.rms_norm_eps))


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
) -> Decoder:
    """Load a folder's weights, or random ones of its shapes when load is "dummy".

    rows: the most rows of a forward pass other than a prompt chunk.

    Raises CheckpointError with every missing or mis-shaped tensor in one message.
    """
    config, meter = read_model_config(folder), meter or LoadMeter()
    kind: torch.dtype = getattr(torch, dtype)
    fold_norms = kernels.name == "triton"
    if load == "dummy":
        fill = dummy_fill(device, config.tie_embeddings, meter)
        return build_decoder(
            config, fill, positions, kind, device, kernels, fold_norms=fold_norms, meter=meter, rows=rows
        )
    with Checkpoint.open(folder) as checkpoint:
        shapes = expected_tensors(config, family_differences(config))
        unexpected = check_tensors(checkpoint, shapes, ignorable=is_ignorable)
        if unexpected:
            logger.warning("%d tensors of %s are not used, %s first", len(unexpected), folder, unexpected[0])
        on_cuda = torch.device(device).type == "cuda"
        fill = (threaded_fill if on_cuda else mapped_fill)(checkpoint, meter)
        model = build_decoder(
            config,
            fill,
            positions,
            kind,
            device,
            kernels,
            at_once=on_cuda,
            fold_norms=fold_norms,
            meter=meter,
            rows=rows,
        )
        checkpoint.check_unchanged()
        if on_cuda:
            torch.cuda.empty_cache()  # the readers' streams would keep their scratch memory to themselves
        return model
