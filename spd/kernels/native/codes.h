/* Products with weights that are kept as codes of four, five, six or eight bits, with a scale a group of columns.

   Codes become numbers that elements hold exactly: in registers where few rows meet them, else in tiles that stay in the
   first cache, of pairs of bfloat16 where the processor multiplies such, or of float32. Each group's sum, in ascending
   depth, is scaled in float32, and groups are added in ascending order. Rows never choose another order. A minimum is
   what each number of a group is less by: the sum of the row's own elements, times that, is taken off behind the scaled
   sum. */

#ifndef SPD_CODES_H
#define SPD_CODES_H

#include "bytes.h"
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

/* True if numbers are made of bytes: see `upper_byte`. */
static inline int are_of_bytes(int kind) { return UPPER_BYTES && kind != E4M3; }

/* The unit of numbers: a byte is the upper one of 32 bits, and those of E2M1 are twice their numbers. */
static inline float unit_of(int kind)
{
    if (!are_of_bytes(kind)) return 1.0f;
    return kind == E2M1 ? 0x1p-25f : 0x1p-24f;
}

/* A group's zero points, which are taken off its codes: those of both sides' columns, or one for every byte. */
typedef struct {
    vec numbers[2];
    ints bytes;
} Zeros;

INLINE Zeros group_zeros(const Weight *w, long at)
{
    const int32_t byte = zero_byte(w);
    Zeros zeros = {{vall(middle_of(w)), vall(middle_of(w))}, alli((byte & 255) * 0x01010101)};
    for (int side = 0; w->zeros && side < 2; side++) {
        vec numbers = of_bytes(w->zeros + at * WIDTH + side * SIDE);
        if (are_of_bytes(w->kind)) numbers = vmul(vadd(numbers, vall((float)byte)), vall(1.0f / unit_of(w->kind)));
        zeros.numbers[side] = numbers;
    }
    return zeros;
}

/* Numbers of 16 columns of one side at depths 4 z to 4 z + 3; part: z modulo `lanes_together`. */
INLINE void numbers_at(const uint8_t *codes, const int kind, const int has_zeros, int z, const int part, const int side,
    const Zeros *zeros, vec numbers[4])
{
    (void)has_zeros;
#if UPPER_BYTES
    if (are_of_bytes(kind)) {
        const __m256i *places = upper_places();
        ints bytes = bytes_of(codes, kind, z, part, side);
        if (!has_zeros && kind != IQ4 && kind != INT8) bytes = bytes_less(bytes, zeros->bytes);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            numbers[n] = of_ints(upper_byte(bytes, n / 2 + n % 2 * 2, places));
            if (has_zeros) numbers[n] = vsub(numbers[n], zeros->numbers[side]);
        }
        return;
    }
#endif
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) numbers[n] = number_at(codes, kind, z, part, n, side, zeros->numbers[side]);
}

/* Call `of_kind(w, kind, has_zeros, ...)` with constants for the weight's kind and zero points. */
#define OF_KIND(of_kind, w, ...) \
    if (w->kind == INT4 && w->zeros) of_kind(w, INT4, 1, __VA_ARGS__); \
    else if (w->kind == INT4) of_kind(w, INT4, 0, __VA_ARGS__); \
    else if (w->kind == INT8 && w->zeros) of_kind(w, INT8, 1, __VA_ARGS__); \
    else if (w->kind == INT8) of_kind(w, INT8, 0, __VA_ARGS__); \
    else if (w->kind == E2M1) of_kind(w, E2M1, 0, __VA_ARGS__); \
    else if (w->kind == INT5) of_kind(w, INT5, 0, __VA_ARGS__); \
    else if (w->kind == INT6) of_kind(w, INT6, 0, __VA_ARGS__); \
    else if (w->kind == IQ4) of_kind(w, IQ4, 0, __VA_ARGS__); \
    else if (w->kind == MX4) of_kind(w, MX4, 0, __VA_ARGS__); \
    else of_kind(w, E4M3, 0, __VA_ARGS__)

