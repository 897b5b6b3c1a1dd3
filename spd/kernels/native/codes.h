/* Products with weights that are kept as codes of four, five, six or eight bits, with a scale a group of columns.

   Codes become numbers that elements hold exactly: in registers where few rows meet them, else in tiles that stay in the
   first cache, of pairs of bfloat16 where the processor multiplies such, or of float32. Each group's sum, in ascending
   depth, is scaled in float32, and groups are added in ascending order. Rows never choose another order. A minimum is
   what each number of a group is less by: the sum of the row's own elements, times that, is taken off behind the scaled
   sum. */

#ifndef SPD_CODES_H
#define SPD_CODES_H

#include "ending.h"
#include "int8.h"

enum { ROOM = 256 }; /* Rows whose sums wait in memory together. */

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

/* Lanes whose codes' upper bits lie in one lane. */
static inline int lanes_together(int kind) { return kind == INT5 ? 4 : kind == INT6 ? 2 : 1; }

/* A number of 16 columns of one side at depth 4 z + n; part: z modulo `lanes_together`. */
INLINE vec number_at(const uint8_t *codes, const int kind, int z, const int part, const int n, const int side, vec zero)
{
    const int byte = n / 2 + n % 2 * 2, paired = is_paired(kind), lanes = lanes_together(kind), bits = 4 / lanes;
    ints x = right(loadi(codes + (paired ? z : 2 * z + side) * LANES), (unsigned)(8 * byte + (paired ? 4 * side : 0)));
    if (kind == INT5 || kind == INT6) {
        ints upper = loadi(codes + (8 + z / lanes) * LANES);
        upper = masked(right(upper, (unsigned)(8 * byte + bits * (2 * part + side))), (1 << bits) - 1);
        x = either(masked(x, 15), left_by(upper, 4));
    }
    return number(x, kind, zero);
}

INLINE void decode_kind(const uint8_t *codes, const int kind, const vec *zeros, int from, int to, Number *tiles)
{
    for (int z = from / 4; z < to / 4; z += lanes_together(kind))
#pragma GCC unroll 4
        for (int part = 0; part < lanes_together(kind); part++)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++)
#pragma GCC unroll 2
                for (int n = 0; n < 4; n += 2) {
                    vec first = number_at(codes, kind, z + part, part, n, side, zeros[side]);
                    vec second = number_at(codes, kind, z + part, part, n + 1, side, zeros[side]);
                    place_numbers(tiles + side * TILE, 2 * (z + part) + n / 2, first, second);
                }
}

/* One step of a block into two tiles of numbers: depths `from` to `to`. */
static void decode(const uint8_t *codes, int kind, const vec *zeros, int from, int to, Number *tiles)
{
    if (SPD_PAIRS && to - from < DEPTH) memset(tiles, 0, 2 * TILE * sizeof(Number));
    if (kind == INT4) decode_kind(codes, INT4, zeros, from, to, tiles);
    else if (kind == INT8) decode_kind(codes, INT8, zeros, from, to, tiles);
    else if (kind == E2M1) decode_kind(codes, E2M1, zeros, from, to, tiles);
    else if (kind == INT5) decode_kind(codes, INT5, zeros, from, to, tiles);
    else if (kind == INT6) decode_kind(codes, INT6, zeros, from, to, tiles);
    else if (kind == IQ4) decode_kind(codes, IQ4, zeros, from, to, tiles);
    else if (kind == MX4) decode_kind(codes, MX4, zeros, from, to, tiles);
    else decode_kind(codes, E4M3, zeros, from, to, tiles);
}

#if SPD_PAIRS
#include "codes_tables.h"
#endif

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

#if !SPD_PAIRS
/* One row a with codes of one block, whose numbers are used as they are made: c [32]. row_sums: of the row's steps. */
INLINE void one_row(const Left *a, const float *row_sums, const Weight *w, const int kind, const uint8_t *codes, long at,
    float *c)
{
    const long size = step_bytes(kind), halved = w->group < DEPTH;
    Factors factors = {0};
    memset(c, 0, WIDTH * sizeof *c);
    for (long g = 0; g < w->groups; g++) {
        long k = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH);
        int from = halved && g % 2 ? 4 : 0, to = halved && g % 2 == 0 ? 4 : 8;
        vec sums[2] = {vzero(), vzero()}, zeros[2] = {vall(middle_of(w)), vall(middle_of(w))};
        if (w->zeros)
            for (int side = 0; side < 2; side++) zeros[side] = of_bytes(w->zeros + (at + g) * WIDTH + side * SIDE);
        if (begins_super(w, g)) load_factors(w, at + g, &factors);
        for (last = last < w->steps ? last : w->steps; k < last; k++) {
            const uint8_t *step = codes + k * size;
            for (long line = 0; line < size; line += LANES) __builtin_prefetch(step + line + 4096, 0, 3);
            for (int z = from; z < to; z += lanes_together(kind))
#pragma GCC unroll 4
                for (int part = 0; part < lanes_together(kind); part++)
#pragma GCC unroll 4
                    for (int n = 0; n < 4; n++) {
                        vec x = vall(a[k * DEPTH + 4 * (z + part) + n]);
#pragma GCC unroll 2
                        for (int side = 0; side < 2; side++)
                            sums[side] = vfma(x, number_at(step, kind, z + part, part, n, side, zeros[side]), sums[side]);
                    }
        }
        for (int side = 0; side < 2; side++) {
            float *to_add = c + side * SIDE;
            vec sum = vfma(sums[side], scales_of(w, &factors, at + g, side), loadf(to_add, SIDE));
            if (w->minima) sum = vfnma(vall(row_sums[g]), minima_of(w, &factors, at + g, side), sum);
            storef(to_add, SIDE, sum);
        }
    }
}

