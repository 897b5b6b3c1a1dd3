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
    int32_t bits, sums[2][4], *lanes = (int32_t *)step;
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
        _mm_storeu_si128((__m128i *)sums[half],
            _mm_add_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    }
    for (int half = 0; half < 2; half++)
        for (int t = 0; t < DIGITS; t++) lanes[4 * (DIGITS * half + t) + 3] = sums[half][t];
    lanes[UNIT] = any_nan(no) ? INT32_MAX : unit;
}

/* Zero points of eight columns, each twice. */
static inline __m256i zeros_of(const uint8_t *p)
{
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
}

/* Of one row or two, `apart` from a on, with eight columns of both sides of a step or half of one, `at` its group: sums
   of digits, from minus the zero points' share. */
static inline __attribute__((always_inline)) void sum_digits(const float *a, long apart, const int rows, const Weight *w,
    const int kind, const uint8_t *codes, long at, int half, int whole, int column, __m256i (*sums)[2][DIGITS])
{
    const __m256i low = _mm256_set1_epi8(15);
    /* 12 and twice the number, so that it is not negative */
    const __m256i e2m1 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    __m256i zeros[2] = {_mm256_set1_epi16(kind == E2M1 ? 12 : 8), _mm256_set1_epi16(kind == E2M1 ? 12 : 8)};
    for (int side = 0; w->zeros && side < 2; side++)
        zeros[side] = zeros_of(w->zeros + at * WIDTH + side * SIDE + column);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < DIGITS; t++) {
            const int32_t *minus = (const int32_t *)(a + r * apart) + 4 * t + 3;
            __m256i sum = _mm256_set1_epi32(minus[4 * DIGITS * half]);
            if (whole) sum = _mm256_add_epi16(sum, _mm256_set1_epi32(minus[4 * DIGITS]));
            for (int side = 0; side < 2; side++) sums[r][side][t] = _mm256_mullo_epi16(sum, zeros[side]);
        }
    for (int z = 4 * half; z < (whole ? 8 : 4 * half + 4); z++) {
        const uint8_t *lane = codes + z * LANES + column * 4;
        __m256i x = _mm256_loadu_si256((const __m256i *)lane), y = _mm256_srli_epi32(x, 4);
        if (!column) _mm_prefetch((const char *)lane + 4096, _MM_HINT_T0);
        x = _mm256_and_si256(x, low), y = _mm256_and_si256(y, low);
        if (kind == E2M1) x = _mm256_shuffle_epi8(e2m1, x), y = _mm256_shuffle_epi8(e2m1, y);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < DIGITS; t++) {
                __m256i digits = _mm256_set1_epi32(((const int32_t *)(a + r * apart))[4 * z + t]);
                sums[r][0][t] = _mm256_add_epi16(sums[r][0][t], _mm256_maddubs_epi16(x, digits));
                sums[r][1][t] = _mm256_add_epi16(sums[r][1][t], _mm256_maddubs_epi16(y, digits));
            }
    }
}

/* Of one row or two, `apart` from a on, with codes of one block: c [rows][32]. at: the block's first group. */
static inline __attribute__((always_inline)) void codes_rows(const float *a, long apart, const int rows, const Weight *w,
    const int kind, const uint8_t *codes, long at, float *c)
{
    const __m256i one = _mm256_set1_epi16(1);
    const int halves = w->group < DEPTH ? 2 : 1;
    const long last = at + w->groups;
    memset(c, 0, (size_t)rows * WIDTH * sizeof *c);
    for (long k = 0, depth = 0; k < w->steps; k++, codes += 8 * LANES, a += LEFT_STEP)
        for (int half = 0; half < halves && at < last; half++) {
            for (int column = 0; column < SIDE; column += 8) {
                __m256i sums[2][2][DIGITS];
                sum_digits(a, apart, rows, w, kind, codes, at, half, halves == 1, column, sums);
                for (int side = 0; side < 2; side++) {
                    vec scales = scales_of(w, at, side);
                    __m256 scale = column ? scales.high : scales.low;
                    if (kind == E2M1) scale = _mm256_mul_ps(scale, _mm256_set1_ps(0.5f));
                    for (int r = 0; r < rows; r++) {
                        __m256i whole[DIGITS];
                        for (int t = 0; t < DIGITS; t++) whole[t] = _mm256_madd_epi16(sums[r][side][t], one);
                        __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(whole[1], 8), whole[2]));
                        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[0]), _mm256_set1_ps(65536.0f), sum);
                        float *to = c + r * WIDTH + side * SIDE + column;
                        __m256 unit = _mm256_mul_ps(scale, _mm256_broadcast_ss(a + r * apart + UNIT));
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, unit, _mm256_loadu_ps(to)));
                    }
                }
            }
            depth += DEPTH / halves;
            if (depth >= w->group) depth = 0, at++;
        }
}

/* Rows `top` on, `count` of them, of a left side: c [count][32]. at: the block's first group. */
static void codes_product(const float *left, long top, long count, const Weight *w, const uint8_t *codes, long at,
    long groups, float *c)
{
    const long apart = w->steps * LEFT_STEP;
    (void)groups;
    for (long r = 0; r < count; r += 2) {
        const float *a = left + left_row(top + r, w->steps);
        float *to = c + r * WIDTH;
        if (w->kind == INT4 && r + 1 < count) codes_rows(a, apart, 2, w, INT4, codes, at, to);
        else if (w->kind == INT4) codes_rows(a, apart, 1, w, INT4, codes, at, to);
        else if (r + 1 < count) codes_rows(a, apart, 2, w, E2M1, codes, at, to);
        else codes_rows(a, apart, 1, w, E2M1, codes, at, to);
    }
}
