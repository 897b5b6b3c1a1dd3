/* Products with codes of four bits by AVX2: of whole numbers, which sum exactly.

   Of each 32 elements of a row the largest has an exponent; all are counted in units of 2**-21 of that power, which
   bfloat16 fits into unless it is below 2**-14 of the largest. Such a number is three digits of eight bits with their
   signs. Products of codes and digits are summed exactly over a step or half of one, and the sum is rounded once to
   float32; steps are scaled and added in ascending order. A step with an element that is not finite makes NaN. */

enum { SUM = 3, UNIT = 27, FEW = 4 };

/* What lies in place of a row's 32 floats of a step: lane 4 z + t holds digit t at depths 4 z, 4 z + 2, 4 z + 1, 4 z + 3.
   The last of each four lanes hold the sums of the numbers of the step's halves, at SUM and SUM + 16, and the unit. */
static void into_digits(float *step)
{
    const __m256i order = _mm256_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, -1, -1, -1, -1, 2, 10, 6, 14, 1, 9, 5,
        13, 0, 8, 4, 12, -1, -1, -1, -1);
    const __m256i bias = _mm256_set1_epi32(0x8080);
    vec a = loadf(step, SIDE), b = loadf(step + SIDE, SIDE), no = vadd(vsub(a, a), vsub(b, b));
    __m256 parts[4] = {a.q[0], a.q[1], b.q[0], b.q[1]};
    float most = vtop(vmax(as_vec(masked(as_ints(a), INT32_MAX)), as_vec(masked(as_ints(b), INT32_MAX))));
    int32_t bits, *lanes = (int32_t *)step;
    memcpy(&bits, &most, sizeof bits);
    int exponent = (bits >> 23) - 127;
    if (exponent < -100) exponent = -100;
    int32_t power = (21 - exponent + 127) << 23, unit = (exponent - 21 + 127) << 23;
    float grown;
    memcpy(&grown, &power, sizeof grown);
    for (int half = 0; half < 2; half++) {
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < 2; i++) {
            __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(parts[2 * half + i], _mm256_set1_ps(grown)));
            sum = _mm256_add_epi32(sum, n);
            n = _mm256_shuffle_epi8(_mm256_xor_si256(_mm256_add_epi32(n, bias), bias), order);
            _mm256_storeu_si256((__m256i *)step + 2 * half + i, n);
        }
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        four = _mm_hadd_epi32(four, four);
        lanes[SUM + SIDE * half] = _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
    }
    lanes[UNIT] = any_nan(no) ? INT32_MAX : unit;
}

/* Codes of eight columns of one side at four depths. Those of E2M1 become 12 and twice the number: not negative. */
INLINE __m256i codes_at(const uint8_t *codes, const int kind, const int side)
{
    const __m128i e2m1 = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    __m256i x = _mm256_loadu_si256((const __m256i *)codes);
    x = _mm256_and_si256(side ? _mm256_srli_epi32(x, 4) : x, _mm256_set1_epi8(15));
    return kind == E2M1 ? _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(e2m1), x) : x;
}

/* Sums of a row's digits with eight columns, in lanes of 16 bits. */
typedef struct {
    __m256i high, middle, low;
} Sums;

static inline __m256 eight_of(const bf16 *p)
{
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

static inline __m256i all_of(const int32_t *p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)p)); }

/* They are added at once: registers do not suffice where the compiler waits. */
INLINE void add_digits(Sums *s, __m256i codes, const int32_t *row)
{
    s->high = _mm256_add_epi16(s->high, _mm256_maddubs_epi16(codes, all_of(row)));
    s->middle = _mm256_add_epi16(s->middle, _mm256_maddubs_epi16(codes, all_of(row + 1)));
    s->low = _mm256_add_epi16(s->low, _mm256_maddubs_epi16(codes, all_of(row + 2)));
    __asm__("" : "+x"(s->high), "+x"(s->middle), "+x"(s->low));
}

