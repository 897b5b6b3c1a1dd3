/* What lies between a layer's first product and its second: rotation, the cache write, attention over pages. */

#include "tiles.h"

enum { KEYS = 128, STEPS = KEYS / DEPTH };

/* One head x [size], normed by `norm` where that is given, rotated by cos and sin [size], to out. */
static void rotate(
    const bf16 *x, const float *norm, float epsilon, const bf16 *cos, const bf16 *sin, long size, bf16 *out)
{
    long half = size / 2;
    __m512 scale = _mm512_set1_ps(norm ? norm_scale(x, size, epsilon) : 1.0f);
    for (long i = 0; i < half; i += SIDE) {
        __mmask16 mask = lanes(half - i);
        __m512 a = load(x + i, mask), b = load(x + half + i, mask);
        if (norm) {
            a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_maskz_loadu_ps(mask, norm + i));
            b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_maskz_loadu_ps(mask, norm + half + i));
        }
        store(out + i, mask, _mm512_fmadd_ps(b, load(sin + i, mask), _mm512_mul_ps(a, load(cos + i, mask))));
        __m512 still = _mm512_mul_ps(b, load(cos + half + i, mask));
        store(out + half + i, mask, _mm512_fmadd_ps(a, load(sin + half + i, mask), still));
    }
}

/* See `spd.kernels.rotary_store`; norm float32 [heads + kv_heads][size] or null; query [rows][heads][size].

   A page holds its positions head by head, [kv_heads][page][size]: what attention reads together lies together. */
void spd_rotary_store(const bf16 *qkv, const bf16 *cos, const bf16 *sin, const int64_t *positions,
    const int64_t *places, const float *norm, float epsilon, bf16 *keys, bf16 *values, bf16 *query, long rows,
    long heads, long kv_heads, long size, long page, int threads)
{
    long turned = heads + kv_heads, every = turned + kv_heads;
    threads = threads_for(0.5 * (double)(rows * every * size), threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        const bf16 *own = qkv + r * every * size, *c = cos + positions[r] * size, *s = sin + positions[r] * size;
        long first = (places[r] / page * kv_heads * page + places[r] % page) * size;
        for (long h = 0; h < turned; h++) {
            bf16 *out = h < heads ? query + (r * heads + h) * size : keys + first + (h - heads) * page * size;
            rotate(own + h * size, norm ? norm + h * size : 0, epsilon, c, s, size, out);
        }
        for (long h = 0; h < kv_heads; h++)
            memcpy(values + first + h * page * size, own + (turned + h) * size, (size_t)size * sizeof(bf16));
    }
}

/* See `spd.kernels.mla_attention`: latent [rows][rank + turned] normed and rotated into pages, query [rows][heads]
   [turned] rotated to out; rows and heads of them lie the given numbers of elements apart. */
void spd_latent_store(const bf16 *query, const bf16 *latent, const bf16 *cos, const bf16 *sin, const int64_t *positions,
    const int64_t *places, const float *norm, float epsilon, bf16 *pages, bf16 *out, long rows, long heads, long rank,
    long turned, long query_row, long query_head, long latent_row, int threads)
{
    long size = rank + turned;
    threads = threads_for(0.5 * (double)(rows * (size + heads * turned)), threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        const bf16 *c = cos + positions[r] * turned, *s = sin + positions[r] * turned, *own = latent + r * latent_row;
        bf16 *kept = pages + places[r] * size;
        norm_row(own, norm, epsilon, 0, rank, kept);
        rotate(own + rank, 0, 0, c, s, turned, kept + rank);
        for (long h = 0; h < heads; h++)
            rotate(query + r * query_row + h * query_head, 0, 0, c, s, turned, out + (r * heads + h) * turned);
    }
}

typedef struct {
    const bf16 *query, *keys, *values;
    const int64_t *table, *positions;
    bf16 *out;
    long table_width, slots, width, heads, kv_heads, size, value_size, page, first_key, sliding;
    float scale, softcap;
} Attention;

