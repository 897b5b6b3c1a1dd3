"""Probe: does `scaled_dot_product_attention` give a query the same bits alone and among 2 to 16.

No mask is used, so every backend may answer: all queries see the whole cache. Counted in cases of
(cache length, number of queries), for each backend that takes the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTHS = (17, 64, 100, 500, 1000, 4000)
MAX_QUERIES = 16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def count_differences(
    backend: SDPBackend, dtype: torch.dtype, lengths: Sequence[int], device: str, heads: int = 16
) -> dict[str, Any]:
    """Count the cases in which any of n queries got other bits than the same query alone."""
    cases, differing = 0, []
    with sdpa_kernel([backend]):
        for length in lengths:
            generator = torch.Generator(device=device).manual_seed(length)
            shape = (1, heads, MAX_QUERIES, 64)
            query = torch.randn(shape, generator=generator, device=device).to(dtype)
            key, value = (
                torch.randn((1, heads, length, 64), generator=generator, device=device).to(dtype)
                for _ in range(2)
            )
            alone = torch.cat(
                [
                    F.scaled_dot_product_attention(query[:, :, i : i + 1], key, value)
                    for i in range(MAX_QUERIES)
                ],
                dim=2,
            )
            for queries in range(2, MAX_QUERIES + 1):
                together = F.scaled_dot_product_attention(query[:, :, :queries], key, value)
                cases += 1
                if not torch.equal(together, alone[:, :, :queries]):
                    differing.append([length, queries])
    return {"cases": cases, "differing": len(differing), "length_and_queries": differing}


def run(device: str = "cuda") -> dict[str, Any]:
    """Count for every backend in bfloat16 and float16; a backend that refuses says why."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        for name, backend in BACKENDS.items():
            label = f"{name}_{str(dtype).removeprefix('torch.')}"
            try:
                found[label] = count_differences(backend, dtype, LENGTHS, device)
            except RuntimeError as error:
                found[label] = {"refused": str(error).splitlines()[0]}
    return found
