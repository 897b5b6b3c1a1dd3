/* A product with packed weights, a block of columns at a time: what the C files have in common. */

#ifndef SPD_PRODUCT_H
#define SPD_PRODUCT_H

#include "tiles.h"

enum { WIDTH = 2 * SIDE, ROOM = 256, PANEL = 8, AHEAD = 6 };
enum { TO_BF16, TO_FLOAT, SILU, GELU };

/* Blocks of a weight's columns: of 32, or of 16 gates and what goes with them. */
static inline long column_blocks(long width, int kind)
{
    return kind >= SILU ? parts(width / 2, SIDE) : parts(width, WIDTH);
}

/* One row x [depth] into its place in left-side tiles, normed by `norm` [depth] where that is given. */
static void place_row(const bf16 *x, const float *norm, float epsilon, long depth, bf16 *tiles)
{
    __m512 scale = _mm512_set1_ps(norm ? norm_scale(x, depth, epsilon) : 1.0f);
    for (long i = 0; i < depth; i += DEPTH, tiles += TILE)
        for (int side = 0; side < DEPTH; side += SIDE) {
            __mmask16 mask = depth - i - side > 0 ? lanes(depth - i - side) : 0;
            if (!norm) {
                _mm256_storeu_si256((__m256i *)(tiles + side), _mm256_maskz_loadu_epi16(mask, x + i + side));
                continue;
            }
            __m512 scales = _mm512_maskz_loadu_ps(mask, norm + i + side);
            store(tiles + side, 0xffff, _mm512_mul_ps(_mm512_mul_ps(load(x + i + side, mask), scale), scales));
        }
}

/* The gate of a sum: x * sigmoid(x), or gelu in its form with tanh, which is x * sigmoid(2 inner(x)). */
static inline __m512 gate(__m512 x, int kind)
{
    __m512 inner = x, one = _mm512_set1_ps(1.0f);
    if (kind == GELU) {
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        inner = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(1.5957691216f));
    }
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), inner))));
}

typedef struct {
    const float *bias;
    const bf16 *residual;
    void *out;
    long width, stride;
    int kind;
} Ending;

/* What becomes of sums [count][32] of a block of columns: rows `first` on of the result, `stride` apart. */
static void finish(const Ending *e, const float *sum, long block, long first, long count)
{
    int gated = e->kind >= SILU;
    long columns = gated ? e->width / 2 : e->width;
    for (long r = first; r < first + count; r++, sum += WIDTH) {
        if (gated) {
            long at = block * SIDE;
            __mmask16 mask = lanes(columns - at);
            __m512 g = _mm512_load_ps(sum), up = _mm512_load_ps(sum + SIDE);
            if (e->bias) {
                g = _mm512_add_ps(g, _mm512_maskz_loadu_ps(mask, e->bias + at));
                up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(mask, e->bias + columns + at));
            }
            store((bf16 *)e->out + r * e->stride + at, mask, _mm512_mul_ps(gate(g, e->kind), up));
            continue;
        }
        for (int side = 0; side < 2; side++) {
            long at = block * WIDTH + side * SIDE, place = r * e->stride + at;
            if (at >= columns) break;
            __mmask16 mask = lanes(columns - at);
            __m512 y = _mm512_load_ps(sum + side * SIDE);
            if (e->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, e->bias + at));
            if (e->residual) y = _mm512_add_ps(y, load(e->residual + place, mask));
            if (e->kind == TO_FLOAT) _mm512_mask_storeu_ps((float *)e->out + place, mask, y);
            else store((bf16 *)e->out + place, mask, y);
        }
    }
}

/* Rows in left-side tiles [parts(rows, 16)][steps] times one block of a packed weight, whose tiles are given.

   Few rows go through the block in one pass. More go through panels of it that stay in the first cache, while the
   next panel is fetched; their sums wait in memory, which rounds nothing. */
static void multiply(
    const bf16 *left, long rows, const bf16 *right, long steps, const Ending *ending, long block)
{
    float sums[ROOM * WIDTH] __attribute__((aligned(64)));
    long row_blocks = parts(rows, SIDE), panel = rows > 2 * WIDTH ? PANEL : rows > WIDTH ? 4 * PANEL : steps;
    for (long top = 0; top < row_blocks; top += ROOM / SIDE) {
        long bottom = row_blocks < top + ROOM / SIDE ? row_blocks : top + ROOM / SIDE, passes = parts(bottom - top, 2);
        for (long k = 0; k < steps; k += panel) {
            const bf16 *tiles = right + k * 2 * TILE;
            long deep = steps - k < panel ? steps - k : panel, lines = parts(2 * TILE / DEPTH, passes);
            const bf16 *next = tiles + (passes == 1 ? AHEAD : 2 * deep) * TILE;
            for (long m = top; m < bottom; m += 2)
                block_product(left + (m * steps + k) * TILE, steps * TILE, m + 1 < bottom ? 2 : 1,
                    (int)(rows - m * SIDE < WIDTH ? rows - m * SIDE : WIDTH), tiles, deep, k == 0,
                    next + (m - top) / 2 * deep * lines * DEPTH, lines, sums + (m - top) * SIDE * WIDTH);
        }
        long first = top * SIDE, last = rows < bottom * SIDE ? rows : bottom * SIDE;
        finish(ending, sums, block, first, last - first);
    }
}

#endif
