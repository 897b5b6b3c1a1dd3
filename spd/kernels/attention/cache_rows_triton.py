# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The parts of Triton's kernels that round cache entries to eight bits, and that read scales.

Scales of keys and values are float16 [pages, K, PAGE] in these kernels: those of a head and a page
stand together. Scales of latents are [pages, PAGE, 2], as in torch's form.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.attention.cache_rows import LARGEST_CODE
from spd.kernels.attention.rotary_store import Pools
from spd.kernels.overlap_triton import prefetch


class KvPools(NamedTuple):
    """Keys and values of all pages, and the scales of those that are codes.

    A kernel has pointers in their place.
    """

    key_pages: Tensor
    value_pages: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def of(cls, pools: Pools) -> KvPools:
        """Return a layer's pools."""
        if len(pools) == 2:
            return cls(pools[0], pools[1])
        return cls._make(pools)


_LARGEST_CODE = tl.constexpr(float(LARGEST_CODE))
_TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 and subtracted again, it rounds to whole numbers, ties to even."""


@triton.jit
def is_not_finite(x):
    """True where x is infinite or NaN.

    A test of x - x may fail, for it may be fused with the operation before.
    """
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def entry_scales(scored, weighed, is_faulty):
    """Return scales float16 of rows by their largest absolute values; see `round_entries`.

    Then return whether an entry is faulty: as it was, or because a scale is beyond float16. Scales
    are 0 where it is.
    """
    scored_scale = tl.div_rn(scored, _LARGEST_CODE).to(tl.float16)
    weighed_scale = tl.div_rn(weighed, _LARGEST_CODE).to(tl.float16)
    is_finite = tl.maximum(scored_scale, weighed_scale).to(tl.float32) < float("inf")
    is_usable = is_finite & (is_faulty == 0)
    scored_scale = tl.where(is_usable, scored_scale, 0.0).to(tl.float16)
    weighed_scale = tl.where(is_usable, weighed_scale, 0.0).to(tl.float16)
    return scored_scale, weighed_scale, is_usable == 0


@triton.jit
def codes_of(rows, scales):
    """Return codes int8 of float32 rows by scales float16 that are broadcast to them.

    Codes are 0 where a scale is.
    """
    is_scaled = scales > 0.0
    numbers = tl.div_rn(rows, tl.where(is_scaled, scales.to(tl.float32), 1.0))
    numbers = tl.minimum(tl.maximum(numbers, -_LARGEST_CODE), _LARGEST_CODE)
    return tl.where(is_scaled, numbers + _TO_WHOLE - _TO_WHOLE, 0.0).to(tl.int8)


@triton.jit
def prefetch_scales(scales, page, first, head, K: tl.constexpr, PAGE: tl.constexpr):
    """Prefetch one head's scales of a page, from its row `first` on, into L2."""
    row = tl.minimum(first + tl.arange(0, PAGE), PAGE - 1)
    prefetch(scales + (page * K + head) * PAGE + row)


@triton.jit
def load_block_scales(pools, page, row, head, K: tl.constexpr, PAGE: tl.constexpr):
    """Load one head's scales of keys and of values: of rows of a page, or of a page each.

    Those of entries that nothing wrote are read too: a score with one is masked, and that of a
    value is always finite.
    """
    at = (page * K + head) * PAGE + row
    k_scale = tl.load(pools.key_scales + at).to(tl.float32)
    return k_scale, tl.load(pools.value_scales + at).to(tl.float32)


@triton.constexpr_function
def weight_type(query_type, is_rounded):
    """Return the type in which weights meet values.

    A weight times the scale of its value may be too small for float16.
    """
    return tl.bfloat16 if is_rounded and query_type == tl.float16 else query_type
