"""Unpacks matrices that a checkpoint stores in few bits, and stores them packed or dequantized.

`spd.formats.quantized` describes the layouts. A matrix that stays packed has views NAME (codes),
NAME#scales and NAME#zeros; any other view of a quantized matrix is filled with its values, rounded
once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.formats.checkpoint import Checkpoint, Shape, Shapes
from spd.formats.quantized import Quantization
from spd.formats.weight_schemes import AWQ_ORDER, Scheme
from spd.kernels.capabilities import CodeKind
from spd.kernels.linear.few_bits import (
    DEFAULT_ZERO_POINTS,
    FOUR_BIT_KINDS,
    dequantize,
    pack_nibbles,
    unpack_nibbles,
)
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.allocator import TensorFiller
from spd.runtime.models.parameters import Cut, Cuts
from spd.runtime.models.weight_forms import part_name

Stored = Mapping[str, Tensor]
E8M0_NAN = 255
"""The NaN of a scale that is an exponent of two."""
STRIP_CODES = 2**22
"""Codes of odd widths that are unpacked at a time: each takes several times eight bytes meanwhile.
"""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnpackedMatrix:
    """A stored matrix [N, K] as codes, scales and zero points."""

    kind: CodeKind
    codes: Tensor
    """Uint8 [N, K]."""
    scales: Tensor
    """Float32 [N, K / group]."""
    zeros: Tensor | None
    """Uint8 [N, K / group]."""
    group: int
    """The columns that share a scale; 1 where they are not neighbours."""

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        return dequantize(self.kind, self.codes, self.scales, self.zeros, self.group)

    def cut_to_rank(self, cut: Cut) -> UnpackedMatrix:
        """Return the part of the matrix that `cut` gives a rank; columns are cut between groups."""
        per_group = cut
        if cut.dim and self.scales.shape[1] > 1:
            ranges = tuple((first // self.group, end // self.group) for first, end in cut.ranges)
            per_group = Cut(1, ranges)
        codes = torch.cat(cut.slices(self.codes), cut.dim)
        if cut.dim == 1 and self.scales.shape[1] == 1:
            return UnpackedMatrix(
                kind=self.kind,
                codes=codes,
                scales=self.scales,
                zeros=self.zeros,
                group=codes.shape[1],
            )
        scales = torch.cat(per_group.slices(self.scales), per_group.dim)
        zeros = None
        if self.zeros is not None:
            zeros = torch.cat(per_group.slices(self.zeros), per_group.dim)
        return UnpackedMatrix(
            kind=self.kind, codes=codes, scales=scales, zeros=zeros, group=self.group
        )


def make_unpacking_filler(
    checkpoint: Checkpoint,
    fill: TensorFiller,
    quantization: Quantization,
    shapes: Shapes,
    meter: LoadMeter,
    cuts: Cuts,
) -> TensorFiller:
    """Return a function that fills views with quantized matrices, unpacked one at a time, and with
    other tensors by `fill`.

    shapes: the shapes of complete matrices.
    """

    def fill_unpacked(views: Mapping[str, Tensor]) -> None:
        """Unpack the quantized matrices among the views, and fill the others."""
        other_views = dict(views)
        for name, view in views.items():
            if name not in shapes:
                continue
            module_scheme = quantization.module_scheme(name, shapes[name], checkpoint.tensors)
            if module_scheme is None:
                continue
            module, scheme = module_scheme
            matrix = unpack_matrix(checkpoint, module, scheme, shapes[name])
            cut = cuts.get(name)
            parameters = {
                part: other_views.pop(part_name(name, part), None) for part in ("scales", "zeros")
            }
            del other_views[name]
            if view.dtype == torch.uint8:
                rank_matrix = matrix if cut is None else matrix.cut_to_rank(cut)
                write_packed(
                    checkpoint=checkpoint,
                    name=name,
                    matrix=rank_matrix,
                    view=view,
                    parameters=parameters,
                )
            else:
                values = matrix.dequantize()
                view.copy_(values if cut is None else torch.cat(cut.slices(values), cut.dim))
            written = [view, *(part for part in parameters.values() if part is not None)]
            meter.advance(sum(tensor.nbytes for tensor in written))
        fill(other_views)

    return fill_unpacked


def write_packed(
    checkpoint: Checkpoint,
    name: str,
    matrix: UnpackedMatrix,
    view: Tensor,
    parameters: Mapping[str, Tensor | None],
) -> None:
    """Write a matrix as codes into a uint8 view, and its scales and zeros into the views of
    `parameters`.

    Raises CheckpointError where columns of a group are not neighbours.
    """
    if matrix.group == 1 < matrix.codes.shape[1]:
        message = "columns of a group are not neighbours, though quantization_config says so"
        raise checkpoint.tensor_error(name, message)
    view.copy_(pack_nibbles(matrix.codes) if matrix.kind in FOUR_BIT_KINDS else matrix.codes)
    scales = parameters["scales"]
    zeros = parameters["zeros"]
    assert scales is not None
    scales.copy_(matrix.scales)
    if zeros is not None:
        default = torch.tensor(DEFAULT_ZERO_POINTS[matrix.kind])
        zeros.copy_(default if matrix.zeros is None else matrix.zeros)


def unpack_matrix(
    checkpoint: Checkpoint, module: str, scheme: Scheme, shape: Shape
) -> UnpackedMatrix:
    """Read and unpack the quantized matrix [N, K] of a module.

    Logs a warning of values that are not finite. Raises CheckpointError where the module's tensors
    contradict the scheme.
    """
    stored = {suffix: checkpoint.read(f"{module}.{suffix}") for suffix in scheme.tensors(shape)}
    for suffix, tensor in stored.items():
        if not _is_finite(tensor, scheme, suffix):
            logger.warning(
                "%s: tensor %s holds values that are not finite",
                checkpoint.tensors[f"{module}.{suffix}"].shard,
                f"{module}.{suffix}",
            )
    rows, columns = shape
    group = scheme.group_size or columns
    codes = stored[scheme.codes_name]
    zeros = None
    order = None
    if scheme.layout == "pack":
        codes = unpack_words(codes, scheme.bits, columns)
        scales = stored["weight_scale"].float()
        if not scheme.symmetric:
            zeros = unpack_words(stored["weight_zero_point"].t(), scheme.bits, rows).t()
        if (name := f"{module}.weight_g_idx") in checkpoint.tensors:
            order = checkpoint.read(name).long()
    elif scheme.layout == "spd":
        codes, scales = join_code_bits(codes, stored.get("weight_upper")), stored["weight_scale"]
    elif scheme.layout in ("gptq", "awq"):
        codes, scales, zeros = _unpack_transposed(stored, scheme, shape)
        order = stored["g_idx"].long() if "g_idx" in stored else None
    else:
        codes, scales = _unpack_bytes(stored, scheme, rows)
    if order is not None:
        groups = scales.shape[1]
        suffix = "g_idx" if "g_idx" in stored else "weight_g_idx"
        if bool(((order < 0) | (order >= groups)).any()):
            message = f"names a group beyond the {groups} of them"
            raise checkpoint.tensor_error(f"{module}.{suffix}", message)
        if not torch.equal(order, torch.arange(columns) // group):
            group = 1
            scales = scales[:, order]
            zeros = None if zeros is None else zeros[:, order]
    if zeros is not None and scheme.layout == "gptq" and scheme.symmetric:
        if bool((zeros != 1 << (scheme.bits - 1)).any()):
            message = "zero points differ, but quantization_config calls the weights symmetric"
            raise checkpoint.tensor_error(f"{module}.qzeros", message)
        zeros = None
    if zeros is None and scheme.layout in ("pack", "gptq"):
        # Codes are offset binary of fewer bits.
        codes = codes + (DEFAULT_ZERO_POINTS[scheme.code_kind] - (1 << (scheme.bits - 1)))
    return UnpackedMatrix(
        kind=scheme.code_kind, codes=codes, scales=scales, zeros=zeros, group=group
    )


def _unpack_transposed(
    stored: Stored, scheme: Scheme, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zeros of GPTQ and AutoAWQ, whose tensors are [in, out]."""
    rows, columns = shape
    zeros = unpack_words(stored["qzeros"], scheme.bits, rows)
    if scheme.layout == "gptq":
        codes = unpack_words(stored["qweight"].t(), scheme.bits, columns)
        zeros = (zeros + scheme.offset) & ((1 << scheme.bits) - 1)
    else:
        order = torch.arange(rows) // 8 * 8 + torch.tensor(AWQ_ORDER).repeat(rows // 8 + 1)[:rows]
        codes = unpack_words(stored["qweight"], 4, rows)[:, order].t()
        zeros = zeros[:, order]
    return codes.contiguous(), stored["scales"].t().float(), zeros.t()


