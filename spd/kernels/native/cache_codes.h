/* Rows of a cache in eight bits: codes from -127 to 127, and a float16 scale: see spd.kernels.attention.cache_rows. */

#ifndef SPD_CACHE_CODES_H
#define SPD_CACHE_CODES_H

#include "vector.h"

enum { LARGEST_CODE = 127, HALF_NAN = 0x7e00, HALF_INFINITY = 0x7c00 };

/* A number from 0 on as float16, ties to even; HALF_INFINITY where it is too large. */
static inline uint16_t half_of(float x)
{
    uint32_t bits;
    if (x < 0x1p-14f) { /* whole steps of 2^-24, which the sum with 2^23 rounds to */
        float steps = x * 0x1p24f + 0x1p23f;
        memcpy(&bits, &steps, sizeof bits);
        return (uint16_t)(bits & 0x7fffff);
    }
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
    return bits < HALF_INFINITY ? (uint16_t)bits : HALF_INFINITY;
}

static inline float of_half(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    return half < HALF_INFINITY ? x * 0x1p112f : __builtin_nanf("");
}

/* The first `count` of sixteen float16 from 0 on, or NaN. */
static inline vec of_halves(const uint16_t *p, long count)
{
    vec x = vmul(as_vec(right(as_ints(widened(halves(p, count))), 3)), vall(0x1p112f));
    return vselect(vmore(x, vall(65504.0f)), vall(__builtin_nanf("")), x);
}

/* The scale of a row [size], not finite where the row is not or where it is too large. */
static inline uint16_t row_scale(const element *x, long size)
{
    vec top = vzero(), rest = vzero(); /* x - x is 0 where x is finite, else NaN, which stays */
    for (long i = 0; i < size; i += SIDE) {
        vec v = load(x + i, size - i);
        top = vmax(top, vmax(v, vsub(vzero(), v)));
        rest = vadd(rest, vsub(v, v));
    }
    return any_nan(rest) ? HALF_NAN : half_of(vtop(top) / (float)LARGEST_CODE);
}

/* The codes of a row [size] for a scale, with room for whole sixteens. */
static inline void round_row(const element *x, long size, uint16_t scale, int8_t *codes)
{
    float by = of_half(scale);
    if (!(by > 0)) {
        memset(codes, 0, (size_t)size);
        return;
    }
    const vec most = vall((float)LARGEST_CODE), least = vall(-(float)LARGEST_CODE);
    for (long i = 0; i < size; i += SIDE)
        save_bytes(codes + i, nearest_ints(vmin(most, vmax(least, vdiv(load(x + i, size - i), vall(by))))));
}

/* Scales of what scores are made of and of what is weighed: NaN and 0 where one of the two is not finite. */
static inline void guard_scales(uint16_t *scored, uint16_t *weighed)
{
    if (*scored < HALF_INFINITY && *weighed < HALF_INFINITY) return;
    *scored = HALF_NAN, *weighed = 0;
}

/* The numbers of 32 codes as elements, which hold them exactly, without the scale. */
INLINE void widen(element *to, const int8_t *from)
{
#ifdef SPD_FLOAT32
    for (int i = 0; i < 32; i += SIDE) storef(to + i, SIDE, of_codes(from + i));
#else
    widen_codes(to, from);
#endif
}

/* The numbers of any count of codes. */
static inline void widen_row(element *to, const int8_t *from, long count)
{
    for (; count >= 32; count -= 32, to += 32, from += 32) widen(to, from);
    int8_t rest[32] = {0};
    element numbers[32];
    if (count <= 0) return;
    memcpy(rest, from, (size_t)count);
    widen(numbers, rest);
    memcpy(to, numbers, (size_t)count * sizeof *to);
}

#endif
