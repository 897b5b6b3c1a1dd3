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
#if SPD_WIDE
    return widened(_mm256_loadu_si256((const __m256i *)((const bf16 *)w->scales + at)));
#else
    return widened(halves((const bf16 *)w->scales + at, SIDE));
#endif
}

#if SPD_WIDE
typedef __m512i ints;
static inline ints loadi(const void *p) { return _mm512_loadu_si512(p); }
static inline ints right(ints x, unsigned n) { return _mm512_srli_epi32(x, n); }
static inline ints left_by(ints x, unsigned n) { return _mm512_slli_epi32(x, n); }
static inline ints masked(ints x, int32_t bits) { return _mm512_and_si512(x, _mm512_set1_epi32(bits)); }
static inline ints either(ints x, ints y) { return _mm512_or_si512(x, y); }
static inline ints plus(ints x, int32_t n) { return _mm512_add_epi32(x, _mm512_set1_epi32(n)); }
static inline vec of_ints(ints x) { return _mm512_cvtepi32_ps(x); }
static inline vec as_vec(ints x) { return _mm512_castsi512_ps(x); }
static inline ints as_ints(vec x) { return _mm512_castps_si512(x); }
static inline void storei(void *p, ints x) { _mm512_storeu_si512(p, x); }
static inline vec of_bytes(const uint8_t *p)
{
    return of_ints(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vec of_table(const float *table, ints x) { return _mm512_permutexvar_ps(x, _mm512_loadu_ps(table)); }
#else
typedef struct {
    __m256i low, high;
} ints;
#define EACH(op, x, ...) ((ints){op((x).low, __VA_ARGS__), op((x).high, __VA_ARGS__)})
static inline ints loadi(const void *p)
{
    return (ints){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
static inline ints right(ints x, unsigned n) { return EACH(_mm256_srli_epi32, x, (int)n); }
static inline ints left_by(ints x, unsigned n) { return EACH(_mm256_slli_epi32, x, (int)n); }
static inline ints masked(ints x, int32_t bits) { return EACH(_mm256_and_si256, x, _mm256_set1_epi32(bits)); }
static inline ints either(ints x, ints y)
{
    return (ints){_mm256_or_si256(x.low, y.low), _mm256_or_si256(x.high, y.high)};
}
static inline ints plus(ints x, int32_t n) { return EACH(_mm256_add_epi32, x, _mm256_set1_epi32(n)); }
static inline vec of_ints(ints x) { return BOTH(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)); }
static inline vec as_vec(ints x) { return BOTH(_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)); }
static inline ints as_ints(vec x) { return (ints){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
static inline void storei(void *p, ints x)
{
    _mm256_storeu_si256(p, x.low);
    _mm256_storeu_si256((__m256i *)p + 1, x.high);
}
static inline vec of_bytes(const uint8_t *p)
{
    return of_ints((ints){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))});
}
static inline __m256 of_half_table(const float *table, __m256i x)
{
    __m256 below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), x);
    __m256 above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), x);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)));
}
static inline vec of_table(const float *table, ints x)
{
    return BOTH(of_half_table(table, x.low), of_half_table(table, x.high));
}
#endif

/* What codes in the lower bits of lanes stand for. */
static inline __attribute__((always_inline)) vec number(ints x, const int kind, vec zero)
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

static inline __attribute__((always_inline)) void decode_kind(
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

#if SPD_PAIRS && !defined(SPD_AMX)
#define SPD_FUSED 1
#include "codes_avx512.h"
#elif !SPD_WIDE
#define SPD_FUSED 1
#include "codes_avx2.h"
#else
#define SPD_FUSED 0
#endif

/* One row x [depth] into its place in what is multiplied by a weight; see place_row. */
static void place_left(const Weight *w, const element *x, const float *norm, float epsilon, long depth, Left *left)
{
    place_row(x, norm, epsilon, depth, left);
#if !SPD_WIDE
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
            codes_product(left, top, count, w, codes, index * groups, groups, total);
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
