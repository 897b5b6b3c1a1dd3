/* Weights that are kept as elements, or as codes of four, five, six or eight bits with a scale a group of columns.

   Codes lie as tiles do, [blocks][steps], sixteen lanes of 32 bits at a time, a column's each. A step of four bits is
   8 x 16 lanes: lane z holds depths 4 z, 4 z + 2, 4 z + 1 and 4 z + 3, a byte each, with side 0 in its lower bits. Of
   five bits the fifth stand behind them, 2 x 16 lanes, in the same bytes: of lane z at bit 2 (z % 4) + side of lane
   z / 4; of six bits the upper two, 4 x 16 lanes: at bit 4 (z % 2) + 2 side of lane z / 2. A step of eight bits is
   16 x 16 lanes: lane 2 z + side holds the same four depths of one side.
   Scales, zeros and minima lie [blocks][groups][32], their factors [blocks][depth / 256][32]. */

#ifndef SPD_WEIGHT_H
#define SPD_WEIGHT_H

#include "tiles.h"

enum { ELEMENTS, INT4, INT8, E2M1, E4M3, INT5, INT6, IQ4, MX4 };
enum { BFLOAT16, FLOAT32, FLOAT16, EXPONENTS, BYTES };
enum { WIDTH = 2 * SIDE, LANES = 64, PANEL = 4, SUPER = 256 };

/* scale_kind: BFLOAT16, FLOAT32, FLOAT16; EXPONENTS: bytes e for 2^(e - 128); BYTES: 128 more than a whole number, times
   a factor float16 of `SUPER` columns. Minima are of the same kind, and of groups of 32. */
typedef struct {
    const void *tiles; /* elements, or codes */
    const void *scales;
    const uint8_t *zeros;
    const void *minima;
    const bf16 *factors, *minimum_factors;
    long group, groups, steps;
    int kind, scale_kind;
    long rounds_rows; /* to eight bits: see int8.h */
} Weight;

/* Whether four bits of each code lie in pairs. */
static inline int is_paired(int kind) { return kind != INT8 && kind != E4M3; }
static inline int upper_bits(int kind) { return kind == INT5 ? 1 : kind == INT6 ? 2 : 0; }
static inline long step_bytes(int kind) { return (is_paired(kind) ? 8 + 2 * upper_bits(kind) : 16) * LANES; }

/* What stands for 0 where there are neither zero points nor minima. */
static inline float middle_of(const Weight *w)
{
    if (w->minima) return 0.0f;
    return w->kind == INT4 ? 8.0f : w->kind == INT5 ? 16.0f : w->kind == INT6 ? 32.0f : 128.0f;
}

#define OF_IQ4 -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define OF_MX4 0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12
#define OF_E2M1 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6
#define OF_INT4 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15

/* Numbers of float16; what is not finite becomes infinite, or stays as it is. */
INLINE vec of_float16(const bf16 *p)
{
#if SPD_WIDE
    return _mm512_cvtph_ps(halves(p, SIDE));
#elif !SPD_NEON
    return (vec){{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))}};
#else
    ints x = as_ints(widened(halves(p, SIDE)));
    vec size = vmul(as_vec(right(masked(x, 0x7fff0000), 3)), vall(0x1p112f));
    size = vselect(vmore(size, vall(65504.0f)), vall(__builtin_inff()), size);
    return as_vec(either(as_ints(size), masked(x, INT32_MIN)));
#endif
}

/* What both sides' scales and minima are multiplied by, where they are bytes. */
typedef struct {
    vec scale[2], minimum[2];
} Factors;

/* The factors of a group, which those behind it in the same `SUPER` columns have too. */
INLINE void load_factors(const Weight *w, long at, Factors *f)
{
    if (w->scale_kind != BYTES) return;
    long place = (at >> (w->group < DEPTH ? 4 : 3)) * WIDTH;
    for (int side = 0; side < 2; side++) {
        f->scale[side] = of_float16(w->factors + place + side * SIDE);
        if (w->minima) f->minimum[side] = of_float16(w->minimum_factors + place + side * SIDE);
    }
}

static inline int begins_super(const Weight *w, long group) { return group % (w->group < DEPTH ? 16 : 8) == 0; }

/* A group's scales or minima of columns 16 side on. */
INLINE vec scaled_by(const Weight *w, const void *numbers, vec factor, long at, int side)
{
    long place = at * WIDTH + side * SIDE;
    if (w->scale_kind == FLOAT32) return loadf((const float *)numbers + place, SIDE);
    if (w->scale_kind == BFLOAT16) return widened(halves((const bf16 *)numbers + place, SIDE));
    if (w->scale_kind == FLOAT16) return of_float16((const bf16 *)numbers + place);
    vec number = vsub(of_bytes((const uint8_t *)numbers + place), vall(128.0f));
    if (w->scale_kind == EXPONENTS) return vscaled(vall(1.0f), vmax(number, vall(-126.0f)));
    return vmul(factor, number);
}

INLINE vec scales_of(const Weight *w, const Factors *f, long at, int side)
{
    return scaled_by(w, w->scales, f->scale[side], at, side);
}
INLINE vec minima_of(const Weight *w, const Factors *f, long at, int side)
{
    return scaled_by(w, w->minima, f->minimum[side], at, side);
}

#endif
