"""The packed instructions that make numbers of codes, by a machine of the eight that they use: all
codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spd.kernels.linear import unpack_triton
from spd.kernels.linear.few_bits import decode_codes
from spd.kernels.linear.tiled_weight import SWAPPED_KINDS

MASK = 0xFFFFFFFF


def permuted(a: int, b: int, order: int) -> int:
    """Compute PTX's prmt: each of four bytes is one of the eight of a and b, or its sign repeated."""
    all_bytes = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    chosen = []
    for place in range(4):
        selector = order >> 4 * place
        byte = all_bytes[selector & 7]
        chosen.append((255 if byte & 128 else 0) if selector & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def combined(a: int, b: int, c: int, table: int) -> int:
    """Compute PTX's lop3: each bit is that of a table, at the place that the three bits name."""
    places = [a >> bit & 1 | (b >> bit & 1) << 1 | (c >> bit & 1) << 2 for bit in range(32)]
    # PTX counts a as the highest of the three.
    orders = [(place & 1) << 2 | place & 2 | place >> 2 for place in places]
    return sum((table >> order & 1) << bit for bit, order in enumerate(orders))


def pair(word: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.int16).view(dtype).double()


def fused(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    """Compute two multiply-adds of a 16-bit type, which must be exact."""
    result = pair(a, dtype) * pair(b, dtype) + pair(c, dtype)
    rounded = result.to(dtype)
    assert torch.equal(rounded.double(), result), "rounded"
    low, high = (rounded.view(torch.int16).int() & 0xFFFF).tolist()
    return int(low | high << 16)


def executed(
    text: str, codes: int, zeros: int, dtype: torch.dtype, upper: int = 0, lift: int = 0
) -> list[float]:
    """Return the four numbers that PTX computes from four bytes."""
    registers: dict[str, int] = {"$2": codes, "$3": zeros, "$4": upper, "$5": lift}
    steps: dict[str, Any] = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "not": lambda a: ~a,
        "shl": lambda a, by: a << by,
        "shr": lambda a, by: a >> by,
        "prmt": permuted,
        "lop3": combined,
        "fma": lambda a, b, c: fused(a, b, c, dtype),
    }
    for line in text.strip("{ }").split(";")[1:]:
        name, target, *sources = line.replace(",", " ").split() or ("", "")
        if name:
            values = [
                registers[source] if source in registers else int(source, 0) for source in sources
            ]
            registers[target] = steps[name.split(".")[0]](*values) & MASK
    return [*pair(registers["$0"], dtype).tolist(), *pair(registers["$1"], dtype).tolist()]


@pytest.mark.covers(count=12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
@pytest.mark.parametrize("kind", ["int4", "nibble", "e2m1", "e4m3", "iq4", "mx4"])
def test_every_code_is_its_number(kind: Any, high: bool, dtype: torch.dtype) -> None:
    if kind == "e4m3" and high:
        pytest.skip("a code fills its byte")
    text = unpack_triton.conversion_assembly(kind, high, dtype == torch.float16)
    for first in range(256):
        some = [first, (first * 7 + 3) % 256, (first * 13 + 5) % 256, 255 - first]
        codes = torch.tensor(some, dtype=torch.uint8)
        if kind == "e4m3":
            codes[codes & 127 == 127] = 5  # NaN, which no weight is
        else:
            codes = codes >> 4 if high else codes & 15
        code_bytes = codes.tolist() if kind == "e4m3" else some
        if kind in SWAPPED_KINDS:
            code_bytes = [some[place] for place in (0, 2, 1, 3)]
        is_integer = kind in ("int4", "nibble")
        for zero in (0, 8, 15) if is_integer else (0,):
            right = codes.double() - zero if is_integer else decode_codes(kind, codes).double()
            word = int.from_bytes(bytes(code_bytes), "little")
            lift = unpack_triton.LIFTS[dtype == torch.float16] * 0x00010001
            less = zero * 0x01010101
            if kind == "int4":
                less = (lift | 0x80008000) + zero * 0x00010001
            result = executed(text, word, less, dtype, lift=lift)
            assert result == right.tolist(), (first, zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
@pytest.mark.parametrize("kind", ["int5", "int6"])
def test_every_code_with_upper_bits_is_its_number(
    kind: Any, high: bool, dtype: torch.dtype
) -> None:
    """Whatever stands in the other half of its byte, and in the other bits of the upper ones."""
    bits = 1 if kind == "int5" else 2
    for shift in range(0, 8, bits):
        text = unpack_triton.conversion_assembly(kind, high, dtype == torch.float16, shift)
        for first in range(shift, 256, 8):
            lower = [first, (first * 7 + 3) % 256, (first * 13 + 5) % 256, 255 - first]
            upper = [(first * 5 + 1) % 256, 255 - first, first, (first * 11 + 7) % 256]
            for zero in (0, 16, 32):
                right = [
                    float(
                        ((low >> 4 if high else low & 15) | (up >> shift & (1 << bits) - 1) << 4)
                        - zero
                    )
                    for low, up in zip(lower, upper, strict=True)
                ]
                words = [int.from_bytes(bytes(numbers), "little") for numbers in (lower, upper)]
                result = executed(text, words[0], zero * 0x01010101, dtype, words[1])
                assert result == right, (first, shift, zero)


def test_minus_ones_are_minus_ones() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        text = unpack_triton.minus_ones_assembly(dtype == torch.float16)
        words = [int(word.strip(" ;}").split()[-1], 0) for word in text.split(";")[:2]]
        assert [pair(word, dtype).tolist() for word in words] == [[-1.0, -1.0]] * 2