/* Rows that share a KV head's keys, at most 16, and what they have seen so far. */
typedef struct {
    uint32_t query[LARGEST_HEAD / 2][SIDE] __attribute__((aligned(64)));
    float scores[SIDE][KEYS] __attribute__((aligned(64)));
    bf16 weights[STEPS][SIDE][DEPTH] __attribute__((aligned(64)));
    bf16 values[LARGEST_HEAD / DEPTH][STEPS][2][TILE] __attribute__((aligned(64)));
    bf16 keys[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float mixed[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float peak[SIDE], total[SIDE];
    uint8_t wild[KEYS]; /* keys whose values are not finite */
    int32_t last[SIDE], low[SIDE];
} Block;

/* Keys `at` to `end` of one head of a slot's pages: a part of what one block of rows reads. */
typedef struct {
    const int64_t *table;
    long head, at, end;
} Chunk;

static inline const bf16 *place(const Attention *a, const bf16 *pool, const Chunk *c, long key)
{
    return pool + ((c->table[key / a->page] * a->kv_heads + c->head) * a->page + key % a->page) * a->size;
}

/* Ask for `count` keys or values from `key` on, as far as the chunk goes; they lie in one page. */
static inline void fetch(const Attention *a, const bf16 *pool, const Chunk *c, long key, int count)
{
    if (key >= c->end) return;
    const bf16 *from = place(a, pool, c, key);
    for (long i = 0; i < count * a->size; i += DEPTH) _mm_prefetch((const char *)(from + i), _MM_HINT_T1);
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

/* scores [rows][keys] of one chunk as they come from the product; the next chunk's keys are asked for. */
static void score(const Attention *a, Block *b, const Chunk *c, const Chunk *next, int rows)
{
    long steps = parts(a->size, DEPTH);
    float part[SIDE * SIDE] __attribute__((aligned(64)));
    for (long k = 0; k < c->end - c->at; k += SIDE) {
        const bf16 *from = place(a, a->keys, c, c->at + k);
        long apart = a->size;
        fetch(a, a->keys, next, next->at + k, SIDE);
        if (a->size % DEPTH) {
            for (int i = 0; i < SIDE; i++) {
                memset(b->keys[i] + a->size, 0, (size_t)(steps * DEPTH - a->size) * sizeof(bf16));
                memcpy(b->keys[i], from + i * apart, (size_t)a->size * sizeof(bf16));
            }
            from = b->keys[0], apart = LARGEST_HEAD;
        }
        tile_product(from, apart, DEPTH, SIDE, (const bf16 *)b->query, TILE, steps, part);
        turn(part, rows, b->scores[0] + k, KEYS);
    }
}

/* One row's scores of the keys from `at` to `end`, scaled, capped, masked, to weights e^(score - peak) as a row of
   left-side tiles, zeros up to whole tiles; the peak and the sum go on. Returns what earlier keys count for now. */
static float weigh(const Attention *a, Block *b, int row, long at, long end)
{
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff()), scale = _mm512_set1_ps(a->scale);
    const __m512i last = _mm512_set1_epi32(b->last[row]), low = _mm512_set1_epi32(b->low[row]);
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 scores[KEYS / SIDE], top = nothing, total = _mm512_setzero_ps();
    long count = parts(end - at, SIDE), whole = parts(end - at, DEPTH) * 2;
    for (long i = 0; i < count; i++) {
        __m512i key = _mm512_add_epi32(order, _mm512_set1_epi32((int32_t)(at + i * SIDE)));
        __mmask16 seen = _mm512_cmple_epi32_mask(key, last) & _mm512_cmpge_epi32_mask(key, low);
        __m512 s = _mm512_mul_ps(_mm512_load_ps(b->scores[row] + i * SIDE), scale);
        if (a->softcap > 0) { /* c tanh(s / c) = c - 2 c / (1 + e^(2 s / c)) */
            __m512 cap = _mm512_set1_ps(a->softcap), two = _mm512_set1_ps(2.0f);
            __m512 grown = exponential(_mm512_div_ps(_mm512_mul_ps(s, two), cap));
            grown = _mm512_add_ps(grown, _mm512_set1_ps(1.0f));
            s = _mm512_sub_ps(cap, _mm512_div_ps(_mm512_mul_ps(cap, two), grown));
        }
        scores[i] = _mm512_mask_mov_ps(nothing, seen, s);
        top = _mm512_max_ps(top, scores[i]);
    }
    float before = b->peak[row], peak = _mm512_reduce_max_ps(top);
    if (peak < before) peak = before;
    if (peak == -__builtin_inff()) { /* nothing seen yet */
        for (long i = 0; i < whole; i++)
            _mm256_store_si256((__m256i *)(b->weights[i / 2][row] + i % 2 * SIDE), _mm256_setzero_si256());
        return 0;
    }
    for (long i = 0; i < whole; i++) {
        __m512 w = _mm512_setzero_ps();
        if (i < count) {
            __mmask16 seen = _mm512_cmp_ps_mask(scores[i], nothing, _CMP_NEQ_UQ);
            w = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(scores[i], _mm512_set1_ps(peak))));
            total = _mm512_add_ps(total, w);
        }
        _mm256_store_si256((__m256i *)(b->weights[i / 2][row] + i % 2 * SIDE), rounded(w));
    }
    float kept = 0;
    if (before != -__builtin_inff()) {
        __m512 factor = exponential(_mm512_sub_ps(_mm512_set1_ps(before), _mm512_set1_ps(peak)));
        kept = _mm512_cvtss_f32(factor);
    }
    b->peak[row] = peak;
    b->total[row] = b->total[row] * kept + _mm512_reduce_add_ps(total);
    return kept;
}