/* Add sums, less the zero points' share, scaled, to c [8]. */
INLINE void end_sums(Sums s, __m256i zeros, __m256 scales, float *c)
{
    const __m256i one = _mm256_set1_epi16(1), more = _mm256_set1_epi16(256);
    __m256i low = _mm256_add_epi32(_mm256_madd_epi16(s.middle, more), _mm256_madd_epi16(s.low, one));
    low = _mm256_sub_epi32(low, zeros);
    __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(s.high, one), 16), low));
    _mm256_storeu_ps(c, _mm256_fmadd_ps(sum, scales, _mm256_loadu_ps(c)));
}

/* Of a row with eight columns of a step or, from depths 4 first on, half of one: both sides, to c [32]. at: where their
   scales and zeros are. 16 bits hold a whole step's sums of INT4, and half a step's of E2M1. */
INLINE void multiply_columns(const float *row, const Weight *w, const int kind,
    const uint8_t *codes, long at, const int first, const int last, float *c)
{
    __asm__ volatile("" : : : "memory"); /* registers do not suffice for what was read before */
    const int32_t *digits = (const int32_t *)row;
    const int32_t rest = last - first > 4 ? digits[SUM] + digits[SUM + SIDE] : digits[SUM + 4 * first];
    const __m256 unit = _mm256_set1_ps(kind == E2M1 ? 0.5f * row[UNIT] : row[UNIT]);
    Sums sums[2] = {0};
#pragma GCC unroll 8
    for (int z = first; z < last; z++)
        for (int side = 0; side < 2; side++)
            add_digits(&sums[side], codes_at(codes + z * LANES, kind, side), digits + 4 * z);
    for (int side = 0; side < 2; side++, at += SIDE, c += SIDE) {
        __m256i zeros = _mm256_set1_epi32(kind == E2M1 ? 12 : 8);
        if (w->zeros) zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(w->zeros + at)));
        __m256 scales = w->scale_kind == FLOAT32 ? _mm256_loadu_ps((const float *)w->scales + at) : eight_of((const bf16 *)w->scales + at);
        end_sums(sums[side], _mm256_mullo_epi32(zeros, _mm256_set1_epi32(rest)), _mm256_mul_ps(scales, unit), c);
    }
}

/* Of `rows`, `apart` from a on, with codes of one block: c [rows][32]. at: the block's first group. */
INLINE void codes_rows(
    const float *a, long apart, long rows, const Weight *w, const int kind, const uint8_t *codes, long at, float *c)
{
    const long last = at + w->groups, halved = w->group < DEPTH;
    memset(c, 0, (size_t)(rows * WIDTH) * sizeof *c);
    for (long k = 0, depth = 0; k < w->steps; k++, codes += 8 * LANES, a += LEFT_STEP) {
        for (int z = 0; z < 8; z++) _mm_prefetch((const char *)codes + z * LANES + 4096, _MM_HINT_T0);
        for (long r = 0; r < rows; r++)
#pragma GCC unroll 1
            for (int column = 0; column < SIDE; column += 8) {
                const float *row = a + r * apart;
                const uint8_t *own = codes + column * 4;
                float *to = c + r * WIDTH + column;
                long place = at * WIDTH + column;
                if (kind == INT4 && !halved) {
                    multiply_columns(row, w, kind, own, place, 0, 8, to);
                    continue;
                }
                multiply_columns(row, w, kind, own, place, 0, 4, to);
                if (!halved || at + 1 < last)
                    multiply_columns(row, w, kind, own, place + halved * WIDTH, 4, 8, to);
            }
        depth += DEPTH;
        if (depth >= w->group) at += 1 + halved, depth = 0;
    }
}

/* Rows `top` on, `count` of them, of a left side: c [count][32]. at: the block's first group. A few rows at a time read
   a step's codes while the first cache has them. */
static void codes_product(
    Rows from_rows, long top, long count, const Weight *w, const uint8_t *codes, long at, float *c)
{
    const float *left = from_rows.left;
    const long apart = w->steps * LEFT_STEP;
    for (long r = 0, rows; r < count; r += rows, c += rows * WIDTH) {
        const float *a = left + left_row(top + r, w->steps);
        rows = count - r < FEW ? count - r : FEW;
        if (w->kind == INT4) codes_rows(a, apart, rows, w, INT4, codes, at, c);
        else codes_rows(a, apart, rows, w, E2M1, codes, at, c);
    }
}
