/* Products with a packed weight, with what stands before and after them in a layer. */

#include "product.h"

typedef struct {
    const element *weight;
    element *packed;
    long width, depth;
    int gated;
} Packing;

static void pack(const void *work, Share *share, int member)
{
    const Packing *p = work;
    long steps = parts(p->depth, DEPTH), half = p->width / 2;
    for (long block; (block = take(share, member)) >= 0;)
        for (long k = 0; k < steps; k++)
            for (int side = 0; side < 2; side++) {
                element *tile = p->packed + ((block * steps + k) * 2 + side) * TILE;
                memset(tile, 0, TILE * sizeof(element));
                for (int column = 0; column < SIDE; column++) {
                    long row = p->gated ? block * SIDE + column : block * WIDTH + side * SIDE + column;
                    if (row >= (p->gated ? half : p->width)) continue;
                    const element *from = p->weight + (row + (p->gated && side ? half : 0)) * p->depth + k * DEPTH;
                    long count = p->depth - k * DEPTH < DEPTH ? p->depth - k * DEPTH : DEPTH;
                    for (int d = 0; d < count; d++) tile[tile_place(d, column)] = from[d];
                }
            }
}

/* Lay a weight [width][depth] out as [blocks of 32 columns][steps][2] right-side tiles, filled up with zeros.

   gated: the first half of the rows are gates, and each block has 16 of them and the 16 rows that go with
   them. packed: `parts(gated ? width / 2 : width, gated ? 16 : 32) * parts(depth, 32) * 1024` elements. */
void spd_pack(const element *weight, element *packed, long width, long depth, int gated, int threads)
{
    const Packing p = {weight, packed, width, depth, gated};
    share_out(pack, &p, column_blocks(width, gated ? SILU : TO_ELEMENT), threads);
}

typedef struct {
    const element *x, *weight;
    const float *norm, *bias;
    const element *residual;
    void *out;
    Left *scratch;
    long rows, heads, depth, width, x_row, x_head, out_row, out_head;
    float epsilon;
    int kind;
} Product;

static void place_rows(const void *work, Share *share, int member)
{
    const Product *p = work;
    long steps = parts(p->depth, DEPTH), room = parts(p->rows, SIDE) * steps * TILE;
    for (long i; (i = take(share, member)) >= 0;) {
        long r = i / p->heads, h = i % p->heads;
        place_row(p->x + r * p->x_row + h * p->x_head, p->norm, p->epsilon, p->depth,
            p->scratch + h * room + left_row(r, steps));
    }
}

static void multiply_blocks(const void *work, Share *share, int member)
{
    const Product *p = work;
    long rows = p->rows, steps = parts(p->depth, DEPTH), blocks = column_blocks(p->width, p->kind);
    long room = parts(rows, SIDE) * steps * TILE;
    tiles_begin(rows < SIDE ? (int)rows : SIDE, rows > SIDE && rows < WIDTH ? (int)rows - SIDE : SIDE);
    for (long i; (i = take(share, member)) >= 0;) {
        long apart = i / blocks * p->out_head;
        void *to = p->kind == TO_FLOAT ? (void *)((float *)p->out + apart) : (void *)((element *)p->out + apart);
        const Ending ending = {p->bias, p->residual, to, p->width, p->out_row, p->kind};
        multiply(p->scratch + i / blocks * room, rows, p->weight + i * steps * 2 * TILE, steps, &ending, i % blocks);
    }
    tiles_end();
}

/* x [rows][heads][depth] (normed where `norm` is given) times a packed weight for each head, plus bias [width] and
   residual [rows][width] where they are given, rounded once: out [rows][heads][width], elements or float32 by
   `kind`; or with a gate half as wide. Rows and heads lie `x_row`, `x_head`, `out_row`, `out_head` apart; a
   residual is laid out like out and comes with one head. scratch: heads * parts(rows, 16) * parts(depth, 32) * 512
   elements. */
void spd_linear(const element *x, const float *norm, float epsilon, const element *weight, const float *bias,
    const element *residual, void *out, long rows, long heads, long depth, long width, long x_row, long x_head,
    long out_row, long out_head, int kind, Left *scratch, int threads)
{
    if (!rows) return;
    const Product p = {x, weight, norm, bias, residual, out, scratch, rows, heads, depth, width, x_row, x_head, out_row,
        out_head, epsilon, kind};
    long blocks = heads * column_blocks(width, kind);
    double tiles = 2.0 * (double)(blocks * parts(depth, DEPTH));
    share_out(place_rows, &p, rows * heads, threads_for(0.2 * (double)(rows * heads * depth), threads));
    share_out(multiply_blocks, &p, blocks, threads_for(tiles * tile_time(rows), threads));
}

typedef struct {
    const element *x, *residual;
    const float *norm;
    element *out;
    long depth;
    float epsilon;
} Norm;

static void norm_rows(const void *work, Share *share, int member)
{
    const Norm *n = work;
    for (long r; (r = take(share, member)) >= 0;) {
        const element *residual = n->residual ? n->residual + r * n->depth : 0;
        norm_row(n->x + r * n->depth, n->norm, n->epsilon, residual, n->depth, n->out + r * n->depth);
    }
}

/* The root-mean-square norm of rows x [rows][depth] with scales norm [depth], plus residual where it is given. */
void spd_norm(const element *x, const float *norm, float epsilon, const element *residual, element *out, long rows, long depth,
    int threads)
{
    const Norm n = {x, residual, norm, out, depth, epsilon};
    share_out(norm_rows, &n, rows, threads_for(0.2 * (double)(rows * depth), threads));
}
