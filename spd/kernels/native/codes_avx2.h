/* Products with codes of four bits by AVX2: of whole numbers, which sum exactly.

   Of each 32 elements of a row the largest has an exponent; all are counted in units of 2**-21 of that power, which
   bfloat16 fits into unless it is below 2**-14 of the largest. Such a number is three digits of eight bits with their
   signs. Products of codes and digits are summed exactly over a step or half of one, and the sum is rounded once to
   float32; steps are scaled and added in ascending order. A step with an element that is not finite makes NaN. */

enum { DIGITS = 3, UNIT = 27 };

/* What lies in place of a row's 32 floats of a step: lane 4 z + t holds digit t at depths 4 z, 4 z + 2, 4 z + 1, 4 z + 3.
   The last of each four lanes hold minus the digits' sums, even depths and odd, of the step's halves: 4 (3 h + t) + 3,
   and the unit. */
static void into_digits(float *step)
{
    const __m256i order = _mm256_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, -1, -1, -1, -1, 2, 10, 6, 14, 1, 9, 5,
        13, 0, 8, 4, 12, -1, -1, -1, -1);
    const __m256i bias = _mm256_set1_epi32(0x8080), sign = _mm256_set1_epi32(INT32_MAX);
    vec a = loadf(step, SIDE), b = loadf(step + SIDE, SIDE), no = vadd(vsub(a, a), vsub(b, b));
    __m256 parts[4] = {a.low, a.high, b.low, b.high}, all = _mm256_castsi256_ps(sign);
    float most = vtop(vmax(BOTH(_mm256_and_ps(a.low, all), _mm256_and_ps(a.high, all)),
        BOTH(_mm256_and_ps(b.low, all), _mm256_and_ps(b.high, all))));
    int32_t bits, sums[4], *lanes = (int32_t *)step;
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
            n = _mm256_shuffle_epi8(_mm256_xor_si256(_mm256_add_epi32(n, bias), bias), order);
            _mm256_storeu_si256((__m256i *)step + 2 * half + i, n);
            sum = _mm256_sub_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), n));
        }
        _mm_storeu_si128((__m128i *)sums, _mm_add_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
        for (int t = 0; t < DIGITS; t++) lanes[4 * (DIGITS * half + t) + 3] = sums[t];
    }
    lanes[UNIT] = any_nan(no) ? INT32_MAX : unit;
}

/* Eight columns, from `column` on, of both sides of a step or half of one: depths 4 first to 4 last. `at`: their group. */
typedef struct {
    const Weight *weight;
    const uint8_t *codes;
    long at;
    int column, kind, first, last;
} Columns;

/* Codes of one side at four depths. Those of E2M1 become 12 and twice the number, so that it is not negative. */
static inline __m256i codes_at(Columns own, int side, int z)
{
    const __m128i e2m1 = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    __m256i x = _mm256_loadu_si256((const __m256i *)(own.codes + z * LANES));
    x = _mm256_and_si256(side ? _mm256_srli_epi32(x, 4) : x, _mm256_set1_epi8(15));
    return own.kind == E2M1 ? _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(e2m1), x) : x;
}

/* Sums of a row's digits with eight columns, in lanes of 16 bits. */
typedef struct {
    __m256i high, middle, low;
} Sums;

/* Minus the zero points' share. */
static inline __attribute__((always_inline)) Sums begin_sums(Columns own, const int32_t *row, int side)
{
    __m256i zeros = _mm256_set1_epi16(own.kind == E2M1 ? 12 : 8), sums[DIGITS];
    if (own.weight->zeros) {
        const uint8_t *p = own.weight->zeros + own.at * WIDTH + side * SIDE + own.column;
        zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
        zeros = _mm256_or_si256(zeros, _mm256_slli_epi32(zeros, 16));
    }
#pragma GCC unroll 3
    for (int t = 0; t < DIGITS; t++) {
        sums[t] = _mm256_set1_epi32(row[3 * own.first + 4 * t + 3]);
        if (own.last - own.first > 4) sums[t] = _mm256_add_epi16(sums[t], _mm256_set1_epi32(row[4 * (DIGITS + t) + 3]));
        sums[t] = _mm256_mullo_epi16(sums[t], zeros);
    }
    return (Sums){sums[0], sums[1], sums[2]};
}

static inline __m256i all_of(const int32_t *p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)p)); }