INLINE void decode_kind(const Weight *w, const int kind, const int has_zeros, const uint8_t *codes, const Zeros *zeros,
    int from, int to, Number *tiles)
{
    (void)w;
    for (int z = from / 4; z < to / 4; z += lanes_together(kind))
#pragma GCC unroll 4
        for (int part = 0; part < lanes_together(kind); part++)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                vec numbers[4];
                numbers_at(codes, kind, has_zeros, z + part, part, side, zeros, numbers);
                place_numbers(tiles + side * TILE, 2 * (z + part), numbers[0], numbers[1]);
                place_numbers(tiles + side * TILE, 2 * (z + part) + 1, numbers[2], numbers[3]);
            }
}

/* One step of a block into two tiles of numbers: depths `from` to `to`. */
static void decode(const Weight *w, const uint8_t *codes, const Zeros *zeros, int from, int to, Number *tiles)
{
    if (SPD_PAIRS && to - from < DEPTH) memset(tiles, 0, 2 * TILE * sizeof(Number));
    OF_KIND(decode_kind, w, codes, zeros, from, to, tiles);
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
INLINE void one_row(const Weight *w, const int kind, const int has_zeros, const Left *a, const float *row_sums,
    const uint8_t *codes, long at, float *c)
{
    const long size = step_bytes(kind), halved = w->group < DEPTH;
    const vec unit = vall(unit_of(kind));
    Factors factors = {0};
    Zeros zeros = group_zeros(w, at);
    memset(c, 0, WIDTH * sizeof *c);
    for (long g = 0; g < w->groups; g++) {
        long k = g * w->group / DEPTH, last = parts((g + 1) * w->group, DEPTH);
        int from = halved && g % 2 ? 4 : 0, to = halved && g % 2 == 0 ? 4 : 8;
        vec sums[2] = {vzero(), vzero()};
        if (has_zeros) zeros = group_zeros(w, at + g);
        if (begins_super(w, g)) load_factors(w, at + g, &factors);
        for (last = last < w->steps ? last : w->steps; k < last; k++) {
            const uint8_t *step = codes + k * size;
            for (long line = 0; line < size; line += LANES) __builtin_prefetch(step + line + 4096, 0, 3);
            for (int z = from; z < to; z += lanes_together(kind))
#pragma GCC unroll 4
                for (int part = 0; part < lanes_together(kind); part++)
#pragma GCC unroll 2
                    for (int side = 0; side < 2; side++) {
                        vec numbers[4];
                        numbers_at(step, kind, has_zeros, z + part, part, side, &zeros, numbers);
#pragma GCC unroll 4
                        for (int n = 0; n < 4; n++)
                            sums[side] = vfma(vall(a[k * DEPTH + 4 * (z + part) + n]), numbers[n], sums[side]);
                    }
        }
        for (int side = 0; side < 2; side++) {
            float *to_add = c + side * SIDE;
            const vec scale = vmul(scales_of(w, &factors, at + g, side), unit);
            vec sum = vfma(sums[side], scale, loadf(to_add, SIDE));
            if (w->minima) sum = vfnma(vall(row_sums[g]), minima_of(w, &factors, at + g, side), sum);
            storef(to_add, SIDE, sum);
        }
    }
}

static __attribute__((noinline)) void one_row_of_kind(
    const Left *a, const float *row_sums, const Weight *w, const uint8_t *codes, long at, float *c)
{
    OF_KIND(one_row, w, a, row_sums, codes, at, c);
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
    const vec unit = vall(unit_of(w->kind));
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
            Zeros zeros = group_zeros(w, at);
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
                    Number *tiles_at = numbers + i * 2 * TILE;
#if SPD_PAIRS
                    if (is_paired(w->kind)) decode_by_tables(&tables, w, step, from, to, tiles_at);
                    else
#endif
                        decode(w, step, &zeros, from, to, tiles_at);
                }
                for (long m = 0; m < count; m += WIDTH)
                    number_product(left + left_row(top + m, steps) + k * LEFT_STEP, steps * TILE,
                        (int)(count - m < WIDTH ? count - m : WIDTH), numbers, deep, from, to, k == first, part + m * WIDTH);
            }
            for (int side = 0; side < 2; side++) {
                const vec scale = vmul(scales_of(w, &factors, at, side), unit);
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
