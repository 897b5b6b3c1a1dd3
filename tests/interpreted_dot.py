"""Makes the interpreter's products as position-blind as a GPU's, where a BLAS library is not."""

from __future__ import annotations

from typing import Any

import numpy as np


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`tl.dot` of tiles a [M, K], b [K, N] onto d [M, N], each element summed in the same order."""
    from triton.runtime.interpreter import TensorHandle

    kind = d.data.dtype
    product = np.einsum("...ik,...kj->...ij", a.data.astype(kind), b.data.astype(kind))
    return TensorHandle(product + d.data, d.dtype.scalar)


def install() -> None:
    """Replace the interpreter's product: matrix libraries sum a row by where it stands in its tile.

    Seen with OpenBLAS on some processors; a tensor core does not. Nothing to do without triton.
    """
    try:
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:
        return
    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        narrow = any(t.dtype.is_floating() and t.dtype.primitive_bitwidth == 8 for t in (a, b))
        return original(self, a, b, *rest) if narrow else dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot
