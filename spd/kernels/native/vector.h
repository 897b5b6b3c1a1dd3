/* Sixteen float32 lanes: a register of AVX512, two of AVX2, or four of NEON. All round every operation and sum lanes
   alike.

   An element is what a model's values are kept in: bfloat16, or float32 with SPD_FLOAT32. */

#ifndef SPD_VECTOR_H
#define SPD_VECTOR_H

#include <stdint.h>
#include <string.h>

/* SPD_WIDE: registers have 16 lanes. SPD_PAIRS: elements are bfloat16, and the processor multiplies pairs of them.
   SPD_VNNI: it multiplies fours of bytes. */
#if !defined(SPD_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SPD_WIDE 1
#elif (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
#define SPD_WIDE 0
#else
#error "these kernels need AVX2 and FMA, or NEON"
#endif
#if SPD_WIDE && defined(__AVX512BF16__) && !defined(SPD_NO_PAIRS) && !defined(SPD_FLOAT32)
#define SPD_PAIRS 1
#else
#define SPD_PAIRS 0
#endif
#if SPD_WIDE && defined(__AVX512VNNI__) && !defined(SPD_NO_VNNI)
#define SPD_VNNI 1
#else
#define SPD_VNNI 0
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#define SPD_NEON 1
#else
#include <immintrin.h>
#define SPD_NEON 0
#endif

typedef uint16_t bf16;
#ifdef SPD_FLOAT32
typedef float element;
#else
typedef bf16 element;
#endif

enum { SIDE = 16 };
#define INLINE static inline __attribute__((always_inline))

/* `count` tells how many lanes are read or written, the first ones: all from 16 on, none below 1. What is not read
   is 0. vec and ints: lanes of numbers, and of whole ones. between: which of the numbers first, first + 1, ... lie in
   low to last. vscaled: x * 2^power for whole powers from -126 to 252; vbelow_infinity: so that a power that is too
   large is one that can be made, and NaN stays. vexponent and vmantissa, of positive normal numbers:
   x = mantissa * 2^exponent, the mantissa from 1 to 2. With UPPER_BYTES, upper_byte: lanes with byte n of x as their upper
   one, and zeros.

   Products of bytes: `dot` adds, in each lane, the products of its four bytes with four of a row to a partial sum, which
   `begun` makes of a whole one and `ended` adds to it. With EXACT_PARTS a partial sum holds any number of products; else
   two sums of 16 bits, which `lanes_at_once` in int8.c keeps in range. The row's bytes are signed; those of lanes are
   not, but with SIGNED_BYTES where `is_signed`. MOST_INT8_ROWS: rows whose sums fit the registers. */

#if SPD_WIDE
#include "vector_avx512.h"
#else
/* A function whose result has in each part i what the expression says, or which does so much with each part. */
#define EACH(type, name, expression, ...) \
    INLINE type name(__VA_ARGS__) \
    { \
        type made; \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) made.q[i] = (expression); \
        return made; \
    }
#define EACH_TO(name, statement, ...) \
    INLINE void name(__VA_ARGS__) \
    { \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) statement; \
    }
enum { PARTS = SPD_NEON ? 4 : 2 };
#if SPD_NEON
#include "vector_neon.h"
#else
#include "vector_avx2.h"
#endif

static inline vec vzero(void) { return vall(0.0f); }
static inline mask lanes(long count) { return between(0, 0, count < SIDE ? (int32_t)count - 1 : SIDE); }

#define LOADED(type, name, whole, kind) \
    static inline type name(const kind *p, long count) \
    { \
        if (count >= SIDE) return whole(p); \
        kind part[SIDE] = {0}; \
        if (count > 0) memcpy(part, p, (size_t)count * sizeof *p); \
        return whole(part); \
    }
