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

INTERPRETED = triton.knobs.runtime.interpret
"""True if kernels run in the interpreter, which has no assembler."""
SIGN_BITS = 0x80008000


@triton.constexpr_function
def uses_packed_instructions(dtype):
    """True if bytes are converted to a type by these instructions."""
    return not INTERPRETED and dtype in (tl.bfloat16, tl.float16)


@triton.constexpr_function
def conversion_assembly(kind, high, half):
    """Return PTX that converts four bytes $2 to four numbers $0 $1; int4 subtracts the bytes $3.

    kind: int4 or e2m1, of each byte's high half or its low one, or e4m3. half: float16, not
    bfloat16.
    """
    fma = f"fma.rn.{'f16x2' if half else 'bf16x2'} w, w, a, b;"
    unit_pair, lift = (0x3C003C00, 0x64646464) if half else (0x3F803F80, 0x43434343)
    lines = ["shr.u32 c, $2, 4;" if high else "mov.b32 c, $2;"]
    if kind == "int4":
        lines += ["mov.b32 z, $3;", "and.b32 c, c, 0x0f0f0f0f;"]
    for out, order in enumerate((0x4140, 0x4342)):
        spread = f"prmt.b32 w, c, 0, {order};"
        if kind == "int4":
            lines += [
                f"prmt.b32 w, c, {lift}, {order};",
                f"prmt.b32 b, z, {lift | 0x80808080}, {order};",
            ]
            lines += [f"mov.b32 a, {unit_pair};", fma]
        elif kind == "e2m1":
            shift, mask, power = (
                (9, 0x0E000E00, 0x74007400) if half else (6, 0x01C001C0, 0x7E807E80)
            )
            sign = ["shl.b32 t, w, 12;", f"and.b32 t, t, {SIGN_BITS};"]
            lines += [
                spread,
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
        "{ .reg .b32 a, b, c, t, w, z, v0, v1; "
        + " ".join(lines)
        + " mov.b32 $0, v0; mov.b32 $1, v1; }"
    )


@triton.jit
def unpack_codes(codes, zeros, KIND: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of a type from bytes, whole or of half a byte, and of int4 less zeros: see
    `assembly`."""
    bits = tl.inline_asm_elementwise(
        conversion_assembly(KIND, HIGH, tl.float16 == DTYPE), "=r,=r,r,r", [codes, zeros],
        dtype=tl.int16, is_pure=True, pack=4,
    )  # fmt: skip
    return bits.to(DTYPE, bitcast=True)
