/* A product with packed weights, a block of columns at a time: what the C files have in common. */

#ifndef SPD_PRODUCT_H
#define SPD_PRODUCT_H

#include "weight.h"

enum { ROOM = 256, AHEAD = SPD_WIDE ? 6 : 2 };
enum { TO_ELEMENT, TO_FLOAT, RELU2, SILU, GELU, SWIGLU }; /* from SILU on the first half of the columns are gates */

/* Blocks of a weight's columns: of 32, or of 16 gates and what goes with them. */
static inline long column_blocks(long width, int kind)
{
    return kind >= SILU ? parts(width / 2, SIDE) : parts(width, WIDTH);
}

/* One row x [depth] into its place in a left side, normed by `norm` [depth] where that is given. */
static void place_row(const element *x, const float *norm, float epsilon, long depth, Left *left)
{
    vec scale = vall(norm ? norm_scale(x, depth, epsilon) : 1.0f);
    for (long i = 0; i < depth; i += DEPTH, left += LEFT_STEP)
        for (int side = 0; side < DEPTH; side += SIDE) {
            long at = i + side, count = depth - at;
            if (norm) left_store(left + side, vmul(vmul(load(x + at, count), scale), loadf(norm + at, count)));
            else left_copy(left + side, x + at, count);
        }
}

/* kind: TO_FLOAT, or what becomes of the sums; see `spd.kernels.linear.activation`. limit: infinite for none. */
typedef struct {
    int kind;
    float limit, alpha;
} Activation;

/* Plus bias [width] and residual [rows][width] where they are given, rounded once to elements, or left as float32. */
typedef struct {
    const float *bias;
    const element *residual;
    void *out;
    long width, stride; /* of out, from a row to the next */
    Activation act;
} Ending;

/* The smaller one; what is not a number stays so. */
static inline vec at_most(vec x, vec limit) { return vselect(vmore(x, limit), limit, x); }

/* Gates x times sigmoid(x), or gelu in its form with tanh, which is x * sigmoid(2 inner(x)), and what they open. */
static inline vec opened(vec x, vec up, const Activation *act)
{
    const vec limit = vall(act->limit), one = vall(1.0f), zero = vzero();
    const int limited = act->limit < __builtin_inff();
    if (limited) {
        up = vsub(zero, at_most(vsub(zero, at_most(up, limit)), limit));
        if (act->kind == SWIGLU) x = at_most(x, limit), up = vadd(up, one);
    }
    vec inner = vmul(x, vall(act->alpha));
    if (act->kind == GELU) {
        vec cube = vmul(vmul(x, x), x);
        inner = vmul(vfma(cube, vall(0.044715f), x), vall(1.5957691216f));
    }
    x = vdiv(x, vadd(one, exponential(vsub(zero, inner))));
    return vmul(limited && act->kind == SILU ? at_most(x, limit) : x, up);
}

/* What becomes of sums [count][32] of a block of columns: rows `first` on of the result, `stride` apart. */
static void finish(const Ending *e, const float *sum, long block, long first, long count)
{
    int gated = e->act.kind >= SILU;
    long columns = gated ? e->width / 2 : e->width;
    for (long r = first; r < first + count; r++, sum += WIDTH) {
        if (gated) {
            long at = block * SIDE;
            vec g = loadf(sum, SIDE), up = loadf(sum + SIDE, SIDE);
            if (e->bias) {
                g = vadd(g, loadf(e->bias + at, columns - at));
                up = vadd(up, loadf(e->bias + columns + at, columns - at));
            }
            store((element *)e->out + r * e->stride + at, columns - at, opened(g, up, &e->act));
            continue;
        }
        for (int side = 0; side < 2; side++) {
            long at = block * WIDTH + side * SIDE, place = r * e->stride + at;
            if (at >= columns) break;
            vec y = loadf(sum + side * SIDE, SIDE);
            if (e->bias) y = vadd(y, loadf(e->bias + at, columns - at));
            if (e->act.kind == RELU2) y = vsub(vzero(), at_most(vsub(vzero(), y), vzero())), y = vmul(y, y);
            if (e->residual) y = vadd(y, load(e->residual + place, columns - at));
            if (e->act.kind == TO_FLOAT) storef((float *)e->out + place, columns - at, y);
            else store((element *)e->out + place, columns - at, y);
        }
    }
}

/* Rows of a left side times one block of a packed weight, whose tiles are given.

   Few rows go through the block in one pass. More go through panels of it that stay in a cache, while the next panel
   is fetched; their sums wait in memory, which rounds nothing. */
static void multiply(
    const Left *left, long rows, const element *right, long steps, const Ending *ending, long block)
{
    float sums[ROOM * WIDTH] __attribute__((aligned(64)));
    long row_blocks = parts(rows, SIDE), panel = panel_of(rows, steps);
    for (long top = 0; top < row_blocks; top += ROOM / SIDE) {
        long bottom = row_blocks < top + ROOM / SIDE ? row_blocks : top + ROOM / SIDE, passes = parts(bottom - top, 2);
        for (long k = 0; k < steps; k += panel) {
            const element *tiles = right + k * 2 * TILE;
            long deep = steps - k < panel ? steps - k : panel, lines = parts(2 * TILE / DEPTH, passes);
            const element *next = tiles + (panel == steps ? AHEAD : 2 * deep) * TILE;
            for (long m = top; m < bottom; m += 2)
                block_product(left + left_row(m * SIDE, steps) + k * LEFT_STEP, steps * TILE, m + 1 < bottom ? 2 : 1,
                    (int)(rows - m * SIDE < WIDTH ? rows - m * SIDE : WIDTH), tiles, deep, k == 0,
                    next + (m - top) / 2 * deep * lines * DEPTH, lines, sums + (m - top) * SIDE * WIDTH);
        }
        long first = top * SIDE, last = rows < bottom * SIDE ? rows : bottom * SIDE;
        finish(ending, sums, block, first, last - first);
    }
}

#endif
