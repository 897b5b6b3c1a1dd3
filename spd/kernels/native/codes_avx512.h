/* Products with codes by AVX512-BF16: codes become pairs of bfloat16 in registers. */

/* Numbers by code from `first` on, of four bits twice, for a look-up takes five; or by code minus zero point, modulo 32. */
static inline __m512i numbers_of(const Weight *w, int first)
{
    static const float e2m1[SIDE] = {OF_E2M1}, iq4[SIDE] = {OF_IQ4}, mx4[SIDE] = {OF_MX4};
    bf16 table[DEPTH];
    for (int i = 0; i < DEPTH; i++) {
        float x = (float)(first + (upper_bits(w->kind) ? i : i % SIDE)) - middle_of(w);
        if (w->kind == E2M1) x = e2m1[i % SIDE];
        if (w->kind == IQ4) x = iq4[i % SIDE];
        if (w->kind == MX4) x = mx4[i % SIDE];
        if (w->zeros) x = (float)(i < SIDE ? i : i - 2 * SIDE);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        table[i] = (bf16)(bits >> 16);
    }
    return _mm512_loadu_si512(table);
}

/* Zero points of 16 columns, each twice. */
static inline __m512i zeros_of(const uint8_t *p)
{
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
}

/* Codes n of lane z, of which x holds the lower four bits; what is above their bits does not count. */
INLINE __m512i whole_codes(__m512i x, const uint8_t *step, const int bits, int z, const int n)
{
    __m512i code = _mm512_srli_epi16(x, 4 * (unsigned)n);
    if (bits == 4) return code;
    const int each = bits - 4, lanes = 4 / each, at = 8 * (n / 2) + each * (n % 2);
    __m512i upper = _mm512_loadu_si512(step + (8 + z / lanes) * LANES);
    upper = _mm512_srl_epi16(upper, _mm_cvtsi32_si128(2 * each * (z % lanes)));
    if (at <= 4) upper = _mm512_slli_epi16(upper, (unsigned)(4 - at));
    else upper = _mm512_srli_epi16(upper, (unsigned)(at - 4));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), code, upper, 0xca); /* the code where 15 has bits */
}

/* Sums of rows with both sides of a block. */
typedef __m512 RowSums[8][2];

/* Add products of rows' pairs, at a and `DEPTH` on, with pairs of one side. */
INLINE void add_pairs_of(RowSums sums, const int count, const int side, const bf16 *a, __m512i pairs)
{
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        int32_t pair;
        memcpy(&pair, a + r * DEPTH, sizeof pair);
        sums[r][side] = _mm512_dpbf16_ps(sums[r][side], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
    }
}

/* Bytes `first_byte` and `first_byte` + 2 of a column's lane, 128 less, as pairs of bfloat16. */
INLINE __m512i pairs_of_bytes(__m512i x, const int first_byte)
{
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000);
    __m512i first = _mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * (unsigned)first_byte), 24);
    __m512i second = _mm512_srai_epi32(_mm512_slli_epi32(x, 8 - 8 * (unsigned)first_byte), 24);
    first = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(first)), 16);
    second = _mm512_castps_si512(_mm512_cvtepi32_ps(second));
    return _mm512_ternarylogic_epi32(upper, second, first, 0xca); /* the second one's where `upper` has bits */
}

