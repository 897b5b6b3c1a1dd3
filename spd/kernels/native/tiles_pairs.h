/* Left sides and attention where the processor multiplies pairs of bfloat16. */

#if !SPD_AMX
#include "tiles_avx512.h"
#endif

/* A left side: [parts(rows, 16)][steps] tiles of [16 rows][32]. */
typedef bf16 Left;
enum { LEFT_STEP = TILE };

static inline long left_row(long row, long steps) { return (row / SIDE * steps * SIDE + row % SIDE) * DEPTH; }
static inline void left_copy(Left *to, const bf16 *from, long count) { store_halves(to, SIDE, halves(from, count)); }
static inline void left_store(Left *to, vec x) { store(to, SIDE, x); }
static inline vec left_load(const Left *from) { return load(from, SIDE); }

/* Few rows go through a block in one pass, more through parts of it of so many steps. */
static inline long panel_of(long rows, long steps) { return rows > (SPD_AMX ? 64 : 32) ? 8 : rows > 32 ? 32 : steps; }

/* What attention multiplies: up to 16 rows' queries and weights, KEYS values, 16 keys where they must be copied. */
typedef struct {
    uint32_t query[LARGEST_HEAD / 2][SIDE] __attribute__((aligned(64)));
    bf16 weights[STEPS][SIDE][DEPTH] __attribute__((aligned(64)));
    bf16 values[LARGEST_HEAD / DEPTH][STEPS][2][TILE] __attribute__((aligned(64)));
    bf16 keys[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
} Sides;

static inline void clear_queries(Sides *s, long size)
{
    memset(s->query, 0, (size_t)(parts(size, DEPTH) * TILE) * sizeof(bf16));
}

static inline void place_query(Sides *s, int row, const bf16 *from, long size)
{
    for (long d = 0; d < size; d += 2)
        s->query[d / 2][row] = from[d] | (d + 1 < size ? (uint32_t)from[d + 1] << 16 : 0);
}

/* The first `count` columns of x [16][16], `apart` elements from each other. */
static inline void turn(const float *x, int count, float *columns, long apart)
{
    __m512 a[SIDE], b[SIDE];
    for (int i = 0; i < SIDE; i++) a[i] = _mm512_load_ps(x + i * SIDE);
    for (int i = 0; i < SIDE; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    /* a[4 q + c] holds rows 4 q to 4 q + 3 of the columns c, c + 4, c + 8, c + 12. */
    for (int c = 0; c < 4; c++) {
        __m512 even = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        __m512 more = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        __m512 rest = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        if (c < count) _mm512_storeu_ps(columns + c * apart, _mm512_shuffle_f32x4(even, more, 0x88));
        if (c + 4 < count) _mm512_storeu_ps(columns + (c + 4) * apart, _mm512_shuffle_f32x4(odd, rest, 0x88));
        if (c + 8 < count) _mm512_storeu_ps(columns + (c + 8) * apart, _mm512_shuffle_f32x4(even, more, 0xdd));
        if (c + 12 < count) _mm512_storeu_ps(columns + (c + 12) * apart, _mm512_shuffle_f32x4(odd, rest, 0xdd));
    }
}

/* scores [rows][16], rows `apart`, of 16 keys of `size` elements that lie behind each other. */
static inline void score_keys(Sides *s, const bf16 *keys, long size, int rows, float *scores, long apart)
{
    long steps = parts(size, DEPTH), stride = size;
    float part[SIDE * SIDE] __attribute__((aligned(64)));
    if (size % DEPTH) {
        for (int i = 0; i < SIDE; i++) {
            memset(s->keys[i] + size, 0, (size_t)(steps * DEPTH - size) * sizeof(bf16));
            memcpy(s->keys[i], keys + i * stride, (size_t)size * sizeof(bf16));
        }
        keys = s->keys[0], stride = LARGEST_HEAD;
    }
    tile_product(keys, stride, (const bf16 *)s->query, steps, part); /* [16 keys][16 rows] */
    turn(part, rows, scores, apart);
}

/* A row's weights of keys 16 i on. */
static inline void place_weights(Sides *s, int row, long i, vec weights)
{
    _mm256_store_si256((__m256i *)(s->weights[i / 2][row] + i % 2 * SIDE), rounded(weights));
}

/* The values [size] of keys k and k + 1, null beyond the last, as a part of right-side tiles. Values that are not
   finite become 0, `wild` says of which key; returns whether there are any. */
static inline int place_values(Sides *s, long k, const bf16 *one, const bf16 *other, long size, uint8_t *wild)
{
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
        37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(SIDE));
    const __m512i unsigned_bits = _mm512_set1_epi16(0x7fff), infinite = _mm512_set1_epi16(0x7f80);
    __m512i top[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int clean = 0;; clean = 1) { /* again where there are some */
        for (long d = 0; d < size; d += DEPTH) {
            __mmask32 own = size - d < DEPTH ? (__mmask32)((1ull << (size - d)) - 1) : 0xffffffff;
            __m512i x[2] = {
                _mm512_maskz_loadu_epi16(one ? own : 0, one + d), _mm512_maskz_loadu_epi16(other ? own : 0, other + d)};
            for (int i = 0; i < 2; i++) {
                __m512i bits = _mm512_and_si512(x[i], unsigned_bits);
                top[i] = _mm512_max_epu16(top[i], bits);
                if (clean) x[i] = _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(bits, infinite), x[i]);
            }
            bf16 *to = s->values[d / DEPTH][k / DEPTH][0] + k % DEPTH / 2 * DEPTH;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(x[0], even, x[1]));
            _mm512_store_si512(to + TILE, _mm512_permutex2var_epi16(x[0], odd, x[1]));
        }
        for (int i = 0; i < 2; i++) wild[i] = _mm512_cmpge_epu16_mask(top[i], infinite) != 0;
        if (clean || !(wild[0] | wild[1])) return clean;
    }
}

/* mixed [rows][32]: each row's weights of `count` keys times elements d to d + 31 of their values, all finite already. */
static inline int mix_values(const Sides *s, long d, long size, int rows, long count, float *mixed)
{
    const bf16 *weights = s->weights[0][0];
    (void)size;
    block_product(weights, 0, 1, rows, s->values[d / DEPTH][0][0], parts(count, DEPTH), 1, weights, 0, mixed);
    return 0;
}

#define clean_values(...) 0