static inline __mmask32 not_finite(__m512i values)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
}

/* The values of one chunk as right-side tiles [size][keys], zeros beyond; the next chunk's are asked for.

   Values that are not finite count as 0, since rows that do not see them multiply them by 0; returns whether there
   are any, and `wild` says of which keys. */
static int turn_values(const Attention *a, Block *b, const Chunk *c, const Chunk *next)
{
    long count = c->end - c->at;
    int some = 0;
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
        37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(SIDE));
    for (long k = 0; k < parts(count, DEPTH) * DEPTH; k += 2) {
        const bf16 *from = k < count ? place(a, a->values, c, c->at + k) : 0;
        fetch(a, a->values, next, next->at + k, 2);
        for (long d = 0; d < a->value_size; d += DEPTH) {
            __mmask32 mask = a->value_size - d < DEPTH ? (__mmask32)((1ull << (a->value_size - d)) - 1) : 0xffffffff;
            __m512i first = _mm512_setzero_si512(), second = first;
            if (k < count) first = _mm512_maskz_loadu_epi16(mask, from + d);
            if (k + 1 < count) second = _mm512_maskz_loadu_epi16(mask, from + a->size + d);
            __mmask32 bad = not_finite(first), worse = not_finite(second);
            if (__builtin_expect(bad | worse, 0)) {
                if (!some) memset(b->wild, 0, sizeof b->wild);
                some = 1;
                b->wild[k] |= bad != 0, b->wild[k + 1] |= worse != 0;
                first = _mm512_maskz_mov_epi16(~bad, first), second = _mm512_maskz_mov_epi16(~worse, second);
            }
            bf16 *to = b->values[d / DEPTH][k / DEPTH][0] + k % DEPTH / 2 * DEPTH;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(first, even, second));
            _mm512_store_si512(to + TILE, _mm512_permutex2var_epi16(first, odd, second));
        }
    }
    return some;
}

/* Rows that see a value that is not finite come to NaN. */
static void spoil(const Attention *a, Block *b, const Chunk *c, int rows)
{
    for (int r = 0; r < rows; r++)
        for (long k = c->at; k < c->end; k++)
            if (b->wild[k - c->at] && k >= b->low[r] && k <= b->last[r])
                for (long d = 0; d < a->value_size; d++) b->mixed[r][d] = __builtin_nanf("");
}

/* The unit of work with a number: up to 16 of a slot's [width][heads / kv_heads] rows that read one KV head. */
typedef struct {
    long slot, head, first, begin, end;
    int rows;
} Unit;

static inline long position(const Attention *a, const Unit *u, long row)
{
    long at = a->positions[u->slot * a->width + row / (a->heads / a->kv_heads)], most = a->table_width * a->page - 1;
    return at < most ? at : most;
}

static inline long lowest(const Attention *a, long at)
{
    long low = at < a->first_key ? at : a->first_key;
    return a->sliding && low < at - a->sliding + 1 ? at - a->sliding + 1 : low;
}

static Unit unit_of(const Attention *a, long number)
{
    long rows = a->width * (a->heads / a->kv_heads), blocks = parts(rows, SIDE);
    Unit u = {number / (a->kv_heads * blocks), number / blocks % a->kv_heads, number % blocks * SIDE, INT32_MAX, 0, 0};
    u.rows = (int)(rows - u.first < SIDE ? rows - u.first : SIDE);
    for (int r = 0; r < u.rows; r++) {
        long at = position(a, &u, u.first + r), low = lowest(a, at);
        if (low < u.begin) u.begin = low;
        if (at >= u.end) u.end = at + 1;
    }
    return u;
}

static Chunk chunk_of(const Attention *a, const Unit *u, long at)
{
    Chunk c = {a->table + u->slot * a->table_width, u->head, at, u->end < at + KEYS ? u->end : at + KEYS};
    return c;
}

