/* Products with codes by AVX512-BF16: codes become pairs of bfloat16 in registers. */

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

/* The same of both sides: a row's pair is read once, and no other's is kept, so that registers suffice. */
INLINE void add_pairs(RowSums sums, const int count, const bf16 *a, const __m512i pairs[2])
{
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        int32_t pair;
        memcpy(&pair, a + r * DEPTH, sizeof pair);
        const __m512bh of_row = (__m512bh)_mm512_set1_epi32(pair);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], of_row, (__m512bh)pairs[0]);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], of_row, (__m512bh)pairs[1]);
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

#if defined(__AVX512VBMI__)
/* The bytes of bfloat16, by magnitude below 128. */
typedef struct {
    __m512i lower[2], upper[2];
} ByteTables;

INLINE ByteTables byte_tables(void)
{
    uint8_t lower[128], upper[128];
    __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int i = 0; i < 128; i += SIDE) {
        __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_add_epi32(numbers, _mm512_set1_epi32(i))));
        _mm_storeu_si128((__m128i *)(lower + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16)));
        _mm_storeu_si128((__m128i *)(upper + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)));
    }
    ByteTables tables;
    for (int i = 0; i < 2; i++) {
        tables.lower[i] = _mm512_loadu_si512(lower + i * LANES);
        tables.upper[i] = _mm512_loadu_si512(upper + i * LANES);
    }
    return tables;
}

/* Signed bytes 0 and 2, and 1 and 3, of each column's lane as pairs of bfloat16: by look-ups, where one or two rows do
   not hide the conversions. */
INLINE void look_up_pairs(__m512i x, const ByteTables *tables, __m512i *first, __m512i *second)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), even = _mm512_set1_epi16(255);
    const __m512i of_least = _mm512_set1_epi8((char)0xc3); /* the upper byte of -128, whose magnitude has no row */
    __m512i size = _mm512_abs_epi8(x);
    __m512i lower = _mm512_permutex2var_epi8(tables->lower[0], size, tables->lower[1]);
    __m512i upper = _mm512_permutex2var_epi8(tables->upper[0], size, tables->upper[1]);
    upper = _mm512_ternarylogic_epi32(sign, x, upper, 0xea); /* the sign's bit and the others */
    upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(x, sign), of_least);
    *first = _mm512_ternarylogic_epi32(even, lower, _mm512_slli_epi16(upper, 8), 0xca);
    *second = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(lower, 8), upper, 0xca);
}
#else
typedef int ByteTables;
INLINE ByteTables byte_tables(void) { return 0; }
INLINE void look_up_pairs(__m512i x, const ByteTables *tables, __m512i *first, __m512i *second)
{
    (void)tables;
    *first = pairs_of_bytes(x, 0);
    *second = pairs_of_bytes(x, 1);
}
#endif

/* Add products of rows with lane z of both sides of a step of bytes. */
INLINE void add_bytes(RowSums sums, const int count, const bf16 *a, const uint8_t *lanes, const ByteTables *tables)
{
    const __m512i signs = _mm512_set1_epi8((char)0x80);
    __m512i x[2], first[2], second[2];
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        x[side] = _mm512_xor_si512(_mm512_loadu_si512(lanes + side * LANES), signs);
        _mm_prefetch((const char *)lanes + side * LANES + 4096, _MM_HINT_T0);
        if (count <= 2) look_up_pairs(x[side], tables, first + side, second + side);
        else first[side] = pairs_of_bytes(x[side], 0);
    }
    add_pairs(sums, count, a, first);
#pragma GCC unroll 2
    for (int side = 0; count > 2 && side < 2; side++) second[side] = pairs_of_bytes(x[side], 1);
    add_pairs(sums, count, a + 2, second);
}

/* Of `count` rows from a on, with codes of one block: c [count][32]. sums: of the first row's steps. */
INLINE void codes_rows(const bf16 *a, const float *row_sums, const int count, const Weight *w,
    const int zeroed, const int bits, const uint8_t *codes, long at, float *c)
{
    CodeTables tables = code_tables(w);
    const ByteTables bytes = byte_tables();
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
        if (zeroed) load_zeros(&tables, w, at + g);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (last = last < w->steps ? last : w->steps; k < last; k++)
            for (int z = from; z < to; z++) {
                const uint8_t *step = codes + k * size, *lane = step + z * LANES;
                const bf16 *own = a + k * TILE + z * 4;
                if (bits == 8) add_bytes(sums, count, own, step + 2 * z * LANES, &bytes);
                if (bits == 8) continue;
                __m512i x = _mm512_loadu_si512(lane);
                _mm_prefetch((const char *)lane + 4096, _MM_HINT_T0);
                __m512i upper = bits > 4 ? upper_codes(step, bits, z) : x;
                if (bits > 4 && z % (8 - bits) == 0)
                    _mm_prefetch((const char *)step + (8 + z * (bits - 4) / 4) * LANES + 4096, _MM_HINT_T0);
#pragma GCC unroll 4
                for (int n = 0; n < 4; n++) {
                    __m512i pairs = pairs_at(&tables, x, upper, bits, zeroed, 0, n);
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
