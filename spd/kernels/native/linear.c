/* Products with a packed weight, with what stands before and after them in a layer. */

#include "product.h"

/* Lay a weight [width][depth] out as [blocks of 32 columns][steps][2] right-side tiles, filled up with zeros.

   gated: the first half of the rows are gates, and each block has 16 of them and the 16 rows that go with
   them. packed: `parts(gated ? width / 2 : width, gated ? 16 : 32) * parts(depth, 32) * 1024` elements. */
void spd_pack(const bf16 *weight, bf16 *packed, long width, long depth, int gated, int threads)
{
    long steps = parts(depth, DEPTH), half = width / 2;
    long blocks = column_blocks(width, gated ? SILU : TO_BF16);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long k = 0; k < steps; k++)
            for (int side = 0; side < 2; side++) {
                bf16 *tile = packed + ((block * steps + k) * 2 + side) * TILE;
                memset(tile, 0, TILE * sizeof(bf16));
                for (int column = 0; column < SIDE; column++) {
                    long row = gated ? block * SIDE + column : block * WIDTH + side * SIDE + column;
                    if (row >= (gated ? half : width)) continue;
                    const bf16 *from = weight + (row + (gated && side ? half : 0)) * depth + k * DEPTH;
                    long count = depth - k * DEPTH < DEPTH ? depth - k * DEPTH : DEPTH;
                    for (long d = 0; d < count; d++) tile[d / 2 * DEPTH + column * 2 + d % 2] = from[d];
                }
            }
}

/* x [rows][heads][depth] (normed where `norm` is given) times a packed weight for each head, plus bias [width] and
   residual [rows][width] where they are given, rounded once: out [rows][heads][width], bfloat16 or float32 by
   `kind`; or with a gate half as wide. Rows and heads lie `x_row`, `x_head`, `out_row`, `out_head` apart; a
   residual is laid out like out and comes with one head. scratch: heads * parts(rows, 16) * parts(depth, 32) * 512
   elements. */
void spd_linear(const bf16 *x, const float *norm, float epsilon, const bf16 *weight, const float *bias,
    const bf16 *residual, void *out, long rows, long heads, long depth, long width, long x_row, long x_head,
    long out_row, long out_head, int kind, bf16 *scratch, int threads)
{
    if (!rows) return;
    long steps = parts(depth, DEPTH), blocks = column_blocks(width, kind), room = parts(rows, SIDE) * steps * TILE;
    double tiles = 2.0 * (double)(heads * blocks * steps);
    threads = threads_for(tiles * (30.0 + 8.0 * (double)parts(rows, SIDE)), threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < rows * heads; i++) {
            long r = i / heads, h = i % heads;
            place_row(x + r * x_row + h * x_head, norm, epsilon, depth,
                scratch + h * room + (r / SIDE * steps * SIDE + r % SIDE) * DEPTH);
        }
        tiles_begin(rows < SIDE ? (int)rows : SIDE, rows > SIDE && rows < WIDTH ? (int)rows - SIDE : SIDE);
#pragma omp for schedule(static) nowait
        for (long i = 0; i < heads * blocks; i++) {
            long h = i / blocks;
            void *to = kind == TO_FLOAT ? (void *)((float *)out + h * out_head) : (void *)((bf16 *)out + h * out_head);
            const Ending ending = {bias, residual, to, width, out_row, kind};
            multiply(scratch + h * room, rows, weight + i * steps * 2 * TILE, steps, &ending, i % blocks);
        }
        tiles_end();
    }
}

/* The root-mean-square norm of rows x [rows][depth] with scales norm [depth], plus residual where it is given. */
void spd_norm(const bf16 *x, const float *norm, float epsilon, const bf16 *residual, bf16 *out, long rows, long depth,
    int threads)
{
    threads = threads_for(0.2 * (double)(rows * depth), threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * depth, norm, epsilon, residual ? residual + r * depth : 0, depth, out + r * depth);
}
