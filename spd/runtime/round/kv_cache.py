"""The page pools of one model, and what its recurrent layers keep of each slot."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spd.runtime.layers.base import LayerCache
from spd.runtime.models.layouts import MixerLayout, RecurrentLayout
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

    Recurrent layers have what they keep of each of `slots` slots instead, rings `depth` rows deep.
    """

    def __init__(
        self,
        layers: Sequence[MixerLayout],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        slots: int = 0,
        depth: int = 0,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.paged = [not isinstance(layer, RecurrentLayout) for layer in layers]
        self.layers = []
        # recurrent: a layer keeps states
        self.recurrent = not all(self.paged)
        self.layouts = layers
        for layer in layers:
            if isinstance(layer, RecurrentLayout):
                kept = layer.slot_shapes(depth)
                sizes = [
                    ((slots, *shape), torch.float32 if exact else dtype) for shape, exact in kept
                ]
            else:
                sizes = [((num_pages, page_size, *shape), dtype) for shape in layer.cache]
            self.layers.append(LayerCache(tuple(lazy_zeros(*size, device) for size in sizes)))
        self.applied = torch.zeros(slots if self.recurrent else 0, dtype=torch.long, device=device)
        """Of recurrent layers the position that each slot's written state is of."""

    def parts(self, slot: int, end: int, page: int) -> Iterator[Tensor]:
        """Views of what a slot goes on with behind position `end`: one page, and what is kept of the slot."""
        for layer, layout in zip(self.layers, self.layouts, strict=True):
            if isinstance(layout, RecurrentLayout):
                ring, *states = layer.pools[:2]
                yield from (state[slot] for state in states)
                for position in range(end - layout.kernel + 1, end):  # below 0 none is read
                    yield ring[slot, position % ring.shape[1]]
            else:
                yield from (pool[page] for pool in layer.pools)

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        assert all(page >= NUM_RESERVED for page in pages)
        for layer, paged in zip(self.layers, self.paged, strict=True):
            for pool in layer.pools if paged else ():
                zero_rows(pool, pages)
