"""A test at load of which row counts give the same bits on this machine.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail.
Rows are therefore only computed in buckets whose results equal those of the widest bucket, bit for
bit and at every row position, on the model's own first layers and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spd.runtime.layers.torch_linear import Linear

WIDEST_BUCKET = 32
"""The widest bucket, in rows."""
CANDIDATE_BUCKETS = (2, 4, 5, 6, 8, 12, 16)
"""Narrower buckets to test.

1 is not one of them: a single row is a matrix-vector product, which libraries sum in another order.
5 and 6 are, since products of up to 6 rows pass over packed bfloat16 weights once, those of 7 and 8
twice (oneDNN 3.12).
"""
MIN_PROBED_LAYERS = 4
"""Layers of the model that a probe runs; a model may ask for more (`num_probe_layers`)."""

WindowOutputs = tuple[Tensor, Tensor]
"""Hidden states [T, H] and logits [T, V] of rows of one fixed text."""
WindowPass = Callable[[int, int, int], WindowOutputs]
"""Runs a window: its first row in the text, its number of rows, the KV blocks of its context."""


@torch.inference_mode()
def matching_buckets(run_window: WindowPass) -> tuple[int, ...]:
    """Run windows of each candidate count of rows; return the counts, ascending, whose results
    equal those of the widest bucket, which is always last.

    `run_window` runs rows of one fixed text. A row has the same position in every window.
    """
    widest_outputs = run_window(0, WIDEST_BUCKET, 1)

    def matches(width: int) -> bool:
        for first in range(0, WIDEST_BUCKET - width + 1, width):
            outputs = run_window(first, width, 1 + first // width % 2)
            for output, widest_output in zip(outputs, widest_outputs, strict=True):
                if not torch.equal(output, widest_output[first : first + width]):
                    return False
        return True

    return (*filter(matches, CANDIDATE_BUCKETS), WIDEST_BUCKET)


@torch.inference_mode()
def widths_with_matching_sum_order(product: Linear, widths: Sequence[int]) -> tuple[int, ...]:
    """Return those of `widths`, counts of rows, at which a product sums each row in the order of
    the widest bucket.

    Runs the product on example rows and compares the rounding errors: another order changes one
    rounded result in ten thousand, but one rounding error in ten. All widths where the product has
    no rounding errors to compare, or a damaged file's weights are not numbers.
    """
    x = product.make_example_rows(WIDEST_BUCKET)
    widest_output = product.multiply_in_tiles(x, WIDEST_BUCKET)
    widest_errors = product.rounding_error(x, widest_output)
    if widest_errors is None or bool(widest_errors.isnan().any()):
        return tuple(widths)

    def matches(width: int) -> bool:
        for rows in (slice(width), slice(WIDEST_BUCKET - width, WIDEST_BUCKET)):
            errors = product.rounding_error(x[rows], widest_output[rows])
            if errors is None or not torch.equal(errors, widest_errors[rows]):
                return False
        return True

    return tuple(filter(matches, widths))