/* They are added at once: registers do not suffice where the compiler waits. */
static inline __attribute__((always_inline)) void add_digits(Sums *s, __m256i codes, const int32_t *row)
{
    s->high = _mm256_add_epi16(s->high, _mm256_maddubs_epi16(codes, all_of(row)));
    s->middle = _mm256_add_epi16(s->middle, _mm256_maddubs_epi16(codes, all_of(row + 1)));
    s->low = _mm256_add_epi16(s->low, _mm256_maddubs_epi16(codes, all_of(row + 2)));
    __asm__("" : "+x"(s->high), "+x"(s->middle), "+x"(s->low));
}

/* Add sums, scaled, to c [8]. */
static inline __attribute__((always_inline)) void end_sums(Columns own, Sums s, const float *row, int side, float *c)
{
    const __m256i one = _mm256_set1_epi16(1), more = _mm256_set1_epi16(256);
    __m256i low = _mm256_add_epi32(_mm256_madd_epi16(s.middle, more), _mm256_madd_epi16(s.low, one));
    __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(s.high, one), 16), low));
    vec scales = scales_of(own.weight, own.at, side);
    __m256 unit = _mm256_set1_ps(own.kind == E2M1 ? 0.5f * row[UNIT] : row[UNIT]);
    unit = _mm256_mul_ps(own.column ? scales.high : scales.low, unit);
    _mm256_storeu_ps(c, _mm256_fmadd_ps(sum, unit, _mm256_loadu_ps(c)));
}

/* Two at a time, for whose sums there are registers: row a with one side to c, row b with one to d. */
static inline __attribute__((always_inline)) void multiply_two(
    Columns own, const float *a, int side, float *c, const float *b, int other, float *d)
{
    const int32_t *row = (const int32_t *)a, *next = (const int32_t *)b;
    __asm__("" : "+r"(row)); /* nor for digits that the compiler would keep for the next columns */
    if (a == b) next = row;
    Sums s = begin_sums(own, row, side), t = begin_sums(own, next, other);
    for (int z = own.first; z < own.last; z++) {
        add_digits(&s, codes_at(own, side, z), row + 4 * z);
        add_digits(&t, codes_at(own, other, z), next + 4 * z);
    }
    end_sums(own, s, a, side, c);
    end_sums(own, t, b, other, d);
}

/* Of one row or two, `apart` from a on, with codes of one block: c [rows][32]. at: the block's first group. */
static inline __attribute__((always_inline)) void codes_rows(const float *a, long apart, const int rows, const Weight *w,
    const int kind, const uint8_t *codes, long at, float *c)
{
    const int deep = w->group < DEPTH ? 4 : 8;
    const long last = at + w->groups;
    memset(c, 0, (size_t)rows * WIDTH * sizeof *c);
    for (long k = 0, depth = 0; k < w->steps; k++, codes += 8 * LANES, a += LEFT_STEP) {
        for (int z = 0; z < 8; z++) _mm_prefetch((const char *)codes + z * LANES + 2048, _MM_HINT_T0);
        for (int z = 0; z < 8 && at < last; z += deep) {
#pragma GCC unroll 1
            for (int column = 0; column < SIDE; column += 8) {
                const Columns own = {w, codes + column * 4, at, column, kind, z, z + deep};
                float *to = c + column, *right = to + SIDE;
                if (rows == 1) multiply_two(own, a, 0, to, a, 1, right);
                if (rows > 1) multiply_two(own, a, 0, to, a + apart, 0, to + WIDTH);
                if (rows > 1) multiply_two(own, a, 1, right, a + apart, 1, right + WIDTH);
            }
            depth += 4 * deep;
            if (depth >= w->group) depth = 0, at++;
        }
    }
}

/* Rows `top` on, `count` of them, of a left side: c [count][32]. at: the block's first group. */
static void codes_product(
    const float *left, long top, long count, const Weight *w, const uint8_t *codes, long at, float *c)
{
    const long apart = w->steps * LEFT_STEP;
    for (long r = 0; r < count; r += 2, c += 2 * WIDTH) {
        const float *a = left + left_row(top + r, w->steps);
        if (w->kind == INT4 && r + 1 < count) codes_rows(a, apart, 2, w, INT4, codes, at, c);
        else if (w->kind == INT4) codes_rows(a, apart, 1, w, INT4, codes, at, c);
        else if (r + 1 < count) codes_rows(a, apart, 2, w, E2M1, codes, at, c);
        else codes_rows(a, apart, 1, w, E2M1, codes, at, c);
    }
}
