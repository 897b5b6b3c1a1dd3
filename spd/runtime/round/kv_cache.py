"""The page pools of one model's attention layers, and the slot states of its recurrent layers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spd.kernels.native.packed import LARGE_PAGE, advise_large_pages
from spd.kernels.recurrent.state_blocks import BLOCK, last_border
from spd.runtime.layers.base import LayerCache
from spd.runtime.models.layouts import AttentionLayout, MixerLayout, RecurrentLayout
from spd.runtime.round.limits import NUM_RESERVED_PAGES


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros, which on a CPU take memory only once they are written (an anonymous map).

    They lie in large pages where they fill some. No size may be 0.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    spare = LARGE_PAGE if size > LARGE_PAGE else 0  # so that large pages can begin where it does
    memory = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -tensor.data_ptr() % LARGE_PAGE if spare else 0
    return advise_large_pages(tensor[begin : begin + size]).view(dtype).view(shape)


def zero_rows(tensor: Tensor, rows: Sequence[int]) -> None:
    """Zero rows in place. Allocates nothing, since it is called after memory has run out."""
    for row in rows:
        tensor[row].zero_()


class KvCache:
    """The page pools [pages, page, ...] of each layer, zeroed, since masked positions must be
    finite.

    Recurrent layers have states of each of `slots` slots instead, with rings of `depth` rows.
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
        *,
        rounded: bool = False,
    ) -> None:
        """layers: the mixers of the model's layers, in order. page_size: positions of a page.

        rounded: True if the pools' entries are in eight bits; states and their rings never are.
        """
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.rounded = rounded
        self.paged = [not isinstance(layer, RecurrentLayout) for layer in layers]
        """True for each layer with page pools."""
        self.layers: list[LayerCache] = []
        """The pools of each layer, or its slot states."""
        self.has_recurrent_layers = not all(self.paged)
        """True if a layer has slot states."""
        self.layouts = layers
        for layer in layers:
            pools: list[Tensor] = []
            if isinstance(layer, RecurrentLayout):
                for shape, is_exact in layer.slot_shapes(depth):
                    pool_dtype = torch.float32 if is_exact else dtype
                    pools.append(lazy_zeros((slots, *shape), pool_dtype, device))
            else:
                entry_dtype = torch.int8 if rounded else dtype
                for shape in layer.cache:
                    pools.append(lazy_zeros((num_pages, page_size, *shape), entry_dtype, device))
                if rounded and isinstance(layer, AttentionLayout):
                    for shape in layer.cache_scales:
                        pools.append(
                            lazy_zeros((num_pages, page_size, *shape), torch.float16, device)
                        )
            self.layers.append(LayerCache(tuple(pools)))
        self.applied = torch.zeros(
            slots if self.has_recurrent_layers else 0, dtype=torch.long, device=device
        )
        """The position as of which each slot's recurrent states are, a border, int64 [slots]."""

    def continuation_views(self, slot: int, end: int, page: int) -> Iterator[Tensor]:
        """Yield views of all memory that a slot needs to continue at position `end`, layer by
        layer.

        These are `page`, which has that position, the slot's recurrent states as of the last border
        with the block of their rings behind it, and the latest inputs of its convolutions.
        """
        for layer, layout in zip(self.layers, self.layouts, strict=True):
            if isinstance(layout, RecurrentLayout):
                inputs, *memory = layer.pools
                depth = inputs.shape[1]
                place = last_border(end) % depth
                for state in memory[:1]:
                    yield state[slot]
                for ring in memory[1:]:
                    yield ring[slot, place : place + BLOCK]
                for position in range(end - layout.kernel + 1, end):  # no row below 0 is read
                    yield inputs[slot, position % depth]
            else:
                yield from (pool[page] for pool in layer.pools)

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages, which may hold values that are not finite, in the pools of all paged
        layers.
        """
        assert all(page >= NUM_RESERVED_PAGES for page in pages)
        for layer, paged in zip(self.layers, self.paged, strict=True):
            for pool in layer.pools if paged else ():
                zero_rows(pool, pages)
