# mypy: disable-error-code="untyped-decorator"
"""Truncation keeps exactly the reference's tokens, and masses are the same integers everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling.sampling import truncate
from tests.kernels.sampling_cases import EXTREMES, INFINITY, number, random_case

triton = pytest.importorskip("triton")


from spd.kernels.sampling import truncation_triton  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf


def kept_by_kernels(processed: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which of processed [rows, V] the thresholds keep, one slot a row."""
    keys = order_keys(processed)
    ones = torch.ones_like(top_p)
    tensors = random_case(len(processed), 0, 3, 0, str(processed.device)).tensors
    tensors = replace(tensors, temperature=ones, top_k=top_k, top_p=top_p)
    highest = torch.stack((keys.amax(dim=-1), keys[:, 0]), dim=-1).int()
    found = truncation_triton.find_thresholds(processed, highest, 1, tensors).long()
    assert torch.equal(found[:, 2], keys.amax(dim=-1))
    ids = torch.arange(processed.shape[1], device=processed.device)
    return (keys > found[:, :1]) | ((keys == found[:, :1]) & (ids <= found[:, 1:2]))


def order_keys(values: Tensor) -> Tensor:
    bits = values.view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    return torch.where(values == 0, 0, torch.where(values.isnan(), 2**31 - 1, keys))


def assert_same_kept(processed: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """The reference's -inf says what is not kept; -1e38 stands in for a -inf of the row's own."""
    marked = torch.where(processed == -INFINITY, -1e38, processed)
    expected = truncate(marked[:, None], top_k, top_p, torch.zeros_like(top_p))[:, 0] != -INFINITY
    assert torch.equal(kept_by_kernels(processed, top_k, top_p), expected)


def test_truncation_keeps_what_the_reference_keeps(device: str, small_blocks: None) -> None:
    """Both cuts, each alone, and neither, over several blocks and chunks, with and without ties."""
    rows = number(device, 12)
    g = torch.Generator().manual_seed(3)
    processed = 3 * torch.randn(rows, 200, generator=g)
    processed[1::2] = (2 * processed[1::2]).round() / 2
    top_k = torch.tensor([0, 7, 60, 7, 199, 200]).repeat(rows)[:rows]
    top_p = torch.tensor([0.9, 1.0, 0.6, 0.3, 0.995, 0.05, 0.8]).repeat(rows)[:rows]
    assert_same_kept(processed.to(device), top_k.to(device), top_p.to(device))


@pytest.mark.parametrize("name", EXTREMES)
def test_truncation_at_its_edges(name: str, device: str, small_blocks: None) -> None:
    logits, top_k, top_p = EXTREMES[name]
    assert_same_kept(
        torch.tensor([logits], device=device),
        torch.tensor([top_k], device=device),
        torch.tensor([top_p], device=device),
    )
