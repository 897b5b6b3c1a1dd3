/* Products with a packed weight, with what stands before and after them in a layer. */

#include "codes.h"

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
void spd_pack(const element *weight, element *packed, long width, long depth, int gated, int threads)
{
    const Packing p = {weight, packed, width, depth, gated};
    share_out(pack, &p, column_blocks(width, gated ? SILU : TO_ELEMENT), threads);
}

typedef struct {
    const uint8_t *codes, *zeros;
    const void *scales;
    uint8_t *packed, *packed_zeros;
    void *packed_scales;
    long width, depth, groups;
    int gated, kind, wide;
} CodePacking;

static void pack_codes(const void *work, Share *share, int member)
{
    const CodePacking *p = work;
    long steps = parts(p->depth, DEPTH), size = step_bytes(p->kind);
    int paired = is_paired(p->kind), scale = p->wide ? 4 : 2;
    for (long block; (block = take(share, member)) >= 0;) {
        uint8_t *to = p->packed + block * steps * size;
        memset(to, 0, (size_t)(steps * size));
        for (int side = 0; side < 2; side++)
            for (int column = 0; column < SIDE; column++) {
                long row = row_of(p->width, p->gated, block, side, column);
                for (long g = 0; g < p->groups; g++) {
                    long at = (block * p->groups + g) * WIDTH + side * SIDE + column, from = row * p->groups + g;
                    uint8_t *place = (uint8_t *)p->packed_scales + at * scale;
                    if (row < 0) memset(place, 0, (size_t)scale);
                    else memcpy(place, (const uint8_t *)p->scales + from * scale, (size_t)scale);
                    if (p->zeros) p->packed_zeros[at] = row < 0 ? 0 : p->zeros[from];
                }
                for (long d = 0; row >= 0 && d < p->depth; d++) {
                    uint8_t *lane = to + d / DEPTH * size + column * 4;
                    int j = (int)(d % DEPTH) / 2, second = (int)d % 2;
                    if (paired) {
                        int code = p->codes[(row * p->depth + d) / 2] >> 4 * (d % 2) & 15, n = j % 2 * 2 + side;
                        lane[j / 2 * LANES + 2 * second + n / 2] |= (uint8_t)(code << 4 * (n % 2));
                    } else lane[j * LANES + 2 * side + second] = p->codes[row * p->depth + d];
                }
            }
    }
}

/* Lay codes [width][depth], two in a byte where a kind has four bits, with scales and zeros [width][groups] out as
   codes.h says; see `spd_pack`. */
void spd_pack_codes(const uint8_t *codes, const void *scales, const uint8_t *zeros, uint8_t *packed, void *packed_scales,
    uint8_t *packed_zeros, long width, long depth, long groups, int gated, int kind, int wide, int threads)
{
    const CodePacking p = {codes, zeros, scales, packed, packed_zeros, packed_scales, width, depth, groups, gated, kind, wide};
    share_out(pack_codes, &p, column_blocks(width, gated ? SILU : TO_ELEMENT), threads);
}

typedef struct {
    const element *x;
    const Weight *weight;
    const float *norm, *bias;
    const element *residual;
    void *out;
    Left *scratch;
    long rows, heads, depth, width, x_row, x_head, out_row, out_head;
    float epsilon;
    Activation act;
} Product;

static void place_rows(const void *work, Share *share, int member)
{
    const Product *p = work;
    long steps = parts(p->depth, DEPTH), room = parts(p->rows, SIDE) * steps * TILE;
    for (long i; (i = take(share, member)) >= 0;) {
        long r = i / p->heads, h = i % p->heads;
        place_left(p->weight, p->x + r * p->x_row + h * p->x_head, p->norm, p->epsilon, p->depth,
            p->scratch + h * room + left_row(r, steps));
    }
}

static void multiply_blocks(const void *work, Share *share, int member)
{
    const Product *p = work;
    long rows = p->rows, steps = parts(p->depth, DEPTH), blocks = column_blocks(p->width, p->act.kind);
    long room = parts(rows, SIDE) * steps * TILE;
    tiles_begin(rows < SIDE ? (int)rows : SIDE, rows > SIDE && rows < WIDTH ? (int)rows - SIDE : SIDE);
    for (long i; (i = take(share, member)) >= 0;) {
        long apart = i / blocks * p->out_head;
        void *to = p->act.kind == TO_FLOAT ? (void *)((float *)p->out + apart) : (void *)((element *)p->out + apart);
        const Ending ending = {p->bias, p->residual, to, p->width, p->out_row, p->act};
        multiply_weight(p->scratch + i / blocks * room, rows, p->weight, i, &ending, i % blocks);
    }
    tiles_end();
}

/* x [rows][heads][depth] (normed where `norm` is given) times a packed weight for each head, plus bias [width] and
   residual [rows][width] where they are given, rounded once: out [rows][heads][width], elements or float32 by
   `kind`; or what an activation makes of it. Rows and heads lie `x_row`, `x_head`, `out_row`, `out_head` apart; a
   residual is laid out like out and comes with one head. scratch: heads * parts(rows, 16) * parts(depth, 32) * 512
   elements. */
void spd_linear(const element *x, const float *norm, float epsilon, const Weight *weight, const float *bias,
    const element *residual, void *out, long rows, long heads, long depth, long width, long x_row, long x_head,
    long out_row, long out_head, int kind, float limit, float alpha, Left *scratch, int threads)
{
    if (!rows) return;
    const Product p = {x, weight, norm, bias, residual, out, scratch, rows, heads, depth, width, x_row, x_head, out_row,
        out_head, epsilon, {kind, limit, alpha}};
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