static void attend_unit(const Attention *a, Block *b, const Unit *u, const Unit *after)
{
    long groups = a->heads / a->kv_heads;
    int rows = u->rows;
    memset(b->query, 0, (size_t)(parts(a->size, DEPTH) * TILE) * sizeof(bf16));
    for (int r = 0; r < rows; r++) {
        long row = u->slot * a->width + (u->first + r) / groups, at = position(a, u, u->first + r);
        const bf16 *from = a->query + (row * a->heads + u->head * groups + (u->first + r) % groups) * a->size;
        b->last[r] = (int32_t)at, b->low[r] = (int32_t)lowest(a, at);
        for (long d = 0; d < a->size; d += 2)
            b->query[d / 2][r] = from[d] | (d + 1 < a->size ? (uint32_t)from[d + 1] << 16 : 0);
        memset(b->mixed[r], 0, (size_t)(parts(a->value_size, SIDE) * SIDE) * sizeof(float));
        b->peak[r] = -__builtin_inff(), b->total[r] = 0;
    }
    for (long at = u->begin / KEYS * KEYS; at < u->end; at += KEYS) {
        const Chunk c = chunk_of(a, u, at);
        const Chunk next = at + KEYS < u->end ? chunk_of(a, u, at + KEYS) : chunk_of(a, after, after->begin / KEYS * KEYS);
        long steps = parts(c.end - at, DEPTH);
        float kept[SIDE], part[SIDE * SIDE] __attribute__((aligned(64)));
        score(a, b, &c, &next, rows);
        for (int r = 0; r < rows; r++) kept[r] = weigh(a, b, r, at, c.end);
        int wild = turn_values(a, b, &c, &next);
        for (long d = 0; d < a->value_size; d += SIDE) {
            const bf16 *values = b->values[d / DEPTH][0][d / SIDE % 2];
            tile_product(b->weights[0][0], DEPTH, TILE, rows, values, 2 * TILE, steps, part);
            for (int r = 0; r < rows; r++) {
                __m512 old = _mm512_mul_ps(_mm512_load_ps(b->mixed[r] + d), _mm512_set1_ps(kept[r]));
                _mm512_store_ps(b->mixed[r] + d, _mm512_add_ps(old, _mm512_load_ps(part + r * SIDE)));
            }
        }
        if (wild) spoil(a, b, &c, rows);
    }
    for (int r = 0; r < rows; r++) {
        long row = u->slot * a->width + (u->first + r) / groups;
        bf16 *out = a->out + (row * a->heads + u->head * groups + (u->first + r) % groups) * a->value_size;
        for (long d = 0; d < a->value_size; d += SIDE)
            store(out + d, lanes(a->value_size - d),
                _mm512_div_ps(_mm512_load_ps(b->mixed[r] + d), _mm512_set1_ps(b->total[r])));
    }
}

/* See `spd.kernels.paged_attention`: query [slots][width][heads][size], out the same of value_size, pools [..][kv_heads][page][size],
   table [slots][table_width], positions [slots][width]. Keys are read in chunks that begin at multiples of KEYS
   positions, summed in ascending order: a row's bits do not depend on the others. sliding, softcap: 0 for none.
   Of a value the first value_size elements count. size <= 576; pages are whole sixteens. */
void spd_attend(const bf16 *query, const bf16 *keys, const bf16 *values, const int64_t *table, long table_width,
    const int64_t *positions, bf16 *out, long slots, long width, long heads, long kv_heads, long size, long value_size,
    long page,
    float scale, float softcap, long first_key, long sliding, int threads)
{
    const Attention a = {query, keys, values, table, positions, out, table_width, slots, width, heads, kv_heads,
        size, value_size, page, first_key, sliding, scale, softcap};
    long units = slots * kv_heads * parts(width * (heads / kv_heads), SIDE);
    double seen = 0;
    for (long i = width - 1; i < slots * width; i += width) seen += (double)(positions[i] + 1);
    threads = threads_for(seen * 0.3 * (double)size * (double)units / (double)slots, threads);
#pragma omp parallel num_threads(threads)
    {
        Block block;
        tiles_begin(SIDE, SIDE);
#pragma omp for schedule(static, 1) nowait
        for (long number = 0; number < units; number++) {
            const Unit unit = unit_of(&a, number), after = unit_of(&a, number + threads < units ? number + threads : 0);
            attend_unit(&a, &block, &unit, &after);
        }
        tiles_end();
    }
}
