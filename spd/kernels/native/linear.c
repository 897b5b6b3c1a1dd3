/* Products with a packed weight, with what stands before and after them in a layer. */

#include <math.h>

#include "product.h"

/* The row of a weight of so many that column `column` of a block's side has, or -1; see `spd_pack`. */
static long row_of(long width, int gated, long block, int side, int column)
{
    long half = width / 2, row = gated ? block * SIDE + column : block * WIDTH + side * SIDE + column;
    return row >= (gated ? half : width) ? -1 : row + (gated && side ? half : 0);
}

typedef struct {
    const element *weight;
    element *packed;
    long width, depth;
    int gated;
} Packing;

static void pack(const void *work, Share *share, int member)
{
    const Packing *p = work;
    long steps = parts(p->depth, DEPTH);
    for (long block; (block = take(share, member)) >= 0;)
        for (long k = 0; k < steps; k++)
            for (int side = 0; side < 2; side++) {
                element *tile = p->packed + ((block * steps + k) * 2 + side) * TILE;
                memset(tile, 0, TILE * sizeof(element));
                for (int column = 0; column < SIDE; column++) {
                    long row = row_of(p->width, p->gated, block, side, column), rest = p->depth - k * DEPTH;
                    const element *from = p->weight + row * p->depth + k * DEPTH;
                    for (int d = 0; row >= 0 && d < DEPTH && d < rest; d++) tile[tile_place(d, column)] = from[d];
                }
            }
}

/* Lay a weight [width][depth] out as [blocks of 32 columns][steps][2] right-side tiles, filled up with zeros.

   gated: the first half of the rows are gates, and each block has 16 of them and the 16 rows that go with
   them. packed: `parts(gated ? width / 2 : width, gated ? 16 : 32) * parts(depth, 32) * 1024` elements. */
void spd_pack(const Packing *p, long threads)
{
    share_out(pack, p, column_blocks(p->width, p->gated ? SILU : TO_ELEMENT), INFINITY, threads);
}

typedef struct {
    const uint8_t *codes;
    uint8_t *packed;
    long width, depth;
    int gated, kind;
} CodePacking;

static void pack_codes(const void *work, Share *share, int member)
{
    const CodePacking *p = work;
    long steps = parts(p->depth, DEPTH), size = step_bytes(p->kind);
    const int paired = is_paired(p->kind), upper = upper_bits(p->kind), lanes = upper ? 4 / upper : 1;
    for (long block; (block = take(share, member)) >= 0;) {
        uint8_t *to = p->packed + block * steps * size;
        memset(to, 0, (size_t)(steps * size));
        for (int side = 0; side < 2; side++)
            for (int column = 0; column < SIDE; column++) {
                long row = row_of(p->width, p->gated, block, side, column);
                for (long d = 0; row >= 0 && d < p->depth; d++) {
                    int z = (int)(d % DEPTH) / 4;
                    uint8_t *own = to + d / DEPTH * size + column * 4 + d % 2 * 2 + d % 4 / 2;
                    long place = row * p->depth + d;
                    if (!paired) {
                        own[(2 * z + side) * LANES] = p->codes[place];
                        continue;
                    }
                    int code = upper ? p->codes[place] : p->codes[place / 2] >> 4 * (d % 2);
                    own[z * LANES] |= (uint8_t)((code & 15) << 4 * side);
                    if (upper)
                        own[(8 + z / lanes) * LANES] |= (uint8_t)(code >> 4 << upper * (2 * (z % lanes) + side));
                }
            }
    }
}

/* Lay codes [width][depth], two in a byte where a kind has four bits, out as weight.h says; see `spd_pack`. */
void spd_pack_codes(const CodePacking *p, long threads)
{
    share_out(pack_codes, p, column_blocks(p->width, p->gated ? SILU : TO_ELEMENT), INFINITY, threads);
}

typedef struct {
    const element *x;
    const float *norm;
    Left *scratch;
    Weight weight;
    Ending ending;
    long rows, heads, depth, x_row, x_head, out_head;
    float epsilon;
} Product;

static Rows rows_of(const Product *p)
{
    long tiles = p->heads * parts(p->rows, SIDE) * parts(p->depth, DEPTH);
    return (Rows){p->scratch, (float *)(p->scratch + tiles * TILE)};
}

static void place_rows(const void *work, Share *share, int member)
{
    const Product *p = work;
    long room = parts(p->rows, SIDE) * parts(p->depth, DEPTH);
    for (long i; (i = take(share, member)) >= 0;) {
        long r = i / p->heads, h = i % p->heads;
        place_left(&p->weight, p->x + r * p->x_row + h * p->x_head, p->norm, p->epsilon, p->depth,
            rows_at(rows_of(p), h * room), r);
    }
}

static void multiply_blocks(const void *work, Share *share, int member)
{
    const Product *p = work;
    long rows = p->rows, blocks = column_blocks(p->ending.width, p->ending.act.kind);
    long room = parts(rows, SIDE) * parts(p->depth, DEPTH);
    tiles_begin(rows < SIDE ? (int)rows : SIDE, rows > SIDE && rows < WIDTH ? (int)rows - SIDE : SIDE);
    for (long i; (i = take(share, member)) >= 0;) {
        Ending ending = p->ending;
        size_t size = ending.act.kind == TO_FLOAT ? sizeof(float) : sizeof(element);
        ending.out = (char *)ending.out + (size_t)(i / blocks * p->out_head) * size;
        multiply_weight(rows_at(rows_of(p), i / blocks * room), rows, &p->weight, i, &ending, i % blocks);
    }
    tiles_end();
}

/* x [rows][heads][depth] (normed where `norm` is given) times a packed weight for each head, and its ending: out
   [rows][heads][width]. Rows and heads lie `x_row`, `x_head`, `ending.stride`, `out_head` apart; a residual is laid out
   like out and comes with one head. scratch: of heads * parts(rows, 16) * parts(depth, 32) tiles, 512 elements and behind all of
   them 16 floats each. */
void spd_linear(const Product *p, long threads)
{
    if (!p->rows) return;
    long items = p->rows * p->heads, blocks = p->heads * column_blocks(p->ending.width, p->ending.act.kind);
    double tiles = 2.0 * (double)(blocks * parts(p->depth, DEPTH));
    share_out(place_rows, p, items, 0.2 * (double)(items * p->depth), threads);
    share_out(multiply_blocks, p, blocks, tiles * tile_time(p->rows), threads);
}

typedef struct {
    const element *x, *residual;
    const float *norm;
    element *out;
    long rows, depth;
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
void spd_norm(const Norm *n, long threads)
{
    share_out(norm_rows, n, n->rows, 0.2 * (double)(n->rows * n->depth), threads);
}
