/* Sixteen float32 lanes as two registers of AVX2, with FMA. */

typedef struct {
    __m256 q[2];
} vec;
typedef struct {
    __m256i q[2];
} ints;
typedef vec mask;
typedef __m256i half_vec;

#define OF_TWO(name, op) EACH(vec, name, _mm256_##op(x.q[i], y.q[i]), vec x, vec y)
#define OF_THREE(name, op) EACH(vec, name, _mm256_##op(x.q[i], y.q[i], z.q[i]), vec x, vec y, vec z)

static inline __m256 eight_between(int32_t first, int32_t low, int32_t last)
{
    __m256i own = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), own), above = _mm256_cmpgt_epi32(own, _mm256_set1_epi32(last));
    return _mm256_castsi256_ps(_mm256_xor_si256(_mm256_or_si256(below, above), _mm256_set1_epi32(-1)));
}
EACH(mask, between, eight_between(first + 8 * i, low, last), int32_t first, int32_t low, int32_t last)
static inline __m256 eight_bits(uint64_t bits)
{
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)bits), each), each));
}
EACH(mask, mask_of, eight_bits(bits >> 8 * i), uint64_t bits)

EACH(vec, vall, _mm256_set1_ps(x), float x)
EACH(vec, load_all, _mm256_loadu_ps(p + 8 * i), const float *p)
EACH_TO(store_all, _mm256_storeu_ps(p + 8 * i, x.q[i]), float *p, vec x)
static inline half_vec load_halves(const bf16 *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void save_halves(bf16 *p, half_vec x) { _mm256_storeu_si256((__m256i *)p, x); }

static inline __m256 eight_widened(__m128i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
EACH(vec, widened, eight_widened(i ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x)), half_vec x)

/* To bfloat16 in the lower half, ties to even; NaN stays. */
static inline __m256i eight_rounded(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    near = _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_srli_epi32(near, 16);
}
static inline half_vec rounded(vec x)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(eight_rounded(x.q[0]), eight_rounded(x.q[1])), 0xd8);
}

/* Sixteen codes as numbers, and 32 of them as bfloat16, which holds them exactly. */
static inline __m256 eight_codes(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
EACH(vec, of_codes, eight_codes(p + 8 * i), const int8_t *p)
INLINE void widen_codes(bf16 *to, const int8_t *from)
{
    for (int i = 0; i < 2; i++) {
        vec x = of_codes(from + i * SIDE);
        __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.q[0]), 16);
        __m256i high = _mm256_srli_epi32(_mm256_castps_si256(x.q[1]), 16);
        save_halves(to + i * SIDE, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
    }
}

#define FOLD(name, op) \
    static inline float name(vec x) \
    { \
        __m256 eight = _mm256_##op(x.q[1], x.q[0]); \
        __m128 four = _mm_##op(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight)); \
        __m128 two = _mm_##op(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op(two, _mm_movehdup_ps(two))); \
    }
FOLD(vsum, add_ps)
FOLD(vtop, max_ps)
static inline float vfirst(vec x) { return _mm256_cvtss_f32(x.q[0]); }

EACH(vec, vselect, _mm256_blendv_ps(no.q[i], yes.q[i], m.q[i]), mask m, vec yes, vec no)
EACH(mask, vmore, _mm256_cmp_ps(x.q[i], y.q[i], _CMP_GT_OQ), vec x, vec y)
EACH(mask, vdiffers, _mm256_cmp_ps(x.q[i], y.q[i], _CMP_NEQ_UQ), vec x, vec y)
static inline int any_nan(vec x)
{
    mask m = vdiffers(x, x);
    return _mm256_movemask_ps(_mm256_or_ps(m.q[0], m.q[1])) != 0;
}

EACH(vec, vnearest, _mm256_round_ps(x.q[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), vec x)
EACH(vec, vbelow_infinity, _mm256_min_ps(_mm256_set1_ps(100.0f), x.q[i]), vec x)
static inline __m256 eight_scaled(__m256 x, __m256 power)
{
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i n = _mm256_cvtps_epi32(power), part = _mm256_srai_epi32(n, 1);
    __m256i rest = _mm256_add_epi32(_mm256_sub_epi32(n, part), bias);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(part, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(rest, 23)));
}
EACH(vec, vscaled, eight_scaled(x.q[i], power.q[i]), vec x, vec power)

