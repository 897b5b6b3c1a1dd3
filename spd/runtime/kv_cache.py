"""The physical page pools of one model."""

from __future__ import annotations

import torch

from spd.runtime.models.base import CausalModel, LayerCache
from spd.runtime.page_table import NUM_RESERVED


def bytes_per_page(model: CausalModel, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return 2 * model.num_layers * page_size * model.num_kv_heads * model.head_dim * dtype.itemsize


class KvCache:
    """Key and value pools [pages, page, K, D] a layer, zeroed: masked positions must be finite."""

    def __init__(
        self, model: CausalModel, num_pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
        self.layers = [
            LayerCache(
                torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
            )
            for _ in range(model.num_layers)
        ]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        assert all(page >= NUM_RESERVED for page in pages)
        for layer in self.layers:
            layer.key[pages] = 0
            layer.value[pages] = 0