LOADED(vec, loadf, load_all, float)
LOADED(half_vec, halves, load_halves, bf16)
#define STORED(type, name, whole, kind) \
    static inline void name(kind *p, long count, type x) \
    { \
        kind part[SIDE]; \
        whole(count < SIDE ? part : p, x); \
        if (count < SIDE && count > 0) memcpy(p, part, (size_t)count * sizeof *p); \
    }
STORED(vec, storef, store_all, float)
STORED(half_vec, store_halves, save_halves, bf16)

static inline vec vexponent(vec x) { return of_ints(plus(right(as_ints(x), 23), -127)); }
static inline vec vmantissa(vec x) { return as_vec(either(masked(as_ints(x), 0x7fffff), as_ints(vall(1.0f)))); }
#endif

#ifndef UPPER_BYTES
#define UPPER_BYTES 0
#endif

OF_TWO(vadd, add_ps)
OF_TWO(vsub, sub_ps)
OF_TWO(vmul, mul_ps)
OF_TWO(vdiv, div_ps)
OF_TWO(vmin, min_ps)
OF_TWO(vmax, max_ps)
OF_THREE(vfma, fmadd_ps)
OF_THREE(vfnma, fnmadd_ps)

/* Both halves are exact in float32: their sum is rounded once. */
static inline vec of_unsigned(const uint32_t *p)
{
    ints x = loadi(p);
    return vfma(of_ints(right(x, 16)), vall(65536.0f), of_ints(masked(x, 0xffff)));
}

#ifdef SPD_FLOAT32
static inline vec load(const element *p, long count) { return loadf(p, count); }
static inline void store(element *p, long count, vec x) { storef(p, count, x); }
static inline vec as_kept(vec x) { return x; }
#else
static inline vec load(const element *p, long count) { return widened(halves(p, count)); }
static inline void store(element *p, long count, vec x) { store_halves(p, count, rounded(x)); }
static inline vec as_kept(vec x) { return widened(rounded(x)); }
#endif

/* e^x to about one unit in the last place, 1 of 0; NaN stays. Source: the coefficients of Cephes' expf. */
INLINE vec exponential(vec x)
{
    x = vbelow_infinity(vmax(vall(-87.0f), x));
    vec n = vnearest(vmul(x, vall(1.44269504f)));
    vec r = vfnma(n, vall(0.693359375f), x);
    r = vfnma(n, vall(-2.12194440e-4f), r);
    static const float by[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
        5.0000001201e-1f};
    vec p = vall(by[0]);
    for (int i = 1; i < 6; i++) p = vfma(p, r, vall(by[i]));
    p = vadd(vfma(vmul(p, r), r, r), vall(1.0f));
    return vscaled(p, n);
}

/* 2^x to about one unit in the last place for x up to about 0, 1 of 0; below -126 it is next to nothing; NaN stays. */
INLINE vec power_of_two(vec x)
{
    x = vmax(vall(-126.0f), x);
    vec n = vnearest(x), r = vsub(x, n);
    static const float by[] = {1.326472731e-3f, 9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f};
    vec p = vall(by[0]);
    for (int i = 1; i < 6; i++) p = vfma(p, r, vall(by[i]));
    return vscaled(p, n);
}

/* What rows x [size] are divided by, but for the scales: 1 / sqrt(mean of squares + epsilon). */
static inline float norm_scale(const element *x, long size, float epsilon)
{
    vec squares = vzero();
    for (long i = 0; i < size; i += SIDE) {
        vec v = load(x + i, size - i);
        squares = vfma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(vsum(squares) / (float)size + epsilon);
}

/* The root-mean-square norm of x [size] with scales norm [size], plus residual where it is given, to y. */
static inline void norm_row(
    const element *x, const float *norm, float epsilon, const element *residual, long size, element *y)
{
    vec scale = vall(norm_scale(x, size, epsilon));
    for (long i = 0; i < size; i += SIDE) {
        vec v = vmul(vmul(load(x + i, size - i), scale), loadf(norm + i, size - i));
        if (residual) v = vadd(v, load(residual + i, size - i));
        store(y + i, size - i, v);
    }
}

#endif
