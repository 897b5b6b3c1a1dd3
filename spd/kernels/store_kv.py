"""Scatter new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write key and value [T, K, D] to positions slots [T] of the pools, in place.

    The pools are [P, page, K, D]; a slot is page * page_size + offset. Rows that must not be kept
    point into the trash page. Of rows that share a slot, one wins, whichever.
    """
    for pool, rows in ((key_pages, key), (value_pages, value)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, rows)
