/* Products by AVX2 and FMA: bfloat16 is widened as it is read, the left side is kept in float32. */

static inline void tiles_begin(int first, int second) { (void)first, (void)second; }
static inline void tiles_end(void) {}

/* A left side: rows of [steps][32], bfloat16 numbers. */
typedef float Left;
enum { LEFT_STEP = DEPTH };

static inline long left_row(long row, long steps) { return row * steps * DEPTH; }
static inline void left_copy(Left *to, const bf16 *from, long count) { storef(to, SIDE, load(from, count)); }
static inline void left_store(Left *to, vec x) { storef(to, SIDE, widened(rounded(x))); }

/* Rows that go through 32 columns together, and through 16: their sums fill the registers. */
enum { NARROW = 3, MOST_ROWS = 6 };

/* Few rows go through a block in one pass, more through parts of it that stay in the first cache. */
static inline long panel_of(long rows, long steps) { return rows > NARROW ? 8 : steps; }

/* Nanoseconds that a tile takes. */
static inline double tile_time(long rows) { return 30.0 + 12.0 * (double)rows; }

/* Of pairs of bfloat16, those that come first or second. */
static inline __m256 of_pairs(__m256i pairs, int second)
{
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    return _mm256_castsi256_ps(second ? _mm256_and_si256(pairs, upper) : _mm256_slli_epi32(pairs, 16));
}

/* Add to c [count][32], or write there where `fresh`, `count` rows `apart` from a on times b [steps][2] tiles, of which
   `sides` are read: vectors of 8 columns, two of a side. */
static inline __attribute__((always_inline)) void rows_product(const Left *a, long apart, const int count,
    const int sides, const bf16 *b, long steps, int fresh, const bf16 *next, long lines, float *c)
{
    __m256 sums[MOST_ROWS][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2 * sides; v++)
            sums[r][v] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(c + r * 32 + v * 8);
    for (long k = 0; k < steps; k++, a += DEPTH, b += 2 * TILE) {
        for (long i = 0; i < lines; i++, next += DEPTH) _mm_prefetch((const char *)next, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int j = 0; j < SIDE; j++)
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) {
                __m256 weights[4];
                for (int v = 0; v < 2 * sides; v++) {
                    const bf16 *from = b + v / 2 * TILE + j * DEPTH + v % 2 * SIDE;
                    weights[v] = of_pairs(_mm256_loadu_si256((const __m256i *)from), second);
                }
                for (int r = 0; r < count; r++) {
                    __m256 x = _mm256_broadcast_ss(a + r * apart + 2 * j + second);
                    for (int v = 0; v < 2 * sides; v++) sums[r][v] = _mm256_fmadd_ps(x, weights[v], sums[r][v]);
                }
            }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < 2 * sides; v++) _mm256_storeu_ps(c + r * 32 + v * 8, sums[r][v]);
}

/* Add to c [rows][32], or write there where `fresh`, up to two blocks of 16 rows, `apart` elements from each other, times
   b [steps][2] tiles. Meanwhile `lines` of 32 elements a step are asked for, from `next` on. */
static inline void block_product(const Left *a, long apart, int blocks, int rows, const bf16 *b, long steps,
    int fresh, const bf16 *next, long lines, float *c)
{
    long row = apart / SIDE, groups = parts(rows, MOST_ROWS), each = parts(lines, groups);
    (void)blocks;
    for (int first = 0, count; first < rows; first += count, groups--) {
        count = (int)parts(rows - first, groups);
        const Left *from = a + first * row;
        float *to = c + first * 32;
#define WIDE(n) \
    case n: rows_product(from, row, n, 2, b, steps, fresh, next, each, to); break;
#define SIDES(n) \
    case n: \
        for (int side = 0; side < 2; side++) \
            rows_product(from, row, n, 1, b + side * TILE, steps, fresh, next + side * (each / 2) * steps * DEPTH, \
                each / 2, to + side * SIDE); \
        break;
        switch (count) {
            WIDE(1) WIDE(2) WIDE(3) SIDES(4) SIDES(5) SIDES(6)
        }
        next += each * steps * DEPTH;
    }
}

/* What attention multiplies: up to 16 rows' queries and weights, 16 keys, and where KEYS values lie. Queries and keys
   are those that come first in 8 pairs, then those that come second. `clean` has room for values that are changed. */