/* Of `count` rows from a on, with codes of one block: c [count][32]. sums: of the first row's steps. */
INLINE void codes_rows(const bf16 *a, const float *row_sums, const int count, const Weight *w,
    const int zeroed, const int bits, const uint8_t *codes, long at, float *c)
{
    const __m512i table = numbers_of(w, 0), low = _mm512_set1_epi16(15);
    const __m512i more = bits == 6 ? numbers_of(w, DEPTH) : table, signs = _mm512_set1_epi8((char)0x80);
    const int halved = w->group < DEPTH, in_registers = count <= 4;
    const long size = step_bytes(w->kind);
    RowSums totals;
    Factors factors = {0};
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int side = 0; side < 2; side++) {
            totals[r][side] = _mm512_setzero_ps();
            if (!in_registers) _mm512_storeu_ps(c + r * WIDTH + side * SIDE, _mm512_setzero_ps());
        }
    for (long g = 0; g < w->groups; g++) {
        long k = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH);
        int from = halved && g % 2 ? 4 : 0, to = halved && g % 2 == 0 ? 4 : 8;
        RowSums sums;
        if (begins_super(w, g)) load_factors(w, at + g, &factors);
        __m512i zeros[2];
        for (int side = 0; zeroed && side < 2; side++) zeros[side] = zeros_of(w->zeros + (at + g) * WIDTH + side * SIDE);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (last = last < w->steps ? last : w->steps; k < last; k++)
            for (int z = from; z < to; z++) {
                const uint8_t *step = codes + k * size, *lane = step + z * LANES;
                const bf16 *own = a + k * TILE + z * 4;
#pragma GCC unroll 2
                for (int side = 0; bits == 8 && side < 2; side++) {
                    const uint8_t *of_side = step + (2 * z + side) * LANES;
                    __m512i x = _mm512_xor_si512(_mm512_loadu_si512(of_side), signs);
                    _mm_prefetch((const char *)of_side + 4096, _MM_HINT_T0);
                    add_pairs_of(sums, count, side, own, pairs_of_bytes(x, 0));
                    add_pairs_of(sums, count, side, own + 2, pairs_of_bytes(x, 1));
                }
                if (bits == 8) continue;
                __m512i x = _mm512_loadu_si512(lane);
                _mm_prefetch((const char *)lane + 4096, _MM_HINT_T0);
                if (bits > 4 && z % (8 - bits) == 0)
                    _mm_prefetch((const char *)step + (8 + z * (bits - 4) / 4) * LANES + 4096, _MM_HINT_T0);
#pragma GCC unroll 4
                for (int n = 0; n < 4; n++) {
                    __m512i code = whole_codes(x, step, bits, z, n);
                    if (zeroed) code = _mm512_sub_epi16(_mm512_and_si512(code, low), zeros[n % 2]);
                    __m512i pairs = bits == 6 ? _mm512_permutex2var_epi16(table, code, more)
                                              : _mm512_permutexvar_epi16(code, table);
                    add_pairs_of(sums, count, n % 2, own + n / 2 * 2, pairs);
                }
            }
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            vec scale = scales_of(w, &factors, at + g, side), minimum = vzero();
            if (w->minima) minimum = minima_of(w, &factors, at + g, side);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                float *to = c + r * WIDTH + side * SIDE;
                vec sum = vfma(sums[r][side], scale, in_registers ? totals[r][side] : _mm512_loadu_ps(to));
                if (w->minima) sum = vfnma(vall(row_sums[r * w->steps + g]), minimum, sum);
                if (in_registers) totals[r][side] = sum;
                else _mm512_storeu_ps(to, sum);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int side = 0; in_registers && side < 2; side++) _mm512_storeu_ps(c + r * WIDTH + side * SIDE, totals[r][side]);
}

/* Rows `top` on, `count` of them, of a left side: c [count][32]. at: the block's first group. */
static void codes_product(
    Rows rows, long top, long count, const Weight *w, const uint8_t *codes, long at, float *c)
{
    const int bits = w->kind == INT8 ? 8 : 4 + upper_bits(w->kind);
    for (long r = 0; r < count;) {
        long room = SIDE - (top + r) % SIDE, rest = count - r < room ? count - r : room;
        const bf16 *a = rows.left + left_row(top + r, w->steps);
        const float *sums = rows.sums + (top + r) * w->steps;
        float *to = c + r * WIDTH;
#define ROWS(n) \
    if (rest >= n) { \
        if (w->zeros) codes_rows(a, sums, n, w, 1, 4, codes, at, to); \
        else if (bits == 4) codes_rows(a, sums, n, w, 0, 4, codes, at, to); \
        else if (bits == 5) codes_rows(a, sums, n, w, 0, 5, codes, at, to); \
        else if (bits == 6) codes_rows(a, sums, n, w, 0, 6, codes, at, to); \
        else codes_rows(a, sums, n, w, 0, 8, codes, at, to); \
        r += n; \
        continue; \
    }
        ROWS(8) ROWS(4) ROWS(2) ROWS(1)
#undef ROWS
    }
}
