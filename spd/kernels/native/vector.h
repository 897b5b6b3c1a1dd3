/* Sixteen float32 lanes: a register of AVX512, or two of AVX2. Both round every operation and sum lanes alike.

   An element is what a model's values are kept in: bfloat16, or float32 with SPD_FLOAT32. */

#ifndef SPD_VECTOR_H
#define SPD_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* SPD_WIDE: registers have 16 lanes. SPD_PAIRS: elements are bfloat16, and the processor multiplies pairs of them. */
#if !defined(SPD_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SPD_WIDE 1
#elif defined(__AVX2__) && defined(__FMA__)
#define SPD_WIDE 0
#else
#error "these kernels need AVX2 and FMA"
#endif
#if SPD_WIDE && defined(__AVX512BF16__) && !defined(SPD_NO_PAIRS) && !defined(SPD_FLOAT32)
#define SPD_PAIRS 1
#else
#define SPD_PAIRS 0
#endif

typedef uint16_t bf16;
#ifdef SPD_FLOAT32
typedef float element;
#else
typedef bf16 element;
#endif

enum { SIDE = 16 };

/* `count` tells how many lanes are read or written, the first ones: all from 16 on, none below 1. What is not read
   is 0. */

#if SPD_WIDE

typedef __m512 vec;
typedef __mmask16 mask;

#define OF_TWO(name, op) static inline vec name(vec x, vec y) { return _mm512_##op(x, y); }
#define OF_THREE(name, op) static inline vec name(vec x, vec y, vec z) { return _mm512_##op(x, y, z); }

static inline mask lanes(long count)
{
    return count >= SIDE ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

static inline mask mask_of(uint64_t bits) { return (__mmask16)bits; }
static inline vec vall(float x) { return _mm512_set1_ps(x); }
static inline vec vzero(void) { return _mm512_setzero_ps(); }
static inline vec loadf(const float *p, long count) { return _mm512_maskz_loadu_ps(lanes(count), p); }
static inline void storef(float *p, long count, vec x) { _mm512_mask_storeu_ps(p, lanes(count), x); }
static inline __m256i halves(const bf16 *p, long count) { return _mm256_maskz_loadu_epi16(lanes(count), p); }
static inline void store_halves(bf16 *p, long count, __m256i x) { _mm256_mask_storeu_epi16(p, lanes(count), x); }
static inline vec widened(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

#if SPD_PAIRS
static inline __m256i rounded(vec x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
/* To bfloat16, ties to even; NaN stays. */
static inline __m256i rounded(vec x)
{
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
}
#endif

static inline float vsum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float vtop(vec x) { return _mm512_reduce_max_ps(x); }
static inline float vfirst(vec x) { return _mm512_cvtss_f32(x); }
static inline vec vselect(mask m, vec yes, vec no) { return _mm512_mask_mov_ps(no, m, yes); }
static inline mask vmore(vec x, vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
static inline mask vdiffers(vec x, vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ); }
static inline int any_nan(vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

/* Which of the numbers first, first + 1, ... lie in low to last. */
static inline mask between(int32_t first, int32_t low, int32_t last)
{
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i own = _mm512_add_epi32(order, _mm512_set1_epi32(first));
    return _mm512_cmple_epi32_mask(own, _mm512_set1_epi32(last)) & _mm512_cmpge_epi32_mask(own, _mm512_set1_epi32(low));
}

static inline vec vnearest(vec x) { return _mm512_roundscale_ps(x, 0); }
static inline vec vbelow_infinity(vec x) { return x; }
static inline vec vscaled(vec x, vec power) { return _mm512_scalef_ps(x, power); }
static inline vec of_unsigned(const uint32_t *p) { return _mm512_cvtepu32_ps(_mm512_loadu_si512(p)); }

/* Of positive normal numbers: x = mantissa * 2^exponent, the mantissa from 1 to 2. */
static inline vec vexponent(vec x) { return _mm512_getexp_ps(x); }
static inline vec vmantissa(vec x) { return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }

#else

typedef struct {
    __m256 low, high;
} vec;
typedef vec mask;

#define BOTH(low, high) ((vec){low, high})
#define OF_TWO(name, op) \
    static inline vec name(vec x, vec y) { return BOTH(_mm256_##op(x.low, y.low), _mm256_##op(x.high, y.high)); }
#define OF_THREE(name, op) \
    static inline vec name(vec x, vec y, vec z) \
    { \
        return BOTH(_mm256_##op(x.low, y.low, z.low), _mm256_##op(x.high, y.high, z.high)); \
    }

/* Which of the numbers first, first + 1, ... lie in low to last. */
static inline mask between(int32_t first, int32_t low, int32_t last)
{
    const __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), eight = _mm256_set1_epi32(8);
    const __m256i least = _mm256_set1_epi32(low), most = _mm256_set1_epi32(last);
    __m256i a = _mm256_add_epi32(order, _mm256_set1_epi32(first)), b = _mm256_add_epi32(a, eight);
    __m256i not_a = _mm256_or_si256(_mm256_cmpgt_epi32(least, a), _mm256_cmpgt_epi32(a, most));
    __m256i not_b = _mm256_or_si256(_mm256_cmpgt_epi32(least, b), _mm256_cmpgt_epi32(b, most));
    const __m256i all = _mm256_set1_epi32(-1);
    return BOTH(_mm256_castsi256_ps(_mm256_xor_si256(not_a, all)), _mm256_castsi256_ps(_mm256_xor_si256(not_b, all)));
}

static inline mask lanes(long count) { return between(0, 0, count < SIDE ? (int32_t)count - 1 : SIDE); }

static inline mask mask_of(uint64_t bits)
{
    const __m256i first = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), second = _mm256_slli_epi32(first, 8);
    __m256i every = _mm256_set1_epi32((int32_t)bits);
    return BOTH(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(every, first), first)),
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(every, second), second)));
}

static inline vec vall(float x) { return BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vec vzero(void) { return BOTH(_mm256_setzero_ps(), _mm256_setzero_ps()); }

static inline vec loadf(const float *p, long count)
{
    float part[SIDE] = {0};
    if (count < SIDE) {
        if (count > 0) memcpy(part, p, (size_t)count * sizeof *p);
        p = part;
    }
    return BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}

static inline void storef(float *p, long count, vec x)
{
    float part[SIDE], *to = count < SIDE ? part : p;
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
    if (count < SIDE && count > 0) memcpy(p, part, (size_t)count * sizeof *p);
}

static inline __m256i halves(const bf16 *p, long count)
{
    bf16 part[SIDE] = {0};
    if (count < SIDE) {
        if (count > 0) memcpy(part, p, (size_t)count * sizeof *p);
        p = part;
    }
    return _mm256_loadu_si256((const __m256i *)p);
}

static inline void store_halves(bf16 *p, long count, __m256i x)
{
    bf16 part[SIDE];
    _mm256_storeu_si256((__m256i *)(count < SIDE ? part : p), x);
    if (count < SIDE && count > 0) memcpy(p, part, (size_t)count * sizeof *p);
}

static inline vec widened(__m256i x)
{
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
    return BOTH(_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}

/* To bfloat16 in the upper half, ties to even; NaN stays. */
static inline __m256i rounded_half(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    near = _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_srli_epi32(near, 16);
}

static inline __m256i rounded(vec x)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded_half(x.low), rounded_half(x.high)), 0xd8);
}

