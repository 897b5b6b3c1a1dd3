"""Cache entries in eight bits: codes of a row, and the float16 scale that makes numbers of them.

A row is what one position keeps of one head's keys or values. It is rounded by itself when it is
written, so an entry's bits depend on nothing else. Codes are whole numbers from -127 to 127.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_CODE = 127


def round_row(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes int8 [..., D] and scales float16 [...] of rows [..., D].

    The scale is not finite where the row is not, or is too large for float16.
    """
    wide = rows.float()
    scales = (wide.abs().amax(-1) / LARGEST_CODE).half()
    usable = scales.isfinite() & (scales > 0)
    divisors = scales.float().masked_fill(~usable, math.inf).unsqueeze(-1)
    codes = (wide.nan_to_num() / divisors).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scales


def round_entries(scored: Tensor, weighed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes of both, then scales of both: what scores are made of, and what is weighed.

    Where a scale of the two is not finite, that of `scored` is NaN and that of `weighed` is 0; see
    `replace_non_finite`.
    """
    scored_codes, scored_scales = round_row(scored)
    weighed_codes, weighed_scales = round_row(weighed)
    is_faulty = ~(scored_scales.isfinite() & weighed_scales.isfinite())
    return (
        scored_codes.masked_fill(is_faulty.unsqueeze(-1), 0),
        weighed_codes.masked_fill(is_faulty.unsqueeze(-1), 0),
        scored_scales.masked_fill(is_faulty, math.nan),
        weighed_scales.masked_fill(is_faulty, 0.0),
    )


def widen_rows(codes: Tensor, scales: Tensor, rank: int | None = None) -> Tensor:
    """Return the numbers float32 [..., D] of codes int8 [..., D] and scales float16 [..., 1].

    They are exact: a product of a code and a scale has 18 bits. With a rank scales are [..., 2]: of
    the first `rank` codes of a row, and of the others.
    """
    if rank is not None:
        sizes = torch.tensor([rank, codes.shape[-1] - rank], device=codes.device)
        scales = scales.repeat_interleave(sizes, dim=-1, output_size=codes.shape[-1])
    return codes.float() * scales.float()
