/* Products with weights that are kept as codes of four or eight bits, with a scale a group of columns.

   Codes become numbers that elements hold exactly; each group's sum, in ascending depth, is scaled in float32, and
   groups are added in ascending order. Rows never choose another order.

   Codes lie as tiles do, [blocks][steps], sixteen lanes of 32 bits at a time, a column's each. A step of four bits is
   8 x 16 lanes: lane z, bits 4 n + 16 s, hold side n % 2 at depth 2 (2 z + n / 2) + s. A step of eight bits is 16 x 16
   lanes: lane z, bits 8 (2 side + s), hold depth 2 z + s. Scales and zeros lie [blocks][groups][32]. */

#ifndef SPD_CODES_H
#define SPD_CODES_H

#include "product.h"

enum { ELEMENTS, INT4, INT8, E2M1, E4M3 };
enum { LANES = 64, PANEL = 4 };

typedef struct {
    const void *tiles;  /* elements, or codes */
    const void *scales; /* float32 where `wide`, else bfloat16 */
    const uint8_t *zeros;
    long group, groups, steps;
    int kind, wide;
} Weight;

static inline int is_paired(int kind) { return kind == INT4 || kind == E2M1; }
static inline long step_bytes(int kind) { return is_paired(kind) ? 8 * LANES : 16 * LANES; }

#define OF_E2M1 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6
#define OF_INT4 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15

/* A group's scales of columns 16 side on. */
static inline vec scales_of(const Weight *w, long at, int side)
{
    at = at * WIDTH + side * SIDE;
    if (w->wide) return loadf((const float *)w->scales + at, SIDE);
    return widened(halves((const bf16 *)w->scales + at, SIDE));
}

/* What codes in the lower bits of lanes stand for. */
INLINE vec number(ints x, const int kind, vec zero)
{
    static const float e2m1[SIDE] = {OF_E2M1};
    if (kind == INT4) return vsub(of_ints(masked(x, 15)), zero);
    if (kind == INT8) return vsub(of_ints(masked(x, 255)), zero);
    if (kind == E2M1) return of_table(e2m1, x);
    vec size = as_vec(plus(left_by(masked(x, 127), 20), 120 << 23)), least = vall(0.015625f);
    vec small = vmul(vsub(size, vall(0.0078125f)), vall(2.0f)); /* below 2**-6 there is no leading 1 */
    size = vselect(vmore(least, size), small, size);
    return as_vec(either(as_ints(size), left_by(masked(x, 128), 24)));
}

/* A pair of numbers, at depth 2 j and 2 j + 1, into a right-side tile. */
static inline void place_pair(element *tile, int j, vec first, vec second)
{
#ifdef SPD_FLOAT32
    storef(tile + 2 * j * SIDE, SIDE, first);
    storef(tile + (2 * j + 1) * SIDE, SIDE, second);
#else
    storei(tile + j * DEPTH, either(right(as_ints(first), 16), masked(as_ints(second), (int32_t)0xffff0000)));
#endif
}

INLINE void decode_kind(
    const uint8_t *codes, const int kind, const vec *zeros, int from, int to, element *tiles)
{
    for (int j = from; j < to; j++)
        for (int side = 0; side < 2; side++) {
            int paired = is_paired(kind), at = paired ? 4 * (j % 2 * 2 + side) : 16 * side;
            ints x = loadi(codes + (paired ? j / 2 : j) * LANES);
            place_pair(tiles + side * TILE, j, number(right(x, (unsigned)at), kind, zeros[side]),
                number(right(x, (unsigned)(at + (paired ? 16 : 8))), kind, zeros[side]));
        }
}

/* One step of a block into two right-side tiles: pairs `from` to `to`, the others zero. */
static void decode(const uint8_t *codes, int kind, const vec *zeros, int from, int to, element *tiles)
{
    if (from || to < SIDE) memset(tiles, 0, 2 * TILE * sizeof(element));
    if (kind == INT4) decode_kind(codes, INT4, zeros, from, to, tiles);
    else if (kind == INT8) decode_kind(codes, INT8, zeros, from, to, tiles);
    else if (kind == E2M1) decode_kind(codes, E2M1, zeros, from, to, tiles);
    else decode_kind(codes, E4M3, zeros, from, to, tiles);
}

