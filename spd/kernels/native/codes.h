/* Products with weights that are kept as codes of four, five, six or eight bits, with a scale a group of columns.

   Codes become numbers that elements hold exactly; each group's sum, in ascending depth, is scaled in float32, and
   groups are added in ascending order. Rows never choose another order. A minimum is what each number of a group is
   less by: the sum of the row's own elements, times that, is taken off behind the scaled sum.

   Codes lie as tiles do, [blocks][steps], sixteen lanes of 32 bits at a time, a column's each. A step of four bits is
   8 x 16 lanes: lane z, bits 4 n + 16 s, hold side n % 2 at depth 2 (2 z + n / 2) + s. Of five bits the fifth stand
   behind them, 2 x 16 lanes: lane z / 4, bit 16 s + 4 (z % 4) + n; of six bits the upper two, 4 x 16 lanes: lane z / 2,
   bits 16 s + 8 (z % 2) + 2 n. A step of eight bits is 16 x 16 lanes: lane z, bits 8 (2 side + s), hold depth 2 z + s.
   Scales, zeros and minima lie [blocks][groups][32], their factors [blocks][depth / 256][32]. */

#ifndef SPD_CODES_H
#define SPD_CODES_H

#include "product.h"

enum { ELEMENTS, INT4, INT8, E2M1, E4M3, INT5, INT6, IQ4, MX4 };
enum { BFLOAT16, FLOAT32, FLOAT16, EXPONENTS, BYTES };
enum { LANES = 64, PANEL = 4, SUPER = 256 };

/* scale_kind: BFLOAT16, FLOAT32, FLOAT16; EXPONENTS: bytes e for 2^(e - 128); BYTES: 128 more than a whole number, times
   a factor float16 of `SUPER` columns. Minima are of the same kind, and of groups of 32. */
typedef struct {
    const void *tiles; /* elements, or codes */
    const void *scales;
    const uint8_t *zeros;
    const void *minima;
    const bf16 *factors, *minimum_factors;
    long group, groups, steps;
    int kind, scale_kind;
} Weight;

/* Whether four bits of each code lie in pairs. */
static inline int is_paired(int kind) { return kind != INT8 && kind != E4M3; }
static inline int upper_bits(int kind) { return kind == INT5 ? 1 : kind == INT6 ? 2 : 0; }
static inline long step_bytes(int kind) { return (is_paired(kind) ? 8 + 2 * upper_bits(kind) : 16) * LANES; }

/* What stands for 0 where there are neither zero points nor minima. */
static inline float middle_of(const Weight *w)
{
    if (w->minima) return 0.0f;
    return w->kind == INT4 ? 8.0f : w->kind == INT5 ? 16.0f : w->kind == INT6 ? 32.0f : 128.0f;
}

#define OF_IQ4 -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define OF_MX4 0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12
#define OF_E2M1 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6
#define OF_INT4 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15

/* Numbers of float16; what is not finite becomes infinite. */
INLINE vec of_float16(const bf16 *p)
{
    ints x = as_ints(widened(halves(p, SIDE)));
    vec size = vmul(as_vec(right(masked(x, 0x7fff0000), 3)), vall(0x1p112f));
    size = vselect(vmore(size, vall(65504.0f)), vall(__builtin_inff()), size);
    return as_vec(either(as_ints(size), masked(x, INT32_MIN)));
}

/* What both sides' scales and minima are multiplied by, where they are bytes. */
typedef struct {
    vec scale[2], minimum[2];
} Factors;

/* The factors of a group, which those behind it in the same `SUPER` columns have too. */
INLINE void load_factors(const Weight *w, long at, Factors *f)
{
    if (w->scale_kind != BYTES) return;
    long place = (at >> (w->group < DEPTH ? 4 : 3)) * WIDTH;
    for (int side = 0; side < 2; side++) {
        f->scale[side] = of_float16(w->factors + place + side * SIDE);
        if (w->minima) f->minimum[side] = of_float16(w->minimum_factors + place + side * SIDE);
    }
}

static inline int begins_super(const Weight *w, long group) { return group % (w->group < DEPTH ? 16 : 8) == 0; }

/* A group's scales or minima of columns 16 side on. */
INLINE vec scaled_by(const Weight *w, const void *numbers, vec factor, long at, int side)
{
    long place = at * WIDTH + side * SIDE;
    if (w->scale_kind == FLOAT32) return loadf((const float *)numbers + place, SIDE);
    if (w->scale_kind == BFLOAT16) return widened(halves((const bf16 *)numbers + place, SIDE));
    if (w->scale_kind == FLOAT16) return of_float16((const bf16 *)numbers + place);
    vec number = vsub(of_bytes((const uint8_t *)numbers + place), vall(128.0f));
    if (w->scale_kind == EXPONENTS) return vscaled(vall(1.0f), vmax(number, vall(-126.0f)));
    return vmul(factor, number);
}

INLINE vec scales_of(const Weight *w, const Factors *f, long at, int side)
{
    return scaled_by(w, w->scales, f->scale[side], at, side);
}
INLINE vec minima_of(const Weight *w, const Factors *f, long at, int side)
{
    return scaled_by(w, w->minima, f->minimum[side], at, side);
}

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

/* The upper bits of codes in the lower bits x of lanes: side n % 2 of lane z, half s. */
INLINE ints with_upper(ints x, const uint8_t *codes, const int kind, int z, int n, int s)
{
    const int bits = kind == INT5 ? 1 : 2, lanes = 4 / bits;
    ints upper = loadi(codes + (8 + z / lanes) * LANES);
    upper = masked(right(upper, (unsigned)(16 * s + 4 * bits * (z % lanes) + bits * n)), (1 << bits) - 1);
    return either(masked(x, 15), left_by(upper, 4));
}

INLINE void decode_kind(
    const uint8_t *codes, const int kind, const vec *zeros, int from, int to, element *tiles)
{
    for (int j = from; j < to; j++)
        for (int side = 0; side < 2; side++) {
            int paired = is_paired(kind), at = paired ? 4 * (j % 2 * 2 + side) : 16 * side;
            ints x = loadi(codes + (paired ? j / 2 : j) * LANES);
            ints first = right(x, (unsigned)at), second = right(x, (unsigned)(at + (paired ? 16 : 8)));
            if (kind == INT5 || kind == INT6) {
                first = with_upper(first, codes, kind, j / 2, j % 2 * 2 + side, 0);
                second = with_upper(second, codes, kind, j / 2, j % 2 * 2 + side, 1);
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

/* One row x [depth] into its place in what is multiplied by a weight; see place_row. */
static void place_left(
    const Weight *w, const element *x, const float *norm, float epsilon, long depth, Rows rows, long row)
{
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
