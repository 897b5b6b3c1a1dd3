/* Products in float32 by FMA: elements are widened as they are read, the left side is kept in float32. */

/* A left side: rows of [steps][32], values of elements. */
typedef float Left;
enum { LEFT_STEP = DEPTH };

static inline long left_row(long row, long steps) { return row * steps * DEPTH; }
static inline void left_copy(Left *to, const element *from, long count) { storef(to, SIDE, load(from, count)); }
static inline void left_store(Left *to, vec x) { storef(to, SIDE, as_kept(x)); }
/* Weights of attention, which are not rounded. */
static inline void left_weights(Left *to, vec x) { storef(to, SIDE, x); }
static inline vec left_load(const Left *from) { return loadf(from, SIDE); }

/* What codes become in right-side tiles: [32][16] of it. */
typedef float Number;
static inline float number_value(Number x) { return x; }
static inline int number_place(int d, int column) { return d * SIDE + column; }
static inline void place_numbers(Number *tile, int j, vec first, vec second)
{
    storef(tile + 2 * j * SIDE, SIDE, first);
    storef(tile + (2 * j + 1) * SIDE, SIDE, second);
}

/* Rows that go through 32 columns together, and through 16: their sums fill the registers. */
enum { NARROW = SPD_WIDE ? 8 : SPD_NEON ? 2 : 3, MOST_ROWS = SPD_WIDE ? 8 : 6 };

/* Few rows go through a block in one pass, more through parts of it that stay in the first cache. */
static inline long panel_of(long rows, long steps) { return rows > NARROW ? 16 / (long)sizeof(element) : steps; }

/* Nanoseconds that a tile takes. */
static inline double tile_time(long rows) { return SPD_WIDE ? 25.0 + 8.0 * (double)rows : 30.0 + 12.0 * (double)rows; }

/* A right side is elements, or codes. */
INLINE const char *moved(const void *side, long count, const int coded)
{
    return (const char *)side + count * (coded ? 1 : (long)sizeof(element));
}

/* A tile's weights at depth 2 j, or 2 j + 1 for `second`. */
INLINE vec weights_at(const void *tile, int j, int second, const int coded)
{
    if (coded) return of_codes((const int8_t *)tile + (2 * j + second) * SIDE);
#ifdef SPD_FLOAT32
    return loadf((const float *)tile + (2 * j + second) * SIDE, SIDE);
#else
    ints pairs = loadi((const bf16 *)tile + j * DEPTH);
    return as_vec(second ? masked(pairs, (int32_t)0xffff0000) : left_by(pairs, 16));
#endif
}

/* Add to c [count][32], or write there where `fresh`, `count` rows `apart` from a on times b [steps][2] tiles, of which
   `sides` are read. */
INLINE void rows_product(const Left *a, long apart, const int count,
    const int sides, const void *b, const int coded, long steps, int fresh, Ahead *ahead, long bytes, float *c)
{
    vec sums[MOST_ROWS][2];
    Ahead next = *ahead;
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++)
            sums[r][side] = fresh ? vzero() : loadf(c + r * 32 + side * SIDE, SIDE);
    for (long k = 0; k < steps; k++, a += DEPTH, b = moved(b, 2 * TILE, coded))
#pragma GCC unroll 2
        for (int j = 0; j < SIDE; j++) {
            if (j % 4 == 0) ask(&next, bytes / 4);
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) {
                vec weights[2];
                for (int side = 0; side < sides; side++) weights[side] = weights_at(moved(b, side * TILE, coded), j, second, coded);
                for (int r = 0; r < count; r++) {
                    vec x = vall(a[r * apart + 2 * j + second]);
                    for (int side = 0; side < sides; side++) sums[r][side] = vfma(x, weights[side], sums[r][side]);
                }
            }
        }
    *ahead = next;
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++) storef(c + r * 32 + side * SIDE, SIDE, sums[r][side]);
}