#define FOLD(name, op) \
    static inline float name(vec x) \
    { \
        __m256 eight = _mm256_##op(x.high, x.low); \
        __m128 four = _mm_##op(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight)); \
        __m128 two = _mm_##op(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op(two, _mm_movehdup_ps(two))); \
    }
FOLD(vsum, add_ps)
FOLD(vtop, max_ps)

static inline float vfirst(vec x) { return _mm256_cvtss_f32(x.low); }

static inline vec vselect(mask m, vec yes, vec no)
{
    return BOTH(_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high));
}

#define COMPARE(name, how) \
    static inline mask name(vec x, vec y) \
    { \
        return BOTH(_mm256_cmp_ps(x.low, y.low, how), _mm256_cmp_ps(x.high, y.high, how)); \
    }
COMPARE(vmore, _CMP_GT_OQ)
COMPARE(vdiffers, _CMP_NEQ_UQ)

static inline int any_nan(vec x)
{
    mask m = BOTH(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
    return _mm256_movemask_ps(_mm256_or_ps(m.low, m.high)) != 0;
}

static inline vec vnearest(vec x)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return BOTH(_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST));
}

/* So that a power of two that is too large is one that can be made; NaN stays. */
static inline vec vbelow_infinity(vec x)
{
    const __m256 most = _mm256_set1_ps(100.0f);
    return BOTH(_mm256_min_ps(most, x.low), _mm256_min_ps(most, x.high));
}

static inline __m256 scaled_half(__m256 x, __m256 power)
{
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i n = _mm256_cvtps_epi32(power), part = _mm256_srai_epi32(n, 1);
    __m256i rest = _mm256_add_epi32(_mm256_sub_epi32(n, part), bias);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(part, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(rest, 23)));
}

/* x * 2^power for whole powers from -126 to 252. */
static inline vec vscaled(vec x, vec power)
{
    return BOTH(scaled_half(x.low, power.low), scaled_half(x.high, power.high));
}

/* Both halves are exact in float32: their sum is rounded once. */
static inline __m256 of_unsigned_half(const uint32_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    __m256 lower = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0f), lower);
}

static inline vec of_unsigned(const uint32_t *p) { return BOTH(of_unsigned_half(p), of_unsigned_half(p + 8)); }

static inline __m256 exponent_half(__m256 x)
{
    __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)));
}

static inline __m256 mantissa_half(__m256 x)
{
    x = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffff)));
    return _mm256_or_ps(x, _mm256_set1_ps(1.0f));
}

/* Of positive normal numbers: x = mantissa * 2^exponent, the mantissa from 1 to 2. */
static inline vec vexponent(vec x) { return BOTH(exponent_half(x.low), exponent_half(x.high)); }
static inline vec vmantissa(vec x) { return BOTH(mantissa_half(x.low), mantissa_half(x.high)); }

#endif

OF_TWO(vadd, add_ps)
OF_TWO(vsub, sub_ps)
OF_TWO(vmul, mul_ps)
OF_TWO(vdiv, div_ps)
OF_TWO(vmin, min_ps)
OF_TWO(vmax, max_ps)
OF_THREE(vfma, fmadd_ps)
OF_THREE(vfnma, fnmadd_ps)

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
static inline vec exponential(vec x)
{
    x = vbelow_infinity(vmax(vall(-87.0f), x));
    vec n = vnearest(vmul(x, vall(1.44269504f)));
    vec r = vfnma(n, vall(0.693359375f), x);
    r = vfnma(n, vall(-2.12194440e-4f), r);
    vec p = vall(1.9875691500e-4f);
    p = vfma(p, r, vall(1.3981999507e-3f));
    p = vfma(p, r, vall(8.3334519073e-3f));
    p = vfma(p, r, vall(4.1665795894e-2f));
    p = vfma(p, r, vall(1.6666665459e-1f));
    p = vfma(p, r, vall(5.0000001201e-1f));
    p = vadd(vfma(vmul(p, r), r, r), vall(1.0f));
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
