"""The physical page pools of one model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from spd.runtime.layers.base import LayerCache
from spd.runtime.models.destinations import Shape
from spd.runtime.round.limits import NUM_RESERVED


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros that, on CPU, take memory only once they are written: fresh pages of an anonymous map."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def zero_rows(tensor: Tensor, rows: Sequence[int]) -> None:
    """In place and with nothing allocated, for it is done when memory has run out."""
    for row in rows:
        tensor[row].zero_()


class KvCache:
    """Pools [pages, page, ...] for each layer, zeroed: masked positions must be finite.

    `cache_shapes` says, for each layer, what one position holds in each of its pools.
    """

    def __init__(
        self,
        cache_shapes: Sequence[tuple[Shape, ...]],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.page_size, self.num_pages, self.dtype = page_size, num_pages, dtype
        self.layers = [
            LayerCache(tuple(lazy_zeros((num_pages, page_size, *shape), dtype, device) for shape in position))
            for position in cache_shapes
        ]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        assert all(page >= NUM_RESERVED for page in pages)
        for layer in self.layers:
            for pool in layer.pools:
                zero_rows(pool, pages)
