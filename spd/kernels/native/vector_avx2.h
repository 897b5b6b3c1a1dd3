/* Sixteen float32 lanes as two registers of AVX2, with FMA. */

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

static inline mask mask_of(uint64_t bits)
{
    const __m256i first = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), second = _mm256_slli_epi32(first, 8);
    __m256i every = _mm256_set1_epi32((int32_t)bits);
    return BOTH(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(every, first), first)),
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(every, second), second)));
}

static inline vec vall(float x) { return BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vec vzero(void) { return BOTH(_mm256_setzero_ps(), _mm256_setzero_ps()); }

static inline vec load_all(const float *p) { return BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void store_all(float *p, vec x)
{
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
typedef __m256i half_vec;
static inline half_vec load_halves(const bf16 *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void save_halves(bf16 *p, half_vec x) { _mm256_storeu_si256((__m256i *)p, x); }

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
    mask m = vdiffers(x, x);
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

/* Lanes of whole numbers. */
typedef struct {
    __m256i low, high;
} ints;
#define EACH(op, x, ...) ((ints){op((x).low, __VA_ARGS__), op((x).high, __VA_ARGS__)})
static inline ints loadi(const void *p)
{
    return (ints){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
static inline ints right(ints x, unsigned n) { return EACH(_mm256_srli_epi32, x, (int)n); }
static inline ints left_by(ints x, unsigned n) { return EACH(_mm256_slli_epi32, x, (int)n); }
static inline ints masked(ints x, int32_t bits) { return EACH(_mm256_and_si256, x, _mm256_set1_epi32(bits)); }
static inline ints either(ints x, ints y)
{
    return (ints){_mm256_or_si256(x.low, y.low), _mm256_or_si256(x.high, y.high)};
}
static inline ints plus(ints x, int32_t n) { return EACH(_mm256_add_epi32, x, _mm256_set1_epi32(n)); }
static inline vec of_ints(ints x) { return BOTH(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)); }
static inline vec as_vec(ints x) { return BOTH(_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)); }
static inline ints as_ints(vec x) { return (ints){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
static inline void storei(void *p, ints x)
{
    _mm256_storeu_si256(p, x.low);
    _mm256_storeu_si256((__m256i *)p + 1, x.high);
}
static inline vec of_bytes(const uint8_t *p)
{
    return of_ints((ints){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))});
}
static inline __m256 of_half_table(const float *table, __m256i x)
{
    __m256 below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), x);
    __m256 above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), x);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}
static inline vec of_table(const float *table, ints x)
{
    return BOTH(of_half_table(table, x.low), of_half_table(table, x.high));
}

static inline __m256 folded(vec x) { return _mm256_add_ps(x.low, x.high); }
