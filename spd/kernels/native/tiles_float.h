/* Products in float32 by FMA: elements are widened as they are read, the left side is kept in float32. */

/* A left side: rows of [steps][32], values of elements. */
typedef float Left;
enum { LEFT_STEP = DEPTH };

static inline long left_row(long row, long steps) { return row * steps * DEPTH; }
static inline void left_copy(Left *to, const element *from, long count) { storef(to, SIDE, load(from, count)); }
static inline void left_store(Left *to, vec x) { storef(to, SIDE, as_kept(x)); }
static inline vec left_load(const Left *from) { return loadf(from, SIDE); }

/* Rows that go through 32 columns together, and through 16: their sums fill the registers. */
enum { NARROW = SPD_WIDE ? 8 : SPD_NEON ? 2 : 3, MOST_ROWS = SPD_WIDE ? 8 : 6 };

/* Few rows go through a block in one pass, more through parts of it that stay in the first cache. */
static inline long panel_of(long rows, long steps) { return rows > NARROW ? 16 / (long)sizeof(element) : steps; }

/* Nanoseconds that a tile takes. */
static inline double tile_time(long rows) { return SPD_WIDE ? 25.0 + 8.0 * (double)rows : 30.0 + 12.0 * (double)rows; }

/* A tile's weights at depth 2 j, or 2 j + 1 for `second`. */
static inline vec weights_at(const element *tile, int j, int second)
{
#ifdef SPD_FLOAT32
    return loadf(tile + (2 * j + second) * SIDE, SIDE);
#else
    ints pairs = loadi(tile + j * DEPTH);
    return as_vec(second ? masked(pairs, (int32_t)0xffff0000) : left_by(pairs, 16));
#endif
}

/* Add to c [count][32], or write there where `fresh`, `count` rows `apart` from a on times b [steps][2] tiles, of which
   `sides` are read. */
INLINE void rows_product(const Left *a, long apart, const int count,
    const int sides, const element *b, long steps, int fresh, const element *next, long lines, float *c)
{
    vec sums[MOST_ROWS][2];
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++)
            sums[r][side] = fresh ? vzero() : loadf(c + r * 32 + side * SIDE, SIDE);
    for (long k = 0; k < steps; k++, a += DEPTH, b += 2 * TILE, next += lines * DEPTH)
#pragma GCC unroll 2
        for (int j = 0; j < SIDE; j++) {
            for (int i = 0; 2 * j < lines && i < 2 * DEPTH; i += LINE) __builtin_prefetch(next + 2 * j * DEPTH + i, 0, 3);
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) {
                vec weights[2];
                for (int side = 0; side < sides; side++) weights[side] = weights_at(b + side * TILE, j, second);
                for (int r = 0; r < count; r++) {
                    vec x = vall(a[r * apart + 2 * j + second]);
                    for (int side = 0; side < sides; side++) sums[r][side] = vfma(x, weights[side], sums[r][side]);
                }
            }
        }
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++) storef(c + r * 32 + side * SIDE, SIDE, sums[r][side]);
}

/* Add to c [rows][32], or write there where `fresh`, up to two blocks of 16 rows, `apart` elements from each other, times
   b [steps][2] tiles. Meanwhile `lines` of 32 elements a step are asked for, from `next` on. */
static inline void block_product(const Left *a, long apart, int blocks, int rows, const element *b, long steps,
    int fresh, const element *next, long lines, float *c)
{
    long row = apart / SIDE, groups = parts(rows, MOST_ROWS), each = parts(lines, groups);
    (void)blocks;
    for (int first = 0, count; first < rows; first += count, groups--) {
        count = (int)parts(rows - first, groups);
        const Left *from = a + first * row;
        float *to = c + first * 32;
#define ROWS(n) \
    case n: \
        if (n <= NARROW) { \
            rows_product(from, row, n, 2, b, steps, fresh, next, each, to); \
            break; \
        } \
        for (int side = 0; side < 2; side++) \
            rows_product(from, row, n, 1, b + side * TILE, steps, fresh, next + side * (each / 2) * steps * DEPTH, \
                each / 2, to + side * SIDE); \
        break;
        switch (count) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if SPD_WIDE
            ROWS(7) ROWS(8)
#endif
        }
        next += each * steps * DEPTH;
    }
}

/* What attention multiplies: up to 16 rows' queries and weights, 16 keys, and where KEYS values lie. `clean` has room
   for values that are changed. */
