"""Unpacking against compressed-tensors' own packing, where that is installed: pytest -m oracle."""

from __future__ import annotations

import pytest
import torch

from spd.runtime.load.packed_weights import unpacked_words

pytestmark = pytest.mark.oracle
ODD = [(1, 32), (7, 33), (16, 100), (33, 128)]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("rows", "columns"), ODD)
def test_words(bits: int, rows: int, columns: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    signed = (codes - (1 << (bits - 1))).to(torch.int8)
    words = helpers.pack_to_int32(signed, bits)
    assert torch.equal(unpacked_words(words, bits, columns), codes.to(torch.uint8))
    down = helpers.pack_to_int32(signed, bits, packed_dim=0)
    assert torch.equal(unpacked_words(down.t(), bits, rows).t(), codes.to(torch.uint8))