EACH(ints, loadi, _mm256_loadu_si256((const __m256i *)p + i), const void *p)
EACH_TO(storei, _mm256_storeu_si256((__m256i *)p + i, x.q[i]), void *p, ints x)
EACH(ints, right, _mm256_srli_epi32(x.q[i], (int)n), ints x, unsigned n)
EACH(ints, left_by, _mm256_slli_epi32(x.q[i], (int)n), ints x, unsigned n)
EACH(ints, masked, _mm256_and_si256(x.q[i], _mm256_set1_epi32(bits)), ints x, int32_t bits)
EACH(ints, either, _mm256_or_si256(x.q[i], y.q[i]), ints x, ints y)
EACH(ints, plus, _mm256_add_epi32(x.q[i], _mm256_set1_epi32(n)), ints x, int32_t n)
EACH(vec, of_ints, _mm256_cvtepi32_ps(x.q[i]), ints x)
EACH(vec, as_vec, _mm256_castsi256_ps(x.q[i]), ints x)
EACH(ints, as_ints, _mm256_castps_si256(x.q[i]), vec x)
static inline __m256 eight_of_bytes(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
EACH(vec, of_bytes, eight_of_bytes(p + 8 * i), const uint8_t *p)
static inline __m256 eight_of_table(const float *table, __m256i x)
{
    __m256 below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), x);
    __m256 above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), x);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}
EACH(vec, of_table, eight_of_table(table, x.q[i]), const float *table, ints x)

/* Bytes of lanes: see vector.h. */
EACH(ints, alli, _mm256_set1_epi32(x), int32_t x)
EACH(ints, bytes_less, _mm256_sub_epi8(x.q[i], y.q[i]), ints x, ints y)
/* Where bytes of lanes come from: of the lanes' upper byte the byte n, of the others none. */
static inline const __m256i *upper_places(void)
{
#define FOUR_OF(n) -1, -1, -1, n, -1, -1, -1, (n) + 4, -1, -1, -1, (n) + 8, -1, -1, -1, (n) + 12
    static const int8_t places[4][32] __attribute__((aligned(32))) = {
        {FOUR_OF(0), FOUR_OF(0)}, {FOUR_OF(1), FOUR_OF(1)}, {FOUR_OF(2), FOUR_OF(2)}, {FOUR_OF(3), FOUR_OF(3)}};
#undef FOUR_OF
    const __m256i *found = (const __m256i *)places;
    __asm__("" : "+r"(found)); /* registers do not suffice for them */
    return found;
}
EACH(ints, upper_byte, n ? _mm256_shuffle_epi8(x.q[i], places[n]) : _mm256_slli_epi32(x.q[i], 24), ints x, const int n, const __m256i *places)
#define UPPER_BYTES 1
EACH(ints, times, _mm256_mullo_epi32(x.q[i], y.q[i]), ints x, ints y)
EACH(ints, flipped, _mm256_xor_si256(x.q[i], _mm256_set1_epi32(bits)), ints x, int32_t bits)
EACH(ints, nearest_ints, _mm256_cvtps_epi32(x.q[i]), vec x)
static inline void save_bytes(int8_t *p, ints x)
{
    __m256i halves_of = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.q[0], x.q[1]), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves_of), _mm256_extracti128_si256(halves_of, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
static inline __m256i table_twice(const int8_t *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}
EACH(ints, bytes_of_table, _mm256_shuffle_epi8(table_twice(table), x.q[i]), const int8_t *table, ints x)
enum { SIGNED_BYTES = 1, EXACT_PARTS = 0 };
EACH(ints, begun, ((void)sum, _mm256_setzero_si256()), ints sum)
EACH(ints, ended, _mm256_add_epi32(sum.q[i], _mm256_madd_epi16(part.q[i], _mm256_set1_epi16(1))), ints sum, ints part)
/* Four bytes, in every lane. */
static inline __m256i all_four(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}
INLINE __m256i eight_dot(__m256i part, __m256i bytes, __m256i four, const int is_signed)
{
    if (is_signed) {
        four = _mm256_sign_epi8(four, bytes);
        bytes = _mm256_abs_epi8(bytes);
    }
    return _mm256_add_epi16(part, _mm256_maddubs_epi16(bytes, four));
}
EACH(ints, dot, eight_dot(part.q[i], bytes.q[i], all_four(four), is_signed), ints part, ints bytes, const int8_t *four, const int is_signed)
