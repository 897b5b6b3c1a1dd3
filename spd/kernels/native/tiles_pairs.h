/* Left sides where the processor multiplies pairs of bfloat16. */

#if !SPD_AMX
#include "tiles_avx512.h"
#endif

/* A left side: [parts(rows, 16)][steps] tiles of [16 rows][32]. */
typedef bf16 Left;
enum { LEFT_STEP = TILE };

static inline long left_row(long row, long steps) { return (row / SIDE * steps * SIDE + row % SIDE) * DEPTH; }
static inline void left_copy(Left *to, const bf16 *from, long count) { store_halves(to, SIDE, halves(from, count)); }
static inline void left_store(Left *to, vec x) { store(to, SIDE, x); }
/* Weights of attention. */
static inline void left_weights(Left *to, vec x) { store(to, SIDE, x); }
static inline vec left_load(const Left *from) { return load(from, SIDE); }

/* What codes become in right-side tiles, which are as those of elements are. */
typedef bf16 Number;
static inline float number_value(Number x) { return vfirst(load(&x, 1)); }
static inline int number_place(int d, int column) { return tile_place(d, column); }
static inline void place_numbers(Number *tile, int j, vec first, vec second)
{
    storei(tile + j * DEPTH, either(right(as_ints(first), 16), masked(as_ints(second), (int32_t)0xffff0000)));
}

/* Add to c [rows][32], or write there where `fresh`, up to 32 rows from a on times b [steps][2] tiles of numbers, which
   are 0 where they are not of depths `from` to `to`. apart: elements between blocks of 16 rows. */
static inline void number_product(const Left *a, long apart, int rows, const Number *b, long steps, int from, int to,
    int fresh, float *c)
{
    (void)from, (void)to;
    Ahead nothing = {0};
    block_product(a, apart, rows > SIDE ? 2 : 1, rows, b, steps, fresh, &nothing, 0, c);
}

/* Few rows go through a block in one pass, more through parts of it of so many steps. */
static inline long panel_of(long rows, long steps) { return rows > (SPD_AMX ? 64 : 32) ? 8 : rows > 32 ? 32 : steps; }

/* Add to c [rows][32], or write there where `fresh`, one block of 16 rows times b [steps][2] tiles of codes, which are
   widened to elements first. Meanwhile `bytes` of each place are asked for in a step. */
static inline void cached_product(const Left *a, long apart, int rows, const int8_t *b, long steps, int fresh,
    Ahead *ahead, long bytes, float *c)
{
    enum { PANEL = 4 };
    bf16 wide[PANEL * 2 * TILE] __attribute__((aligned(64)));
    for (long s = 0, count; s < steps; s += count, b += count * 2 * TILE) {
        count = steps - s < PANEL ? steps - s : PANEL;
        for (long i = 0; i < count * 2 * TILE; i += DEPTH) {
            if (i % (TILE / 4) == 0) ask(ahead, bytes / 16);
            storei(wide + i, pairs_of_codes(b + i));
        }
        block_product(a + s * LEFT_STEP, apart, 1, rows, wide, count, fresh && s == 0, ahead, bytes / 2, c);
    }
}
