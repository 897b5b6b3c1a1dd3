/* Products with weights that are kept as codes of four, five, six or eight bits, with a scale a group of columns.

   Codes become numbers that elements hold exactly; each group's sum, in ascending depth, is scaled in float32, and
   groups are added in ascending order. Rows never choose another order. A minimum is what each number of a group is
   less by: the sum of the row's own elements, times that, is taken off behind the scaled sum. */

#ifndef SPD_CODES_H
#define SPD_CODES_H

#include "int8.h"
#include "product.h"

/* What codes in the lower bits of lanes stand for. */
INLINE vec number(ints x, const int kind, vec zero)
{
    static const float e2m1[SIDE] = {OF_E2M1}, iq4[SIDE] = {OF_IQ4}, mx4[SIDE] = {OF_MX4};
    if (kind == INT4) return vsub(of_ints(masked(x, 15)), zero);
    if (kind == INT5 || kind == INT6) return vsub(of_ints(x), zero);
    if (kind == IQ4) return of_table(iq4, x);
    if (kind == MX4) return of_table(mx4, x);
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

/* Codes with the lower bits x of lane z, of one of its bytes. */
INLINE ints with_upper(ints x, const uint8_t *codes, const int kind, int z, int byte, int side)
{
    const int bits = kind == INT5 ? 1 : 2, lanes = 4 / bits;
    ints upper = loadi(codes + (8 + z / lanes) * LANES);
    upper = masked(right(upper, (unsigned)(8 * byte + bits * (2 * (z % lanes) + side))), (1 << bits) - 1);
    return either(masked(x, 15), left_by(upper, 4));
}

INLINE void decode_kind(
    const uint8_t *codes, const int kind, const vec *zeros, int from, int to, element *tiles)
{
    for (int j = from; j < to; j++)
        for (int side = 0; side < 2; side++) {
            int z = j / 2, byte = j % 2, paired = is_paired(kind), at = 8 * byte + (paired ? 4 * side : 0);
            ints x = loadi(codes + (paired ? z : 2 * z + side) * LANES);
            ints first = right(x, (unsigned)at), second = right(x, (unsigned)(at + 16));
            if (kind == INT5 || kind == INT6) {
                first = with_upper(first, codes, kind, z, byte, side);
                second = with_upper(second, codes, kind, z, byte + 2, side);
            }
            place_pair(tiles + side * TILE, j, number(first, kind, zeros[side]), number(second, kind, zeros[side]));
        }
}

/* One step of a block into two right-side tiles: pairs `from` to `to`, the others zero. */
static void decode(const uint8_t *codes, int kind, const vec *zeros, int from, int to, element *tiles)
{
    if (from || to < SIDE) memset(tiles, 0, 2 * TILE * sizeof(element));
    if (kind == INT4) decode_kind(codes, INT4, zeros, from, to, tiles);
    else if (kind == INT8) decode_kind(codes, INT8, zeros, from, to, tiles);
    else if (kind == E2M1) decode_kind(codes, E2M1, zeros, from, to, tiles);
    else if (kind == INT5) decode_kind(codes, INT5, zeros, from, to, tiles);
    else if (kind == INT6) decode_kind(codes, INT6, zeros, from, to, tiles);
    else if (kind == IQ4) decode_kind(codes, IQ4, zeros, from, to, tiles);
    else if (kind == MX4) decode_kind(codes, MX4, zeros, from, to, tiles);
    else decode_kind(codes, E4M3, zeros, from, to, tiles);
}

/* A left side, and the sum of each row's elements of every step: [rows][steps]. */
typedef struct {
    Left *left;
    float *sums;
} Rows;

/* Rows from tile `tiles` of a left side on. */
static inline Rows rows_at(Rows rows, long tiles) { return (Rows){rows.left + tiles * TILE, rows.sums + tiles * SIDE}; }

/* Whether products read the codes themselves, by instructions that this processor has. */
static inline int is_fused(const Weight *w)
{
    if (SPD_PAIRS && !SPD_AMX) return is_paired(w->kind) || (w->kind == INT8 && !w->zeros);
    if (SPD_WIDE || SPD_NEON || w->minima || w->scale_kind > FLOAT32) return 0;
    return w->kind == INT4 || w->kind == E2M1;
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

/* One row x [depth] into its place in what is multiplied by a weight; see place_row and place_int8. */
static void place_left(
    const Weight *w, const element *x, const float *norm, float epsilon, long depth, Rows rows, long row)
{
    if (w->rounds_rows) {
        place_int8(x, norm, epsilon, depth, w, rows.left, row);
        return;
    }
    Left *left = rows.left + left_row(row, w->steps);
    place_row(x, norm, epsilon, depth, left);
    if (w->minima)
        for (long k = 0; k < w->steps; k++) {
            const Left *step = left + k * LEFT_STEP;
            rows.sums[row * w->steps + k] = vsum(vadd(left_load(step), left_load(step + SIDE)));
        }
#if !SPD_WIDE && !SPD_NEON
    if (is_fused(w))
        for (long k = 0; k < w->steps; k++) into_digits(left + k * LEFT_STEP);
#endif
}

/* Rows of a left side times block `index` of a weight in codes; `block` is its number among the columns'. */
static void multiply_codes(Rows from_rows, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    const Left *left = from_rows.left;
    float total[ROOM * WIDTH] __attribute__((aligned(64))), part[ROOM * WIDTH] __attribute__((aligned(64)));
    element tiles[PANEL * 2 * TILE] __attribute__((aligned(64)));
    long steps = w->steps, groups = w->groups, halved = w->group < DEPTH;
    const uint8_t *codes = (const uint8_t *)w->tiles + index * steps * step_bytes(w->kind);
    Factors factors = {0};
    for (long top = 0, count; top < rows; top += count) {
        count = rows - top < ROOM ? rows - top : ROOM;
        if (w->rounds_rows) {
            int8_product(left, top, count, w, codes, index * groups, total);
            finish(ending, total, block, top, count);
            continue;
        }
#if SPD_FUSED
        /* the tiles' sums are the same: with pairs, many rows are worth decoding once */
        if (is_fused(w) && (!SPD_PAIRS || halved || count <= SIDE)) {
            codes_product(from_rows, top, count, w, codes, index * groups, total);
            finish(ending, total, block, top, count);
            continue;
        }
#endif
        memset(total, 0, (size_t)(count * WIDTH) * sizeof(float));
        for (long g = 0; g < groups; g++) {
            long first = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH), at = index * groups + g;
            int from = halved && g % 2 ? SIDE / 2 : 0, to = halved && g % 2 == 0 ? SIDE / 2 : SIDE;
            vec zeros[2] = {vall(middle_of(w)), vall(middle_of(w))};
            if (w->zeros)
                for (int side = 0; side < 2; side++) zeros[side] = of_bytes(w->zeros + at * WIDTH + side * SIDE);
            if (begins_super(w, g)) load_factors(w, at, &factors);
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
                vec scale = scales_of(w, &factors, at, side);
                for (long r = 0; r < count; r++) {
                    float *to_add = total + r * WIDTH + side * SIDE;
                    vec sum = vfma(loadf(part + r * WIDTH + side * SIDE, SIDE), scale, loadf(to_add, SIDE));
                    if (w->minima) sum = vfnma(vall(from_rows.sums[(top + r) * steps + g]), minima_of(w, &factors, at, side), sum);
                    storef(to_add, SIDE, sum);
                }
            }
        }
        finish(ending, total, block, top, count);
    }
}

/* Rows of a left side times block `index` of a weight, whatever it is kept in. */
static void multiply_weight(Rows left, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    if (w->kind == ELEMENTS)
        multiply(left.left, rows, (const element *)w->tiles + index * w->steps * 2 * TILE, w->steps, ending, block);
    else multiply_codes(left, rows, w, index, ending, block);
}

#endif
