"""The values of GGUF's blocks: fixed vectors, and equality with those of `gguf` where it is
installed.
"""

from __future__ import annotations

import pytest
import torch

from spd.formats.gguf.block_types import READABLE_TYPES, TYPES_BY_NAME
from spd.runtime.load.gguf_blocks import DEQUANTIZERS

VECTORS = [
    ("F32", {0: 1.8745865379404737e-24}),
    ("F16", {0: 0.00018346309661865234}),
    ("BF16", {0: 6.307420567868197e-33}),
    ("Q8_0", {0: 0.00311887264251709, 10: 0.015961289405822754, 31: 0.020914793014526367}),
    ("Q4_0", {0: -0.0012842416763305664, 10: -0.00018346309661865234, 31: -0.0014677047729492188}),
    ("Q4_1", {0: 0.004737496376037598, 10: 0.0029028654098510742, 31: 0.002169013023376465}),
    ("Q5_0", {0: 0.0023850202560424805, 10: -0.0023850202560424805, 31: -0.002751946449279785}),
    ("Q5_1", {0: 0.006939053535461426, 10: 0.006572127342224121, 31: 0.002352476119995117}),
    ("Q2_K", {0: 1821.375, 85: -3269.75, 255: -11023.5}),
    ("Q3_K", {0: 7.78656005859375, 85: -0.0, 255: 9.228515625}),
    ("Q4_K", {0: -0.10008537769317627, 85: 0.03166508674621582, 255: -0.03927898406982422}),
    ("Q5_K", {0: -0.009087681770324707, 85: 0.22980523109436035, 255: -0.04148054122924805}),
    ("Q6_K", {0: 1.5215206146240234, 85: -2.758312225341797, 255: -1.0321426391601562}),
    ("IQ4_NL", {0: -0.019080162048339844, 10: -0.0018346309661865234, 31: -0.023299813270568848}),
    ("IQ4_XS", {0: -0.006971597671508789, 85: 0.08989691734313965, 255: 0.1170494556427002}),
    ("MXFP4", {0: -4.70197740328915e-38, 10: 0.0, 31: 2.82118644197349e-37}),
    ("IQ2_XXS", {0: -0.001651167869567871, 85: 0.0012842416763305664, 255: 0.0023850202560424805}),
    ("IQ2_XS", {0: 0.0034857988357543945, 85: 0.002751946449279785, 255: -0.0009173154830932617}),
    ("IQ2_S", {0: -0.0034857988357543945, 85: 0.0012842416763305664, 255: 0.0020180940628051758}),
    ("IQ3_XXS", {0: -0.0020180940628051758, 85: 0.01412665843963623, 255: 0.010090470314025879}),
    ("IQ3_S", {0: -0.03834378719329834, 85: -0.0009173154830932617, 255: 0.0009173154830932617}),
    ("IQ1_S", {0: 2.2932887077331543e-05, 85: 0.00011466443538665771, 255: 0.00029812753200531006}),
    ("IQ1_M", {0: 0.003008246421813965, 85: 0.007182955741882324, 255: 0.0007981061935424805}),
]
"""Some values of the block whose byte i is (7 i + 3) mod 120, by type; from `gguf` 0.19."""


def random_blocks(name: str, count: int) -> torch.Tensor:
    """Return random uint8 blocks; each of the first 256 repeats one byte value."""
    blocks = torch.randint(0, 256, (256 + count, TYPES_BY_NAME[name].nbytes), dtype=torch.uint8)
    blocks[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    return blocks


def test_every_type_that_is_read_has_values() -> None:
    assert [*DEQUANTIZERS] == [*READABLE_TYPES]
    assert [name for name, _ in VECTORS] == [*READABLE_TYPES]


@pytest.mark.parametrize(("name", "expected"), VECTORS)
def test_values_of_a_fixed_block_are_right(name: str, expected: dict[int, float]) -> None:
    numbers = [(7 * i + 3) % 120 for i in range(TYPES_BY_NAME[name].nbytes)]
    values = DEQUANTIZERS[name](torch.tensor([numbers], dtype=torch.uint8))
    assert values.shape == (1, TYPES_BY_NAME[name].elements)
    assert {at: values[0, at].item() for at in expected} == expected


@pytest.mark.oracle
@pytest.mark.parametrize("name", READABLE_TYPES)
def test_values_equal_those_of_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(49)
    blocks = random_blocks(name, 3000)
    kind = gguf.GGMLQuantizationType[name]
    expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind)).reshape(len(blocks), -1)
    values = DEQUANTIZERS[name](blocks)
    assert torch.equal(values.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(values[is_number].view(torch.int32), expected[is_number].view(torch.int32))
