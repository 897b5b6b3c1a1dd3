"""Matrices that a checkpoint stores in few bits: unpacked byte by byte, then kept packed or multiplied out.

`spd.formats.quantized` describes the layouts. A matrix that is kept packed has views NAME (codes),
NAME#scales and NAME#zeros; any other view of a quantized matrix is filled with its values, rounded once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.formats.checkpoint import Checkpoint, Shape, Shapes
from spd.formats.quantized import AWQ_ORDER, Quantization, Scheme
from spd.kernels.capabilities import CodeKind
from spd.kernels.linear.few_bits import (
    DEFAULT_ZERO_POINTS,
    dequantize,
    pack_nibbles,
    unpack_nibbles,
)
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.builder import Fill
from spd.runtime.models.destinations import Cut, Cuts
from spd.runtime.models.weights import part_name

Stored = Mapping[str, Tensor]
E8M0_NAN = 255  # of a scale that is an exponent of two
logger = logging.getLogger(__name__)
STRIP = (
    2**22
)  # codes of odd widths unpacked at a time: each takes eight bytes several times meanwhile


@dataclass(frozen=True)
class Unpacked:
    """A stored matrix [N, K]."""

    kind: CodeKind
    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # float32 [N, K / group]
    zeros: Tensor | None  # uint8 [N, K / group]
    group: int  # 1 where columns of a group are not neighbours

    def plain(self) -> Tensor:
        """Float32 [N, K]."""
        return dequantize(self.kind, self.codes, self.scales, self.zeros, self.group)

    def cut(self, cut: Cut) -> Unpacked:
        """A rank's part; columns are cut between groups."""
        per_group = cut
        if cut.dim and self.scales.shape[1] > 1:
            ranges = tuple((first // self.group, end // self.group) for first, end in cut.ranges)
            per_group = Cut(1, ranges)
        whole = cut.dim == 1 and self.scales.shape[1] == 1

        def part(tensor: Tensor) -> Tensor:
            return tensor if whole else torch.cat(per_group.of(tensor), per_group.dim)

        zeros = None if self.zeros is None else part(self.zeros)
        codes = torch.cat(cut.of(self.codes), cut.dim)
        group = codes.shape[1] if whole else self.group
        return Unpacked(self.kind, codes, part(self.scales), zeros, group)


def unpacking_fill(
    checkpoint: Checkpoint,
    fill: Fill,
    how: Quantization,
    shapes: Shapes,
    meter: LoadMeter,
    cuts: Cuts,
) -> Fill:
    """`fill`, but what is stored in few bits is unpacked, a matrix at a time. shapes: of whole matrices."""

    def unpacked(views: Mapping[str, Tensor]) -> None:
        rest = dict(views)
        for name, view in views.items():
            found = (
                None
                if name not in shapes
                else how.module_scheme(name, shapes[name], checkpoint.tensors)
            )
            if found is None:
                continue
            whole = unpack(checkpoint, *found, shapes[name])
            cut = cuts.get(name)
            own = {part: rest.pop(part_name(name, part), None) for part in ("scales", "zeros")}
            del rest[name]
            if view.dtype == torch.uint8:
                keep_packed(checkpoint, name, whole if cut is None else whole.cut(cut), view, own)
            else:
                plain = whole.plain()
                view.copy_(plain if cut is None else torch.cat(cut.of(plain), cut.dim))
            meter.advance(
                view.nbytes + sum(each.nbytes for each in own.values() if each is not None)
            )
        fill(rest)

    return unpacked


def keep_packed(
    checkpoint: Checkpoint,
    name: str,
    stored: Unpacked,
    view: Tensor,
    own: Mapping[str, Tensor | None],
) -> None:
    """Write a matrix as codes into a view uint8, with its scales and zeros in views of their own."""
    if stored.group == 1 < stored.codes.shape[1]:
        why = "columns of a group are not neighbours, though quantization_config says so"
        raise checkpoint.tensor_error(name, why)
    view.copy_(pack_nibbles(stored.codes) if stored.kind in ("int4", "e2m1") else stored.codes)
    scales = own["scales"]
    zeros = own["zeros"]
    assert scales is not None
    scales.copy_(stored.scales)
    if zeros is not None:
        zeros.copy_(
            torch.tensor(DEFAULT_ZERO_POINTS[stored.kind]) if stored.zeros is None else stored.zeros
        )


def unpack(checkpoint: Checkpoint, module: str, scheme: Scheme, shape: Shape) -> Unpacked:
    """A stored matrix [N, K]."""
    stored = {last: checkpoint.read(f"{module}.{last}") for last in scheme.tensors(shape)}
    for last, tensor in stored.items():
        if not _is_finite(tensor, scheme, last):
            words = "%s: tensor %s holds values that are not finite"
            logger.warning(words, checkpoint.tensors[f"{module}.{last}"].shard, f"{module}.{last}")
    rows, columns = shape
    group = scheme.group_size or columns
    codes = stored[scheme.codes_name]
    zeros = None
    order = None
    if scheme.layout == "pack":
        codes = unpacked_words(codes, scheme.bits, columns)
        scales = stored["weight_scale"].float()
        if not scheme.symmetric:
            zeros = unpacked_words(stored["weight_zero_point"].t(), scheme.bits, rows).t()
        if (name := f"{module}.weight_g_idx") in checkpoint.tensors:
            order = checkpoint.read(name).long()
    elif scheme.layout in ("gptq", "awq"):
        codes, scales, zeros = _by_columns(stored, scheme, shape)
        order = stored["g_idx"].long() if "g_idx" in stored else None
    else:
        codes, scales = _floats_or_bytes(stored, scheme, rows)
    if order is not None:
        groups = scales.shape[1]
        last = "g_idx" if "g_idx" in stored else "weight_g_idx"
        if bool(((order < 0) | (order >= groups)).any()):
            raise checkpoint.tensor_error(
                f"{module}.{last}", f"names a group beyond the {groups} of them"
            )
        if not torch.equal(order, torch.arange(columns) // group):
            group = 1
            scales = scales[:, order]
            zeros = None if zeros is None else zeros[:, order]
    if zeros is not None and scheme.layout == "gptq" and scheme.symmetric:
        if bool((zeros != 1 << (scheme.bits - 1)).any()):
            why = "zero points differ, but quantization_config calls the weights symmetric"
            raise checkpoint.tensor_error(f"{module}.qzeros", why)
        zeros = None
    if zeros is None and scheme.layout in ("pack", "gptq"):  # offset binary of fewer bits
        codes = codes + (DEFAULT_ZERO_POINTS[scheme.code_kind] - (1 << (scheme.bits - 1)))
    return Unpacked(scheme.code_kind, codes, scales, zeros, group)


def _by_columns(stored: Stored, scheme: Scheme, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of GPTQ and AutoAWQ, whose tensors stand [in, out]."""
    rows, columns = shape
    zeros = unpacked_words(stored["qzeros"], scheme.bits, rows)
    if scheme.layout == "gptq":
        codes = unpacked_words(stored["qweight"].t(), scheme.bits, columns)
        zeros = (zeros + scheme.offset) & ((1 << scheme.bits) - 1)
    else:
        order = torch.arange(rows) // 8 * 8 + torch.tensor(AWQ_ORDER).repeat(rows // 8 + 1)[:rows]
        codes = unpacked_words(stored["qweight"], 4, rows)[:, order].t()
        zeros = zeros[:, order]
    return codes.contiguous(), stored["scales"].t().float(), zeros.t()


def _floats_or_bytes(stored: Stored, scheme: Scheme, rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of layouts that pack no words."""
    codes = stored[scheme.codes_name].view(torch.uint8)
    scales = stored["weight_scale"]
    if scheme.layout == "int8":
        codes = codes ^ 128  # two's complement to offset binary
    if scheme.code_kind != "e2m1":
        scales = scales.float().reshape(-1, 1) if scheme.block_rows is None else scales.float()
        if scheme.block_rows is not None:
            scales = scales.repeat_interleave(scheme.block_rows, 0)[:rows]
        scales = scales.expand(rows, -1)
        if scheme.code_kind == "e4m3" and not _is_finite(
            codes.view(torch.float8_e4m3fn), scheme, ""
        ):
            scales = _spoiled(scales, codes, scheme.group_size or codes.shape[1])
        return codes, scales
    codes = unpack_nibbles(codes)
    if scheme.layout == "mxfp4":
        exact = torch.exp2(scales.float() - 127)
        return codes, exact.masked_fill(scales == E8M0_NAN, torch.nan)
    if scheme.layout == "nvfp4":
        divisor = stored["weight_global_scale"].float().reshape(1, 1)
        return codes, scales.float() / divisor.masked_fill(~divisor.isfinite(), torch.nan)
    return codes, scales.float() * stored["weight_scale_2"].float().reshape(1, 1)


def _is_finite(tensor: Tensor, scheme: Scheme, last: str) -> bool:
    """True if a stored tensor of floats has no NaN and no infinity, or is none of floats."""
    if tensor.dtype == torch.float8_e4m3fn:  # all bits set but the sign: NaN; it has no infinity
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    if scheme.layout == "mxfp4" and last == "weight_scale":
        return not bool((tensor == E8M0_NAN).any())
    return not tensor.is_floating_point() or bool(tensor.float().isfinite().all())


def _spoiled(scales: Tensor, codes: Tensor, group: int) -> Tensor:
    """Return scales [N, G] with NaN for groups that have a NaN among FP8 codes uint8 [N, K].

    Kernels take each code for a number: a scale of NaN lets the sum tell.
    """
    bad = (codes & 0x7F) == 0x7F
    rows, groups = scales.shape
    padded = F.pad(bad, (0, groups * group - codes.shape[1]))
    return scales.masked_fill(padded.view(rows, groups, group).any(-1), torch.nan)


def unpacked_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of words int32 [R, W], dense, low first: uint8 [R, count]."""
    words = torch.empty(words.shape, dtype=torch.int32).copy_(words)  # rows behind each other
    if bits in (4, 8):
        codes = words.view(
            torch.uint8
        )  # words are little-endian, as the file and the processor are
        return (unpack_nibbles(codes) if bits == 4 else codes)[:, :count].contiguous()
    first = torch.arange(count) * bits
    word = first // 32
    shift = first % 32
    following = (word + 1).clamp(max=max(0, words.shape[1] - 1))
    codes = torch.empty(words.shape[0], count, dtype=torch.uint8)
    step = max(1, STRIP // max(1, count))
    for row in range(0, words.shape[0], step):
        wide = words[row : row + step].long() & 0xFFFFFFFF
        both = wide[:, word] >> shift | wide[:, following] << (32 - shift)
        codes[row : row + step] = (both & ((1 << bits) - 1)).to(torch.uint8)
    return codes
