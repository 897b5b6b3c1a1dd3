"""Allocates a model's weights: tensors, and views of them that a checkpoint's tensors fill.

A fused matrix is allocated once, with a view for each tensor of the file, which is written straight
to its rows, so that loading never holds a tensor twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.capabilities import FLOAT_CODES, CodeKind
from spd.kernels.interface import Kernels
from spd.kernels.linear.few_bits import GroupedWeight, StackedWeight
from spd.runtime.layers.base import Communicator
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.parameters import UNSHARDED, HeadTile, ParameterSpec, Shard, SourceTensor
from spd.runtime.models.weight_forms import WIDE, PackedSpec, ScaleKind, WeightForm, part_name

TensorFiller = Callable[[Mapping[str, Tensor]], None]
"""Writes views by name, each with the tensor of that name from any source."""
SCALE_DTYPES: Mapping[ScaleKind, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "exponents": torch.uint8,
    "factored": torch.uint8,
}
"""The dtypes of scales in memory."""
StoredWeight = Tensor | GroupedWeight | StackedWeight
"""A matrix as it is stored: plain, or in codes."""


class Piece(NamedTuple):
    """Rows of a matrix that are rounded alike."""

    rows: int
    kind: CodeKind


class BlockTensors(dict[str, Tensor]):
    """Tensors of a layer's block, or of a model's tables, by name; of a matrix in codes, its codes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.grouped: dict[str, GroupedWeight | StackedWeight] = {}
        """Matrices in codes, with their scales and other quantization parameters."""
        self.tiles: dict[str, HeadTile] = {}
        """The order of columns of matrices in codes where it is not that of the input's heads."""
        self.pieces: dict[str, list[Piece]] = {}
        """The pieces of matrices that are rounded at load."""
        self.widened: set[str] = set()
        """Those of them whose values are stored in the run's dtype nevertheless."""

    def matrix(self, name: str) -> StoredWeight:
        """Return a matrix as it is stored."""
        return self.grouped.get(name, self[name])

    def take_matrix(self, name: str) -> StoredWeight:
        """Remove a matrix, and return it as it is stored.

        A product of a matrix in codes has a copy in the order that its kernels read.
        """
        tensor = self.pop(name)
        return self.grouped.pop(name, tensor)


LayerTensors = tuple[BlockTensors, BlockTensors]
"""The tensors of a layer's attention block and of its MLP block."""


@dataclass(frozen=True)
class ExecutionConfig:
    """The dtype, device, kernels, weight form and ranks that a model runs with."""

    dtype: torch.dtype
    device: str
    kernels: Kernels
    form: WeightForm = WIDE
    ranks: Communicator | None = None
    max_positions: int = 0
    """The number of positions in rotary tables."""
    max_rows: int = 64
    """The most rows of a forward pass other than a prompt chunk."""
    rounds_cache: bool = False
    """True if keys and values are rounded to eight bits where they are stored."""

    @property
    def shard(self) -> Shard:
        """Return this rank's shard."""
        return UNSHARDED if self.ranks is None else Shard(self.ranks.rank, self.ranks.size)