static __attribute__((noinline)) void one_row_of_kind(
    const Left *a, const float *row_sums, const Weight *w, const uint8_t *codes, long at, float *c)
{
    if (w->kind == INT4) one_row(a, row_sums, w, INT4, codes, at, c);
    else if (w->kind == INT8) one_row(a, row_sums, w, INT8, codes, at, c);
    else if (w->kind == E2M1) one_row(a, row_sums, w, E2M1, codes, at, c);
    else if (w->kind == INT5) one_row(a, row_sums, w, INT5, codes, at, c);
    else if (w->kind == INT6) one_row(a, row_sums, w, INT6, codes, at, c);
    else if (w->kind == IQ4) one_row(a, row_sums, w, IQ4, codes, at, c);
    else if (w->kind == MX4) one_row(a, row_sums, w, MX4, codes, at, c);
    else one_row(a, row_sums, w, E4M3, codes, at, c);
}
#endif

/* Rows of a left side times block `index` of a weight in codes; `block` is its number among the columns'. */
static void multiply_codes(Rows from_rows, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    const Left *left = from_rows.left;
    float total[ROOM * WIDTH] __attribute__((aligned(64))), part[ROOM * WIDTH] __attribute__((aligned(64)));
    Number numbers[PANEL * 2 * TILE] __attribute__((aligned(64)));
    long steps = w->steps, groups = w->groups, halved = w->group < DEPTH;
    const uint8_t *codes = (const uint8_t *)w->tiles + index * steps * step_bytes(w->kind);
    Factors factors = {0};
#if SPD_PAIRS
    CodeTables tables = code_tables(w);
#endif
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
#if !SPD_PAIRS
        if (count == 1) {
            const Left *row = left + left_row(top, steps);
            one_row_of_kind(row, from_rows.sums + top * steps, w, codes, index * groups, total);
            finish(ending, total, block, top, count);
            continue;
        }
#endif
        memset(total, 0, (size_t)(count * WIDTH) * sizeof(float));
        for (long g = 0; g < groups; g++) {
            long first = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH), at = index * groups + g;
            int from = halved && g % 2 ? SIDE : 0, to = halved && g % 2 == 0 ? SIDE : DEPTH;
            vec zeros[2] = {vall(middle_of(w)), vall(middle_of(w))};
            if (w->zeros)
                for (int side = 0; side < 2; side++) zeros[side] = of_bytes(w->zeros + at * WIDTH + side * SIDE);
#if SPD_PAIRS
            if (w->zeros && is_paired(w->kind)) load_zeros(&tables, w, at);
#endif
            if (begins_super(w, g)) load_factors(w, at, &factors);
            if (last > steps) last = steps;
            for (long k = first; k < last; k += PANEL) {
                long deep = last - k < PANEL ? last - k : PANEL;
                for (long i = 0; i < deep; i++) {
                    const uint8_t *step = codes + (k + i) * step_bytes(w->kind);
                    for (long line = 0; line < step_bytes(w->kind); line += LANES)
                        __builtin_prefetch(step + line + 4096, 0, 3);
                    Number *numbers_at = numbers + i * 2 * TILE;
#if SPD_PAIRS
                    if (is_paired(w->kind)) decode_by_tables(&tables, w, step, from, to, numbers_at);
                    else
#endif
                        decode(step, w->kind, zeros, from, to, numbers_at);
                }
                for (long m = 0; m < count; m += WIDTH)
                    number_product(left + left_row(top + m, steps) + k * LEFT_STEP, steps * TILE,
                        (int)(count - m < WIDTH ? count - m : WIDTH), numbers, deep, from, to, k == first, part + m * WIDTH);
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

#endif
