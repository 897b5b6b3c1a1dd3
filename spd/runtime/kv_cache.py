"""The physical page pools of one model."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from spd.runtime.models.base import CausalModel, LayerCache
from spd.runtime.page_table import NUM_RESERVED


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros that, on CPU, take memory only once they are written: fresh pages of an anonymous map."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KvCache:
    """Key and value pools [pages, page, K, D] a layer, zeroed: masked positions must be finite."""

    def __init__(
        self, model: CausalModel, num_pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
        self.layers = [
            LayerCache(lazy_zeros(shape, dtype, device), lazy_zeros(shape, dtype, device))
            for _ in range(model.num_layers)
        ]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        assert all(page >= NUM_RESERVED for page in pages)
        for layer in self.layers:
            layer.key[pages] = 0
            layer.value[pages] = 0