class WeightAllocator:
    """Allocates tensors, not yet filled, and records the view that each checkpoint tensor fills."""

    def __init__(self, execution: ExecutionConfig) -> None:
        self.execution = execution
        self._views: dict[str, Tensor] = {}

    def take_views(self) -> Mapping[str, Tensor]:
        """Return checkpoint names and the views that they fill, of all tensors since the last call."""
        views = self._views
        self._views = {}
        return views

    def allocate_layer(self, layout: LayerLayout, prefix: str) -> LayerTensors:
        """Allocate one layer's tensors; `prefix` begins its names in the checkpoint.

        prefix: such as `model.layers.0.`.
        """
        attention, mlp = layout.block_parameters()
        return self.allocate_block(attention, prefix), self.allocate_block(mlp, prefix)

    def allocate_block(
        self, parameters: Mapping[str, ParameterSpec], prefix: str = ""
    ) -> BlockTensors:
        """Allocate one block's tensors; `prefix` begins its names in the checkpoint.

        A matrix that the checkpoint holds in few bits becomes a weight in codes: it stands in
        `grouped` of the result too. One whose parts have different types becomes a stack of such
        weights. Every other parameter becomes a tensor of the model's dtype, or of float32.
        """
        form = self.execution.form
        tensors = BlockTensors({})
        for name, parameter in parameters.items():
            is_packable = bool(prefix) or form.packs_tables
            spec = form.find_packed_spec(parameter, prefix) if is_packable else None
            pieces = form.split_by_spec(parameter, prefix) if is_packable and spec is None else []
            if spec is not None:
                codes = self._allocate_codes(parameter, spec, prefix)
                tensors.grouped[name] = codes
                tensors[name] = codes.codes
                if spec.tile is not None:
                    tensors.tiles[name] = spec.tile
            elif pieces:
                stack = StackedWeight(
                    tuple(
                        self._allocate_codes(piece, piece_spec, prefix)
                        for piece, piece_spec in pieces
                    )
                )
                tensors.grouped[name] = stack
                tensors[name] = stack.pieces[0].codes
            else:
                dtype = torch.float32 if parameter.is_float32 else self.execution.dtype
                tensor = torch.empty(parameter.shape, dtype=dtype, device=self.execution.device)
                tensors[name] = self._register_views(tensor, parameter, prefix)
                is_table = not prefix
                if rounded := form.find_rounded_specs(parameter, is_table=is_table):
                    tensors.pieces[name] = _join_pieces(rounded)
                    if not form.rounds_to_codes(parameter, is_table=is_table):
                        tensors.widened.add(name)
        return tensors

    def _allocate_codes(
        self, parameter: ParameterSpec, spec: PackedSpec, prefix: str
    ) -> GroupedWeight:
        """Allocate the codes of a matrix in few bits, and its scales, minima and zero points."""
        rows, columns = parameter.shape
        groups = -(-columns // (spec.group or columns))

        def allocate(width: int, dtype: torch.dtype, part: str = "") -> Tensor:
            tensor = torch.empty(rows, width, dtype=dtype, device=self.execution.device)
            return self._register_views(tensor, parameter, prefix, part)

        dtypes = dict.fromkeys(("scales", "minima"), SCALE_DTYPES[spec.scales])
        codes = allocate(columns // 2 if spec.is_paired else columns, torch.uint8)
        parameters: dict[str, Tensor] = {}
        for part, span in spec.columns_per_parameter.items():
            width = columns // span if span else groups
            default_dtype = torch.float16 if span else torch.uint8
            parameters[part] = allocate(width, dtypes.get(part, default_dtype), part)
        return GroupedWeight(
            spec.kind,
            codes,
            scales=parameters["scales"],
            zeros=parameters.get("zeros"),
            group=spec.group or columns,
            minima=parameters.get("minima"),
            factors=parameters.get("factors"),
            minimum_factors=parameters.get("minimum_factors"),
            rounds_rows=self.execution.form.rounds_rows and spec.kind != FLOAT_CODES,
        )

    def _register_views(
        self, tensor: Tensor, parameter: ParameterSpec, prefix: str, part: str = ""
    ) -> Tensor:
        """Record the rows of each source, or of its quantization parameter `part`.

        Return the tensor.
        """
        row = 0
        for source in parameter.sources:
            name = prefix + source.name
            key = part_name(name, part) if part else name
            self._views[key] = tensor[row : row + source.shape[0]]
            row += source.shape[0]
        return tensor


def _join_pieces(rounded: Sequence[tuple[SourceTensor, PackedSpec]]) -> list[Piece]:
    """Return the pieces of a matrix: neighbouring sources that are rounded alike."""
    pieces: list[Piece] = []
    for source, spec in rounded:
        rows = source.shape[0]
        if pieces and pieces[-1].kind == spec.kind:
            rows += pieces.pop().rows
        pieces.append(Piece(rows, spec.kind))
    return pieces
