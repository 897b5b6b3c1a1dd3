# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Conversion of weights' bytes to a 16-bit type, four at a time by packed instructions, all exact.

A code is put into the bits of a number: below the leading one of 128 or 1024, or as exponent and
mantissa, which is wrong by a power of two. A multiply-add corrects both. On an H200 products by
four bits are twice as fast as with Triton's conversions, by FP8 1.3 times; Triton's conversion of
int8 is faster.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.linear.few_bits import IQ4_VALUES

INTERPRETED = triton.knobs.runtime.interpret
"""True if kernels run in the interpreter, which has no assembler."""
SIGN_BITS = 0x80008000
SIGN_BYTES = 0x80808080
LIFTS = (0x4300, 0x6400)
"""The bits of 128 in bfloat16 and of 1024 in float16, whose lower bits a code of four bits fills."""
_BFLOAT_LIFT = tl.constexpr(LIFTS[0])
_HALF_LIFT = tl.constexpr(LIFTS[1])
PINNED_ROWS = tl.constexpr(64)
"""The fewest rows of a tile whose int4 bytes are put in order where they were loaded.

Hopper's matrix units take such tiles from registers in pairs of columns, not fours, and Triton may
convert them there. What is not pure stays in its place.
"""
IQ4_SIZES = tuple(
    int.from_bytes(bytes(map(abs, IQ4_VALUES[first : first + 4])), "little")
    for first in range(0, 16, 4)
)
"""The magnitudes of `IQ4_VALUES`, a word for every four; the first eight values are negative."""
_IQ4_NEGATIVE = tl.constexpr(IQ4_SIZES[1] << 32 | IQ4_SIZES[0])
_IQ4_POSITIVE = tl.constexpr(IQ4_SIZES[3] << 32 | IQ4_SIZES[2])


@triton.constexpr_function
def uses_packed_instructions(dtype):
    """True if bytes are converted to a type by these instructions."""
    return not INTERPRETED and dtype in (tl.bfloat16, tl.float16)


@triton.constexpr_function
def conversion_assembly(kind, high, half, upper_shift=0):
    """Return PTX that converts four bytes $2 to four numbers $0 $1; integers are less the bytes $3.

    kind: int4 to int6, iq4, e2m1 or mx4, of each byte's high half or its low one, or e4m3; nibble is
    int4 whose bytes are in order. half: float16, not bfloat16. upper_shift: where in bytes $4 the
    upper bits of int5 and int6 are. For int4 see `pair_lines`.
    """
    fma = f"fma.rn.{'f16x2' if half else 'bf16x2'} w, w, a, b;"
    unit_pair, lift = (0x3C003C00, 0x64646464) if half else (0x3F803F80, 0x43434343)
    lines = ["shr.u32 c, $2, 4;" if high else "mov.b32 c, $2;"]
    if kind in ("nibble", "int5", "int6", "iq4"):
        lines += ["mov.b32 z, $3;", "and.b32 c, c, 0x0f0f0f0f;"]
    if kind in ("int5", "int6"):
        mask = 0x01010101 if kind == "int5" else 0x03030303
        lines += [f"shr.u32 t, $4, {upper_shift};", f"and.b32 t, t, {mask};"]
        lines += ["shl.b32 t, t, 4;", "or.b32 c, c, t;"]
    if kind == "iq4":
        lines += table_lines()
    for out, order in enumerate((0x4140, 0x4342)):
        if kind == "int4":
            lines += pair_lines(4 * high + 8 * out, unit_pair)
            lines.append(fma)
        elif kind in ("nibble", "int5", "int6", "iq4"):
            lines += [
                f"prmt.b32 w, c, {lift}, {order};",
                f"prmt.b32 b, z, {lift | 0x80808080}, {order};",
            ]
            lines += [f"mov.b32 a, {unit_pair};", fma]
            if kind == "iq4":
                lines += [f"prmt.b32 t, s, 0, {(0x1404, 0x3424)[out]};"]
                lines += [f"and.b32 t, t, {SIGN_BITS};", "or.b32 w, w, t;"]
        elif kind in ("e2m1", "mx4"):
            shift, mask, power = (
                (9, 0x0E000E00, 0x74007400) if half else (6, 0x01C001C0, 0x7E807E80)
            )
            if kind == "mx4":  # twice as large
                power += 0x04000400 if half else 0x00800080
            sign = ["shl.b32 t, w, 12;", f"and.b32 t, t, {SIGN_BITS};"]
            lines += [
                f"prmt.b32 w, c, 0, {order};",
                *sign,
                f"shl.b32 w, w, {shift};",
                f"and.b32 w, w, {mask};",
                "or.b32 w, w, t;",
            ]
            lines += [f"mov.b32 a, {power};", f"mov.b32 b, {SIGN_BITS};", fma]
        else:
            shift, mask, power = (
                (1, 0x3F803F80, 0x5C005C00) if half else (4, 0x07F007F0, 0x7B807B80)
            )
            lines += [f"prmt.b32 w, c, 0, {(0x1404, 0x3424)[out]};", f"and.b32 t, w, {SIGN_BITS};"]
            lines += [f"shr.u32 w, w, {shift};", f"and.b32 w, w, {mask};", "or.b32 w, w, t;"]
            lines += [f"mov.b32 a, {power};", f"mov.b32 b, {SIGN_BITS};", fma]
        lines.append(f"mov.b32 v{out}, w;")
    return (
        "{ .reg .b32 a, b, c, p, s, t, w, z, v0, v1; "
        + " ".join(lines)
        + " mov.b32 $0, v0; mov.b32 $1, v1; }"
    )