#if SPD_PAIRS && !SPD_AMX
#define SPD_FUSED 1
#include "codes_avx512.h"
#elif !SPD_WIDE && !SPD_NEON
#define SPD_FUSED 1
#include "codes_avx2.h"
#else
#define SPD_FUSED 0
#endif

/* One row x [depth] into its place in what is multiplied by a weight; see place_row. */
static void place_left(const Weight *w, const element *x, const float *norm, float epsilon, long depth, Left *left)
{
    place_row(x, norm, epsilon, depth, left);
#if !SPD_WIDE && !SPD_NEON
    if (is_paired(w->kind))
        for (long k = 0; k < w->steps; k++) into_digits(left + k * LEFT_STEP);
#else
    (void)w;
#endif
}

/* Rows of a left side times block `index` of a weight in codes; `block` is its number among the columns'. */
static void multiply_codes(
    const Left *left, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    float total[ROOM * WIDTH] __attribute__((aligned(64))), part[ROOM * WIDTH] __attribute__((aligned(64)));
    element tiles[PANEL * 2 * TILE] __attribute__((aligned(64)));
    long steps = w->steps, groups = w->groups, halved = w->group < DEPTH;
    const uint8_t *codes = (const uint8_t *)w->tiles + index * steps * step_bytes(w->kind);
    for (long top = 0, count; top < rows; top += count) {
        count = rows - top < ROOM ? rows - top : ROOM;
#if SPD_FUSED
        /* the tiles' sums are the same: with pairs, many rows are worth decoding once */
        if (is_paired(w->kind) && (!SPD_PAIRS || halved || count <= SIDE)) {
            codes_product(left, top, count, w, codes, index * groups, total);
            finish(ending, total, block, top, count);
            continue;
        }
#endif
        memset(total, 0, (size_t)(count * WIDTH) * sizeof(float));
        for (long g = 0; g < groups; g++) {
            long first = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH), at = index * groups + g;
            int from = halved && g % 2 ? SIDE / 2 : 0, to = halved && g % 2 == 0 ? SIDE / 2 : SIDE;
            vec zeros[2] = {vall(w->kind == INT4 ? 8.0f : 128.0f), vall(w->kind == INT4 ? 8.0f : 128.0f)};
            if (w->zeros)
                for (int side = 0; side < 2; side++) zeros[side] = of_bytes(w->zeros + at * WIDTH + side * SIDE);
            if (last > steps) last = steps;
            for (long k = first; k < last; k += PANEL) {
                long deep = last - k < PANEL ? last - k : PANEL;
                for (long i = 0; i < deep; i++)
                    decode(codes + (k + i) * step_bytes(w->kind), w->kind, zeros, from, to, tiles + i * 2 * TILE);
                for (long m = 0; m < count; m += WIDTH)
                    block_product(left + left_row(top + m, steps) + k * LEFT_STEP, steps * TILE,
                        m + SIDE < count ? 2 : 1, (int)(count - m < WIDTH ? count - m : WIDTH), tiles, deep, k == first,
                        tiles, 0, part + m * WIDTH);
            }
            for (int side = 0; side < 2; side++) {
                vec scale = scales_of(w, at, side);
                for (long r = 0; r < count; r++) {
                    float *to_add = total + r * WIDTH + side * SIDE;
                    storef(to_add, SIDE, vfma(loadf(part + r * WIDTH + side * SIDE, SIDE), scale, loadf(to_add, SIDE)));
                }
            }
        }
        finish(ending, total, block, top, count);
    }
}

/* Rows of a left side times block `index` of a weight, whatever it is kept in. */
static void multiply_weight(
    const Left *left, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    if (w->kind == ELEMENTS)
        multiply(left, rows, (const element *)w->tiles + index * w->steps * 2 * TILE, w->steps, ending, block);
    else multiply_codes(left, rows, w, index, ending, block);
}

#endif
