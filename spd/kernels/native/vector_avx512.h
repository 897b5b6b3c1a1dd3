/* Sixteen float32 lanes as one register of AVX512. */

typedef __m512 vec;
typedef __mmask16 mask;

#define OF_TWO(name, op) static inline vec name(vec x, vec y) { return _mm512_##op(x, y); }
#define OF_THREE(name, op) static inline vec name(vec x, vec y, vec z) { return _mm512_##op(x, y, z); }

static inline mask lanes(long count) { return count >= SIDE ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0; }

static inline mask mask_of(uint64_t bits) { return (__mmask16)bits; }
static inline vec vall(float x) { return _mm512_set1_ps(x); }
static inline vec vzero(void) { return _mm512_setzero_ps(); }
static inline vec loadf(const float *p, long count) { return _mm512_maskz_loadu_ps(lanes(count), p); }
static inline void storef(float *p, long count, vec x) { _mm512_mask_storeu_ps(p, lanes(count), x); }
static inline __m256i halves(const bf16 *p, long count) { return _mm256_maskz_loadu_epi16(lanes(count), p); }
static inline void store_halves(bf16 *p, long count, __m256i x) { _mm256_mask_storeu_epi16(p, lanes(count), x); }
static inline vec widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

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

/* Sixteen codes as numbers, and 32 of them as bfloat16, which holds them exactly. */
static inline vec of_codes(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void widen_codes(bf16 *to, const int8_t *from)
{
#if SPD_PAIRS
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(of_codes(from + SIDE), of_codes(from)));
#else
    for (int i = 0; i < 2; i++) {
        __m512i bits = _mm512_castps_si512(of_codes(from + i * SIDE));
        _mm256_storeu_si256((__m256i *)to + i, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
#endif
}

#if SPD_PAIRS
/* Codes of 16 columns at one depth, and of the same at the next, as pairs of bfloat16. */
INLINE __m512i pairs_of_codes(const int8_t *p)
{
    __m512i first = _mm512_castps_si512(of_codes(p)), second = _mm512_castps_si512(of_codes(p + SIDE));
    return _mm512_mask_mov_epi16(second, 0x55555555, _mm512_srli_epi32(first, 16));
}
#endif

static inline float vsum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float vtop(vec x) { return _mm512_reduce_max_ps(x); }
static inline float vfirst(vec x) { return _mm512_cvtss_f32(x); }
static inline vec vselect(mask m, vec yes, vec no) { return _mm512_mask_mov_ps(no, m, yes); }
static inline mask vmore(vec x, vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
static inline mask vdiffers(vec x, vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ); }
static inline int any_nan(vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

static inline mask between(int32_t first, int32_t low, int32_t last)
{
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i own = _mm512_add_epi32(order, _mm512_set1_epi32(first));
    return _mm512_cmple_epi32_mask(own, _mm512_set1_epi32(last)) & _mm512_cmpge_epi32_mask(own, _mm512_set1_epi32(low));
}

static inline vec vnearest(vec x) { return _mm512_roundscale_ps(x, 0); }
static inline vec vbelow_infinity(vec x) { return x; }
static inline vec vscaled(vec x, vec power) { return _mm512_scalef_ps(x, power); }

static inline vec vexponent(vec x) { return _mm512_getexp_ps(x); }
static inline vec vmantissa(vec x) { return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src); }

typedef __m512i ints;
static inline ints loadi(const void *p) { return _mm512_loadu_si512(p); }
static inline ints right(ints x, unsigned n) { return _mm512_srli_epi32(x, n); }
static inline ints left_by(ints x, unsigned n) { return _mm512_slli_epi32(x, n); }
static inline ints masked(ints x, int32_t bits) { return _mm512_and_si512(x, _mm512_set1_epi32(bits)); }
static inline ints either(ints x, ints y) { return _mm512_or_si512(x, y); }
static inline ints plus(ints x, int32_t n) { return _mm512_add_epi32(x, _mm512_set1_epi32(n)); }
static inline vec of_ints(ints x) { return _mm512_cvtepi32_ps(x); }
static inline vec as_vec(ints x) { return _mm512_castsi512_ps(x); }
static inline ints as_ints(vec x) { return _mm512_castps_si512(x); }
static inline void storei(void *p, ints x) { _mm512_storeu_si512(p, x); }
static inline vec of_bytes(const uint8_t *p)
{
    return of_ints(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vec of_table(const float *table, ints x) { return _mm512_permutexvar_ps(x, _mm512_loadu_ps(table)); }

/* Sums of products of bytes: see vector.h. */
static inline ints alli(int32_t x) { return _mm512_set1_epi32(x); }
static inline ints times(ints x, ints y) { return _mm512_mullo_epi32(x, y); }
static inline ints flipped(ints x, int32_t bits) { return _mm512_xor_si512(x, _mm512_set1_epi32(bits)); }
static inline ints nearest_ints(vec x) { return _mm512_cvtps_epi32(x); }
static inline void save_bytes(int8_t *p, ints x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
static inline ints bytes_of_table(const int8_t *table, ints x)
{
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), x);
}
/* Four bytes, in every lane. */
static inline ints four_of(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
enum { MOST_INT8_ROWS = 8 };
#if SPD_VNNI
enum { SIGNED_BYTES = 0, EXACT_PARTS = 1 };
INLINE ints begun(ints sum) { return sum; }
INLINE ints ended(ints sum, ints part) { return (void)sum, part; }
INLINE ints dot(ints part, ints bytes, const int8_t *four, const int is_signed)
{
    (void)is_signed; /* compilers would keep what they broadcast, for which registers do not suffice */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(part) : "v"(bytes), "m"(*(const int32_t(*)[1])four));
    return part;
}
#else
enum { SIGNED_BYTES = 1, EXACT_PARTS = 0 };
INLINE ints begun(ints sum) { return (void)sum, _mm512_setzero_si512(); }
INLINE ints ended(ints sum, ints part)
{
    return _mm512_add_epi32(sum, _mm512_madd_epi16(part, _mm512_set1_epi16(1)));
}
INLINE ints dot(ints part, ints bytes, const int8_t *numbers, const int is_signed)
{
    ints four = four_of(numbers);
    if (is_signed) {
        four = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), four);
        bytes = _mm512_abs_epi8(bytes);
    }
    return _mm512_add_epi16(part, _mm512_maddubs_epi16(bytes, four));
}
#endif