typedef struct {
    float query[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float keys[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float weights[SIDE][KEYS] __attribute__((aligned(64)));
    element clean[KEYS][LARGEST_HEAD] __attribute__((aligned(64)));
    const element *values[KEYS];
} Sides;

static inline void clear_queries(Sides *s, long size) { (void)s, (void)size; }

static inline void widen(const element *from, long size, float *to)
{
    long d = 0;
    for (; d + SIDE <= size; d += SIDE) storef(to + d, SIDE, load(from + d, SIDE));
    if (d < size) storef(to + d, SIDE, load(from + d, size - d));
}

static inline void place_query(Sides *s, int row, const element *from, long size) { widen(from, size, s->query[row]); }

/* scores [rows][16], rows `apart`, of 16 keys of `size` elements that lie behind each other. Each is summed in 16 parts
   of ascending depth, which are added up. */
static inline void score_keys(Sides *s, const element *keys, long size, int rows, float *scores, long apart)
{
    for (int i = 0; i < SIDE; i++) widen(keys + i * size, size, s->keys[i]);
    for (int r = 0; r < rows; r++)
        for (int first = 0; first < SIDE; first += 4) {
            vec sums[4] = {vzero(), vzero(), vzero(), vzero()};
            for (long d = 0; d < size; d += SIDE) {
                vec q = loadf(s->query[r] + d, SIDE);
                for (int i = 0; i < 4; i++) sums[i] = vfma(q, loadf(s->keys[first + i] + d, SIDE), sums[i]);
            }
            sum_four(sums, scores + r * apart + first);
        }
}

/* A row's weights of keys 16 i on. */
static inline void place_weights(Sides *s, int row, long i, vec weights)
{
    storef(s->weights[row] + i * SIDE, SIDE, weights);
}

/* Where the values of keys k and k + 1 lie, null beyond the last. What is not finite shows in sums: see clean_values. */
static inline int place_values(Sides *s, long k, const element *one, const element *other, long size, uint8_t *wild)
{
    (void)size, (void)wild;
    s->values[k] = one, s->values[k + 1] = other;
    return 0;
}

/* Values [count][size] that are not finite become 0, `wild` says of which keys; returns whether there are any. */
static inline int clean_values(Sides *s, long size, long count, uint8_t *wild)
{
    int some = 0;
    for (long k = 0; k < count; k++) {
        vec rest = vzero(); /* x - x is 0 where x is finite, else NaN, which stays */
        for (long d = 0; d < size; d += SIDE) {
            vec x = load(s->values[k] + d, size - d), none = vsub(x, x);
            rest = vadd(rest, none);
            store(s->clean[k] + d, SIDE, vselect(vdiffers(none, vzero()), vzero(), x));
        }
        if (!any_nan(rest)) continue;
        s->values[k] = s->clean[k];
        some = wild[k] = 1;
    }
    return some;
}

INLINE int mix_rows(
    const Sides *s, int row, const int rows, long d, long left, long count, float *mixed)
{
    vec sums[4], rest = vzero();
    for (int r = 0; r < rows; r++) sums[r] = vzero();
    for (long k = 0; k < count; k++) {
        vec values = load(s->values[k] + d, left);
        for (int r = 0; r < rows; r++) sums[r] = vfma(vall(s->weights[row + r][k]), values, sums[r]);
    }
    for (int r = 0; r < rows; r++) {
        storef(mixed + (row + r) * 2 * SIDE, SIDE, sums[r]);
        rest = vadd(rest, vsub(sums[r], sums[r]));
    }
    return any_nan(rest);
}

/* mixed [rows][32]: each row's weights of `count` keys times elements d to d + 31 of their values; returns whether any
   is not finite. */
static inline int mix_values(const Sides *s, long d, long size, int rows, long count, float *mixed)
{
    int wild = 0;
    for (long end = d + DEPTH; d < size && d < end; d += SIDE, mixed += SIDE) {
        long left = size - d;
        int row = 0;
#define MIX(n) (left >= SIDE ? mix_rows(s, row, n, d, SIDE, count, mixed) : mix_rows(s, row, n, d, left, count, mixed))
        for (; row + 4 <= rows; row += 4) wild |= MIX(4);
        for (; row + 2 <= rows; row += 2) wild |= MIX(2);
        if (row < rows) wild |= MIX(1);
    }
    return wild;
}
