/* Numbers of codes of four to six bits as pairs of bfloat16, by look-ups. */

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

/* The bits of lane z's codes above the lower four, for its pairs n = 0 in their lowest place. */
INLINE __m512i upper_codes(const uint8_t *step, const int bits, int z)
{
    const int each = bits - 4, lanes = 4 / each;
    __m512i upper = _mm512_loadu_si512(step + (8 + z / lanes) * LANES);
    return _mm512_srl_epi16(upper, _mm_cvtsi32_si128(2 * each * (z % lanes)));
}

/* Codes n of a lane, of which x holds the lower four bits, and `upper` those above from bit `first` on; what is above
   their bits does not count. */
INLINE __m512i whole_codes(__m512i x, __m512i upper, const int bits, const int first, const int n)
{
    __m512i code = _mm512_srli_epi16(x, 4 * (unsigned)n);
    if (bits == 4) return code;
    const int at = first + 8 * (n / 2) + (bits - 4) * (n % 2);
    if (at <= 4) upper = _mm512_slli_epi16(upper, (unsigned)(4 - at));
    else upper = _mm512_srli_epi16(upper, (unsigned)(at - 4));
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), code, upper, 0xca); /* the code where 15 has bits */
}

/* What a weight's codes are looked up in. */
typedef struct {
    __m512i numbers, more, zeros[2];
} CodeTables;

static inline CodeTables code_tables(const Weight *w)
{
    CodeTables tables = {.numbers = numbers_of(w, 0)};
    tables.more = w->kind == INT6 ? numbers_of(w, DEPTH) : tables.numbers;
    return tables;
}

/* Set the zero points of a group. */
INLINE void load_zeros(CodeTables *tables, const Weight *w, long at)
{
    for (int side = 0; side < 2; side++) tables->zeros[side] = zeros_of(w->zeros + at * WIDTH + side * SIDE);
}

/* Pairs n of a lane: see `whole_codes`. */
INLINE __m512i pairs_at(const CodeTables *tables, __m512i x, __m512i upper, const int bits, const int zeroed,
    const int first, const int n)
{
    __m512i code = whole_codes(x, upper, bits, first, n);
    if (zeroed) code = _mm512_sub_epi16(_mm512_and_si512(code, _mm512_set1_epi16(15)), tables->zeros[n % 2]);
    return bits == 6 ? _mm512_permutex2var_epi16(tables->numbers, code, tables->more)
                     : _mm512_permutexvar_epi16(code, tables->numbers);
}

/* Four lanes from z on into two tiles of numbers. */
INLINE void look_up(
    const CodeTables *tables, const uint8_t *step, const int bits, const int zeroed, const int z, Number *tiles)
{
    const int each = bits - 4, lanes = each ? 4 / each : 4;
    __m512i upper = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i x = _mm512_loadu_si512(step + (z + i) * LANES);
        if (each && i % lanes == 0) upper = _mm512_loadu_si512(step + (8 + (z + i) / lanes) * LANES);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
            _mm512_store_si512(tiles + n % 2 * TILE + (2 * (z + i) + n / 2) * DEPTH,
                pairs_at(tables, x, upper, bits, zeroed, 2 * each * (i % lanes), n));
    }
}

/* One step of a block into two tiles of numbers, as `decode` does. */
static void decode_by_tables(
    const CodeTables *tables, const Weight *w, const uint8_t *step, int from, int to, Number *tiles)
{
    if (to - from < DEPTH) memset(tiles, 0, 2 * TILE * sizeof(Number));
    for (int z = from / 4; z < to / 4; z += 4) {
        if (w->zeros) look_up(tables, step, 4, 1, z, tiles);
        else if (!upper_bits(w->kind)) look_up(tables, step, 4, 0, z, tiles);
        else if (w->kind == INT5) look_up(tables, step, 5, 0, z, tiles);
        else look_up(tables, step, 6, 0, z, tiles);
    }
}