/* Add to c [rows][32], or write there where `fresh`, up to two blocks of 16 rows, `apart` elements from each other, times
   b [steps][2] tiles. Meanwhile `bytes` of each place are asked for in a step. */
INLINE void sides_product(const Left *a, long apart, int rows, const void *b, const int coded, long steps, int fresh,
    Ahead *ahead, long bytes, float *c)
{
    long row = apart / SIDE, groups = parts(rows, MOST_ROWS), each = parts(bytes, groups);
    for (int first = 0, count; first < rows; first += count, groups--) {
        count = (int)parts(rows - first, groups);
        const Left *from = a + first * row;
        float *to = c + first * 32;
#define ROWS(n) \
    case n: \
        if (n <= NARROW) { \
            rows_product(from, row, n, 2, b, coded, steps, fresh, ahead, each, to); \
            break; \
        } \
        for (int side = 0; side < 2; side++) \
            rows_product(from, row, n, 1, moved(b, side * TILE, coded), coded, steps, fresh, \
                ahead, parts(each, 2), to + side * SIDE); \
        break;
        switch (count) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if SPD_WIDE
            ROWS(7) ROWS(8)
#endif
        }
    }
}

/* Add to c [count][32], or write there where `fresh`, `count` rows `apart` from a on times b [steps][2] tiles of numbers
   at depths `from` to `to`; of each tile's two sides, `sides` are read. */
INLINE void number_rows(const Left *a, long apart, const int count, const int sides, const Number *b, long steps,
    int from, int to, int fresh, float *c)
{
    vec sums[MOST_ROWS][2];
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++)
            sums[r][side] = fresh ? vzero() : loadf(c + r * 32 + side * SIDE, SIDE);
    for (long k = 0; k < steps; k++, a += DEPTH, b += 2 * TILE)
#pragma GCC unroll 2
        for (int d = from; d < to; d++) {
            vec weights[2];
            for (int side = 0; side < sides; side++) weights[side] = loadf(b + side * TILE + d * SIDE, SIDE);
            for (int r = 0; r < count; r++) {
                vec x = vall(a[r * apart + d]);
                for (int side = 0; side < sides; side++) sums[r][side] = vfma(x, weights[side], sums[r][side]);
            }
        }
    for (int r = 0; r < count; r++)
        for (int side = 0; side < sides; side++) storef(c + r * 32 + side * SIDE, SIDE, sums[r][side]);
}

/* Add to c [rows][32], or write there where `fresh`, up to 32 rows from a on times b [steps][2] tiles of numbers, each
   at depths `from` to `to`. apart: elements between blocks of 16 rows. */
static inline void number_product(const Left *a, long apart, int rows, const Number *b, long steps, int from, int to,
    int fresh, float *c)
{
    long row = apart / SIDE, groups = parts(rows, MOST_ROWS);
    for (int first = 0, count; first < rows; first += count, groups--) {
        count = (int)parts(rows - first, groups);
        const Left *own = a + first * row;
        float *sums = c + first * 32;
#define ROWS_OF(n) \
    case n: \
        if (n <= NARROW) number_rows(own, row, n, 2, b, steps, from, to, fresh, sums); \
        else \
            for (int side = 0; side < 2; side++) \
                number_rows(own, row, n, 1, b + side * TILE, steps, from, to, fresh, sums + side * SIDE); \
        break;
        switch (count) {
            ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6)
#if SPD_WIDE
            ROWS_OF(7) ROWS_OF(8)
#endif
        }
    }
}

static inline void block_product(const Left *a, long apart, int blocks, int rows, const element *b, long steps,
    int fresh, Ahead *ahead, long bytes, float *c)
{
    (void)blocks;
    sides_product(a, apart, rows, b, 0, steps, fresh, ahead, bytes, c);
}

/* The same of one block of rows with codes. */
static inline void cached_product(const Left *a, long apart, int rows, const int8_t *b, long steps, int fresh,
    Ahead *ahead, long bytes, float *c)
{
    sides_product(a, apart, rows, b, 1, steps, fresh, ahead, bytes, c);
}
