/* Products of rows with one block of a packed weight's columns, whatever it is kept in. */

#include "codes.h"

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

void place_left(
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
            long deep = steps - k < panel ? steps - k : panel, each = parts(2 * TILE / PLACES * (long)sizeof(element), passes);
            long bytes = deep * 2 * TILE * (long)sizeof(element);
            Ahead ahead = {.end = parts(bytes, PLACES)};
            for (int i = 0; i < PLACES; i++) ahead.from[i] = (const char *)tiles + bytes + i * ahead.end;
            for (long m = top; m < bottom; m += 2)
                block_product(left + left_row(m * SIDE, steps) + k * LEFT_STEP, steps * TILE, m + 1 < bottom ? 2 : 1,
                    (int)(rows - m * SIDE < WIDTH ? rows - m * SIDE : WIDTH), tiles, deep, k == 0,
                    &ahead, each, sums + (m - top) * SIDE * WIDTH);
        }
        long first = top * SIDE, last = rows < bottom * SIDE ? rows : bottom * SIDE;
        finish(ending, sums, block, first, last - first);
    }
}

void multiply_weight(Rows left, long rows, const Weight *w, long index, const Ending *ending, long block)
{
    if (w->kind == ELEMENTS)
        multiply(left.left, rows, (const element *)w->tiles + index * w->steps * 2 * TILE, w->steps, ending, block);
    else multiply_codes(left, rows, w, index, ending, block);
}

typedef struct {
    Weight weight;
    const int64_t *ids;
    element *out;
    long rows, depth;
} Lookup;

static void decode_rows(const void *work, Share *share, int member)
{
    const Lookup *o = work;
    const Weight *w = &o->weight;
    const Zeros zeros = group_zeros(w, 0);
    const float unit = unit_of(w->kind);
    const long size = step_bytes(w->kind);
    Number tiles[2 * TILE] __attribute__((aligned(64)));
    Factors factors = {0};
    float numbers[DEPTH], scales[SIDE], minima[SIDE] = {0};
    for (long r; (r = take(share, member)) >= 0;) {
        long block = o->ids[r] / WIDTH, side = o->ids[r] % WIDTH / SIDE, column = o->ids[r] % SIDE;
        const uint8_t *codes = (const uint8_t *)w->tiles + block * w->steps * size;
        for (long d = 0; d < o->depth; d += DEPTH) {
            decode(w, codes + d / DEPTH * size, &zeros, 0, DEPTH, tiles);
            for (int i = 0; i < DEPTH; i++) {
                if ((d + i) % w->group == 0) {
                    long at = block * w->groups + (d + i) / w->group;
                    load_factors(w, at, &factors);
                    storef(scales, SIDE, scales_of(w, &factors, at, (int)side));
                    if (w->minima) storef(minima, SIDE, minima_of(w, &factors, at, (int)side));
                }
                numbers[i] = number_value(tiles[side * TILE + number_place(i, (int)column)]) * unit * scales[column] - minima[column];
            }
            for (int i = 0; i < DEPTH && d + i < o->depth; i += SIDE)
                store(o->out + r * o->depth + d + i, o->depth - d - i, loadf(numbers + i, SIDE));
        }
    }
}

/* Rows `ids` of a weight in codes without zero points, each value rounded once: out [rows][depth]. */
void spd_rows(const Lookup *o, long threads)
{
    share_out(decode_rows, o, o->rows, 4.0 * (double)(o->rows * o->depth), threads);
}