typedef struct {
    float query[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float keys[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float weights[SIDE][KEYS] __attribute__((aligned(64)));
    bf16 clean[KEYS][LARGEST_HEAD] __attribute__((aligned(64)));
    const bf16 *values[KEYS];
} Sides;

static inline void clear_queries(Sides *s, long size) { (void)s, (void)size; }

static inline void widen_pairs(const bf16 *from, long size, float *to)
{
    for (long d = 0; d < size; d += SIDE) {
        __m256i pairs = halves(from + d, size - d);
        _mm256_storeu_ps(to + d, of_pairs(pairs, 0));
        _mm256_storeu_ps(to + d + 8, of_pairs(pairs, 1));
    }
}

static inline void place_query(Sides *s, int row, const bf16 *from, long size) { widen_pairs(from, size, s->query[row]); }

/* scores [rows][16], rows `apart`, of 16 keys of `size` elements that lie behind each other. Each is summed in 8 parts
   of ascending depth, which are added up. */
static inline void score_keys(Sides *s, const bf16 *keys, long size, int rows, float *scores, long apart)
{
    for (int i = 0; i < SIDE; i++) widen_pairs(keys + i * size, size, s->keys[i]);
    for (int r = 0; r < rows; r++)
        for (int first = 0; first < SIDE; first += 8) {
            __m256 sums[8];
            for (int i = 0; i < 8; i++) sums[i] = _mm256_setzero_ps();
            for (long d = 0; d < parts(size, SIDE) * SIDE; d += 8) {
                __m256 q = _mm256_load_ps(s->query[r] + d);
                for (int i = 0; i < 8; i++)
                    sums[i] = _mm256_fmadd_ps(q, _mm256_load_ps(s->keys[first + i] + d), sums[i]);
            }
            for (int i = 0; i < 4; i++) sums[i] = _mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]);
            for (int i = 0; i < 2; i++) sums[i] = _mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]);
            __m256 low = _mm256_permute2f128_ps(sums[0], sums[1], 0x20);
            __m256 high = _mm256_permute2f128_ps(sums[0], sums[1], 0x31);
            _mm256_storeu_ps(scores + r * apart + first, _mm256_add_ps(low, high));
        }
}

/* A row's weights of keys 16 i on. */
static inline void place_weights(Sides *s, int row, long i, vec weights)
{
    storef(s->weights[row] + i * SIDE, SIDE, weights);
}

/* Which of 16 values are not finite, as whole numbers of ones. */
static inline __m256i not_finite(__m256i values)
{
    const __m256i exponent = _mm256_set1_epi16(0x7f80);
    return _mm256_cmpeq_epi16(_mm256_and_si256(values, exponent), exponent);
}

static inline int place_value(Sides *s, long k, const bf16 *from, long size, uint8_t *wild)
{
    __m256i bad = _mm256_setzero_si256();
    s->values[k] = from;
    if (!from) return 0;
    for (long d = 0; d < size; d += SIDE) bad = _mm256_or_si256(bad, not_finite(halves(from + d, size - d)));
    if (__builtin_expect(_mm256_testz_si256(bad, bad), 1)) return 0;
    for (long d = 0; d < size; d += SIDE) {
        __m256i own = halves(from + d, size - d);
        store_halves(s->clean[k] + d, SIDE, _mm256_andnot_si256(not_finite(own), own));
    }
    s->values[k] = s->clean[k];
    return *wild = 1;
}

/* Where the values [size] of keys k and k + 1 lie, null beyond the last. Values that are not finite become 0, `wild`
   says of which key; returns whether there are any. */
static inline int place_values(Sides *s, long k, const bf16 *one, const bf16 *other, long size, uint8_t *wild)
{
    int some = place_value(s, k, one, size, wild);
    return place_value(s, k + 1, other, size, wild + 1) | some;
}

static inline __attribute__((always_inline)) void mix_rows(
    const Sides *s, int row, const int rows, long d, long size, long count, float *mixed)
{
    __m256 sums[4][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    for (long k = 0; k < count; k++) {
        __m256i pairs = halves(s->values[k] + d, size - d);
        __m256 first = of_pairs(pairs, 0), second = of_pairs(pairs, 1);
        for (int r = 0; r < rows; r++) {
            __m256 weight = _mm256_broadcast_ss(s->weights[row + r] + k);
            sums[r][0] = _mm256_fmadd_ps(weight, first, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(weight, second, sums[r][1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        __m256 low = _mm256_unpacklo_ps(sums[r][0], sums[r][1]), high = _mm256_unpackhi_ps(sums[r][0], sums[r][1]);
        _mm256_storeu_ps(mixed + (row + r) * SIDE, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(mixed + (row + r) * SIDE + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
}

/* mixed [rows][16]: each row's weights of `count` keys times elements d to d + 15 of their values. */
static inline void mix_values(const Sides *s, long d, long size, int rows, long count, float *mixed)
{
    int row = 0;
    for (; row + 4 <= rows; row += 4) mix_rows(s, row, 4, d, size, count, mixed);
    for (; row + 2 <= rows; row += 2) mix_rows(s, row, 2, d, size, count, mixed);
    if (row < rows) mix_rows(s, row, 1, d, size, count, mixed);
}