def _unpack_bytes(stored: Stored, scheme: Scheme, rows: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of layouts that pack no words."""
    codes = stored[scheme.codes_name].view(torch.uint8)
    scales = stored["weight_scale"]
    if scheme.layout == "int8":
        # From two's complement to offset binary.
        codes = codes ^ 128
    if scheme.code_kind != "e2m1":
        scales = scales.float().reshape(-1, 1) if scheme.block_rows is None else scales.float()
        if scheme.block_rows is not None:
            scales = scales.repeat_interleave(scheme.block_rows, 0)[:rows]
        scales = scales.expand(rows, -1)
        if scheme.code_kind == "e4m3" and not _is_finite(
            codes.view(torch.float8_e4m3fn), scheme, ""
        ):
            scales = _mark_nan_groups(scales, codes, scheme.group_size or codes.shape[1])
        return codes, scales
    codes = unpack_nibbles(codes)
    if scheme.layout == "mxfp4":
        exact = torch.exp2(scales.float() - 127)
        return codes, exact.masked_fill(scales == E8M0_NAN, torch.nan)
    if scheme.layout == "nvfp4":
        divisor = stored["weight_global_scale"].float().reshape(1, 1)
        return codes, scales.float() / divisor.masked_fill(~divisor.isfinite(), torch.nan)
    return codes, scales.float() * stored["weight_scale_2"].float().reshape(1, 1)


def _is_finite(tensor: Tensor, scheme: Scheme, suffix: str) -> bool:
    """True if a stored tensor of floats has no NaN and no infinity, or has another dtype."""
    if tensor.dtype == torch.float8_e4m3fn:
        # All bits but the sign set: NaN; there is no infinity.
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    if scheme.layout == "mxfp4" and suffix == "weight_scale":
        return not bool((tensor == E8M0_NAN).any())
    return not tensor.is_floating_point() or bool(tensor.float().isfinite().all())


def _mark_nan_groups(scales: Tensor, codes: Tensor, group: int) -> Tensor:
    """Return scales [N, G] with NaN for groups that have a NaN among FP8 codes uint8 [N, K].

    Kernels read each code as a number, so a scale of NaN carries the NaN into the sum.
    """
    is_nan = (codes & 0x7F) == 0x7F
    rows, groups = scales.shape
    padded = F.pad(is_nan, (0, groups * group - codes.shape[1]))
    return scales.masked_fill(padded.view(rows, groups, group).any(-1), torch.nan)


def split_code_bits(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Return the lower four bits of codes uint8 [N, K], two in a byte, and those above, as the
    layout "spd" stores them.
    """
    if bits == 4:
        return pack_nibbles(codes), None
    each = bits - 4
    uppers = (codes >> 4).view(codes.shape[0], -1, 8 // each)
    shifts = torch.arange(0, 8, each, dtype=torch.uint8)
    return pack_nibbles(codes & 15), (uppers << shifts).sum(dim=-1, dtype=torch.uint8)


def join_code_bits(packed: Tensor, upper: Tensor | None) -> Tensor:
    """Return the codes uint8 [N, K] of bytes that `split_code_bits` made."""
    codes = unpack_nibbles(packed)
    if upper is None:
        return codes
    each = 8 * upper.shape[1] // codes.shape[1]
    shifts = torch.arange(0, 8, each, dtype=torch.uint8)
    bits = upper[:, :, None] >> shifts & (1 << each) - 1
    return codes | bits.flatten(1) << 4


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row of words int32 [R, W], dense, low first: uint8 [R,
    count].
    """
    # A contiguous copy.
    words = torch.empty(words.shape, dtype=torch.int32).copy_(words)
    if bits in (4, 8):
        # Words are little-endian, as the file and the processor are.
        codes = words.view(torch.uint8)
        return (unpack_nibbles(codes) if bits == 4 else codes)[:, :count].contiguous()
    first = torch.arange(count) * bits
    word = first // 32
    shift = first % 32
    following = (word + 1).clamp(max=max(0, words.shape[1] - 1))
    codes = torch.empty(words.shape[0], count, dtype=torch.uint8)
    step = max(1, STRIP_CODES // max(1, count))
    for row in range(0, words.shape[0], step):
        wide = words[row : row + step].long() & 0xFFFFFFFF
        aligned = wide[:, word] >> shift | wide[:, following] << (32 - shift)
        codes[row : row + step] = (aligned & ((1 << bits) - 1)).to(torch.uint8)
    return codes