@triton.constexpr_function
def pair_lines(shift, unit_pair):
    """Return PTX that makes a pair w of two codes of int4 of word $2, and operands a and b.

    The middle two bytes are swapped. $3 is what is added to both numbers, $5 one of `LIFTS`: a
    constant would be moved to a register for each of them. A mask and the leading one are a single
    instruction.
    """
    return [
        f"shr.u32 w, $2, {shift};" if shift else "mov.b32 w, $2;",
        "lop3.b32 w, w, 0x000f000f, $5, 0xea;",
        "mov.b32 b, $3;",
        f"mov.b32 a, {unit_pair};",
    ]


@triton.constexpr_function
def table_lines():
    """Return PTX that replaces codes c of iq4 by magnitudes, and writes s, whose bits 7 are signs.

    A permutation looks up four of eight bytes by three bits each, in the lower half of a register.
    """
    first, second, third, fourth = IQ4_SIZES
    return [
        "shr.u32 t, c, 4;",
        "or.b32 t, t, c;",
        "prmt.b32 t, t, 0, 0x4420;",
        "and.b32 t, t, 0x7777;",
        f"mov.b32 a, {first | SIGN_BYTES};",
        f"prmt.b32 p, a, {second | SIGN_BYTES}, t;",
        f"mov.b32 a, {third};",
        f"prmt.b32 w, a, {fourth}, t;",
        # Bytes of the codes' upper bits say which of the two is meant.
        "shl.b32 t, c, 4;",
        "prmt.b32 t, t, 0, 0xba98;",
        "and.b32 w, w, t;",
        "not.b32 t, t;",
        "and.b32 p, p, t;",
        "or.b32 s, p, w;",
        "and.b32 c, s, 0x7f7f7f7f;",
    ]


@triton.jit
def unpack_codes(
    codes, zeros, upper, KIND: tl.constexpr, HIGH: tl.constexpr, UPPER_SHIFT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return numbers of a type from bytes, whole or of half a byte, and of integers less zeros.

    upper: bytes that hold upper bits, None where codes have none; see `conversion_assembly`.
    """
    IN_ORDER: tl.constexpr = KIND == "int4" and codes.shape[0] >= PINNED_ROWS
    if IN_ORDER:
        codes = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [codes], dtype=tl.uint8, is_pure=False, pack=4
        )
    text: tl.constexpr = conversion_assembly(
        "nibble" if IN_ORDER else KIND, HIGH, tl.float16 == DTYPE, UPPER_SHIFT
    )
    if KIND == "int4" and codes.shape[0] < PINNED_ROWS:
        LIFT: tl.constexpr = _HALF_LIFT if tl.float16 == DTYPE else _BFLOAT_LIFT
        lift = tl.full((1, 1), LIFT, tl.uint16)
        less = zeros.to(tl.uint16) | (LIFT + 0x8000)
        bits = tl.inline_asm_elementwise(
            text, "=r,=r,r,r,r,r,r", [codes, less, lift], dtype=tl.int16, is_pure=True, pack=4
        )
    elif upper is not None:
        bits = tl.inline_asm_elementwise(
            text, "=r,=r,r,r,r", [codes, zeros, upper], dtype=tl.int16, is_pure=True, pack=4
        )
    else:
        bits = tl.inline_asm_elementwise(
            text, "=r,=r,r,r", [codes, zeros], dtype=tl.int16, is_pure=True, pack=4
        )
    return bits.to(DTYPE, bitcast=True)


@triton.constexpr_function
def minus_ones_assembly(half):
    """Return PTX that makes two pairs of -1 $0 $1, whatever the four bytes $2 are."""
    pair = 0xBC00BC00 if half else 0xBF80BF80
    return f"{{ mov.b32 $0, {pair}; mov.b32 $1, {pair}; }}"


@triton.jit
def minus_ones_like(codes, DTYPE: tl.constexpr):
    """Return -1 of a type in the shape of codes uint8.

    Triton lays operands of products out by the width of what they were made of. So both products of
    the same tokens, by codes and by these, can read one copy of them.
    """
    if uses_packed_instructions(DTYPE):
        bits = tl.inline_asm_elementwise(
            minus_ones_assembly(tl.float16 == DTYPE),
            "=r,=r,r",
            [codes],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
        ones = bits.to(DTYPE, bitcast=True)
    else:
        ones = tl.full(codes.shape, -1.0, DTYPE)
    return ones


@triton.jit
def code_numbers(codes, CODE: tl.constexpr):
    """Return the values of codes uint8 in float32, before zero points: see `decode_codes`."""
    if CODE == "iq4":
        place = (codes & 7).to(tl.int64) * 8
        negative = codes < 8
        size = tl.where(negative, _IQ4_NEGATIVE, _IQ4_POSITIVE) >> place & 127
        number = size.to(tl.float32)
        number = tl.where(negative, -number, number)
    elif CODE == "e2m1" or CODE == "mx4":
        twice = (
            0xC8643210 >> ((codes & 7).to(tl.uint32) * 4)
        ) & 15  # each magnitude's double in four bits
        number = twice.to(tl.float32) * (0.5 if CODE == "e2m1" else 1.0)
        number = tl.where((codes & 8) != 0, -number, number)
    elif CODE == "e4m3":
        size = (codes & 127).to(tl.int32)
        number = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(
            size < 8, size.to(tl.float32) * 0.001953125, number
        )  # below 2**-6 no leading 1
        number = tl.where(codes >= 128, -number, number)
    else:
        number = codes.to(tl.float32)
    return number
